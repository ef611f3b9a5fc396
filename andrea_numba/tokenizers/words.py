"""Text as words: where it can be cut without changing its ids, and which words it holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

# Letters of all scripts; left out are signs and punctuation: U+0080-BF, U+2000-2BFF, U+2E00-303F.
LETTER = "A-Za-z\u00c0-\u1fff\u2c00-\u2dff\u3040-\U0010ffff"
# A word takes the one space before it along, as most words follow one. Whatever the text, a word
# is at most 60 characters long, and a space stands at its beginning or the word is all space.
WORD = re.compile(rf" ?[{LETTER}]{{1,48}}(?:'[{LETTER}]{{1,8}})?| ?[0-9]{{1,48}}"
                  rf"| ?[^\s{LETTER}0-9]{{1,48}}|\s{{1,48}}(?!\S)|\s{{1,48}}")
LONGEST_WAIT = 1 << 16  # characters without a place to cut
MAX_WORDS = 1 << 21  # different ones in memory, some hundred bytes each


def whole_words(chunks: Iterable[str], names: Sequence[str] = ()) -> Iterator[str]:
    """The same text in chunks that end before a space after something that is no space.

    No token of the tokenizers here goes across such a place, so the ids of the chunks, joined,
    are the ids of the text. Where none comes for long, as in text without spaces, it is cut anyway,
    but not inside any of the `names`, which hold no space.
    """
    rest = ""
    for chunk in chunks:
        text = rest + chunk
        at = text.rfind(" ")
        while at > 0 and text[at - 1].isspace():
            at = text.rfind(" ", 0, at)
        if at <= 0:
            at = len(text) - _begun(text, names) if len(text) > LONGEST_WAIT else 0
        if at:
            yield text[:at]
        rest = text[at:]
    if rest:
        yield rest


def _begun(text: str, names: Sequence[str]) -> int:
    """The length of the longest beginning of a name that ends the text."""
    return max((length for name in names for length in range(1, len(name))
                if text.endswith(name[:length])), default=0)


def count_words(chunks: Iterable[str], most: int = MAX_WORDS) -> Counter[str]:
    """How often each word stands in a text given in chunks of whole words.

    When there are more than `most` different ones, the rarest so far are forgotten, so memory is
    bounded whatever the text.
    """
    counts: Counter[str] = Counter()
    for chunk in chunks:
        counts.update(WORD.findall(chunk))
        rare = 0
        while len(counts) > (most // 2 if rare else most):
            rare += 1
            counts = Counter({word: n for word, n in counts.items() if n > rare})
    return counts
