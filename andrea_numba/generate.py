"""Text from a model: the token loop, stop strings and streaming.

Learned absolute positions cannot slide by one token: every position's keys and values would
change. So when the window is full the loop keeps its last half and reads that again from position
0. This is part of the definition of the generated text, and the same with and without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .sampler import Sampling, sample
from .tokenizers import TextStream


@dataclass(frozen=True)
class GeneratedText:
    """One sample. `text` is the continuation alone, without the prompt and the stop string."""

    text: str
    tokens: list[int]  # every id drawn, those of the stop string included
    stopped_by: str | None  # the stop string met; None when all tokens were drawn
    prompt_tokens: int
    prompt_tokens_used: int  # at most the context


def prompt_ids(tokenizer, prompt: str) -> np.ndarray:
    """Token ids [n >= 1] of the prompt; an empty one is the tokenizer's start token.

    Raises the tokenizer's UserError for characters it does not know.
    """
    ids = np.asarray(tokenizer.encode(prompt), dtype=np.int32)
    return ids if len(ids) else np.array([tokenizer.start_token], dtype=np.int32)


def generate_ids(
    decoder, ids: np.ndarray, max_tokens: int, sampling: Sampling, rng: np.random.Generator,
    vocab_size: int,
) -> Iterator[int]:
    """Yield `max_tokens` ids below `vocab_size` that continue `ids` [n >= 1].

    Works only as far as it is consumed. Raises UserError when the model's scores are not finite.
    """
    context = decoder.context
    window = np.empty(context + 1, dtype=np.int32)  # what the model sees, and one token more
    length = min(len(ids), context)
    window[:length] = ids[len(ids) - length :]
    for count in range(max_tokens):
        if count == 0:
            logits = decoder.prefill(window[:length])
        elif length <= context:
            logits = decoder.step(int(window[length - 1]))
        else:
            keep = max(1, context // 2)
            window[:keep] = window[length - keep : length].copy()
            length = keep
            logits = decoder.prefill(window[:length])
        token = sample(logits[:vocab_size], window[:length], sampling, rng)
        window[length] = token
        length += 1
        yield token


def generate_text(
    decoder, tokenizer, prompt: str, max_tokens: int, sampling: Sampling,
    rng: np.random.Generator, stop: Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
) -> GeneratedText:
    """Continue `prompt` by `max_tokens` tokens, or up to the first of the `stop` strings.

    `on_text` receives the text in pieces as it becomes certain: never half a character, never a
    piece of a stop string; the pieces joined are `text`. A prompt longer than the context
    conditions the text by its last `decoder.context` tokens. Raises UserError for a prompt that
    the tokenizer cannot encode and for a broken model.
    """
    ids = prompt_ids(tokenizer, prompt)
    characters, filtered = TextStream(tokenizer), StopFilter(stop)
    pieces: list[str] = []
    tokens: list[int] = []

    def emit(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if on_text:
                on_text(piece)

    for token in generate_ids(decoder, ids, max_tokens, sampling, rng, tokenizer.vocab_size):
        tokens.append(token)
        emit(filtered.push(characters.push(token)))
        if filtered.stopped_by is not None:
            break
    else:
        emit(filtered.push(characters.flush()))
        emit(filtered.flush())
    return GeneratedText("".join(pieces), tokens, filtered.stopped_by, len(ids),
                         min(len(ids), decoder.context))


class StopFilter:
    """Passes text on up to the first stop string, holding back what may become one.

    The first to end wins, of those the longest: so the result does not depend on how the text is
    cut into pieces. `stopped_by` names it once met; after that nothing is passed on.
    """

    def __init__(self, stop: Sequence[str]):
        self.stop = tuple(stop)  # none of them empty
        self.stopped_by: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Add `text`; return what is now certain to stand before any stop string."""
        if self.stopped_by is not None:
            return ""
        self._held += text
        found = [(start, s) for s in self.stop if (start := self._held.find(s)) >= 0]
        if found:
            start, self.stopped_by = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            return self._held[:start]
        certain = len(self._held) - self._undecided()
        passed, self._held = self._held[:certain], self._held[certain:]
        return passed

    def flush(self) -> str:
        """The end of the text: what was held back, if no stop string was met."""
        return "" if self.stopped_by is not None else self._held

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self.stop), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self.stop):
                return size
        return 0
