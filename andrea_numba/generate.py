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
    for token, in generate_rows(decoder, ids, max_tokens, sampling, [rng], vocab_size):
        yield token


def generate_rows(
    decoder, ids: np.ndarray, max_tokens: int, sampling: Sampling,
    rngs: Sequence[np.random.Generator], vocab_size: int,
) -> Iterator[list[int]]:
    """As `generate_ids`, for several samples at once: a decoder of as many sequences reads each
    weight once for all of them."""
    if len(rngs) == 1:
        def prefill(rows):
            return [decoder.prefill(rows[0])]

        def step(tokens):
            return [decoder.step(int(tokens[0]))]
    else:
        prefill, step = decoder.prefill_rows, decoder.step_rows
    context = decoder.context
    windows = np.empty((len(rngs), context + 1), dtype=np.int32)  # of the model, and a token more
    length = min(len(ids), context)
    windows[:, :length] = ids[len(ids) - length :]
    for count in range(max_tokens):
        if count == 0:
            logits = prefill(windows[:, :length])
        elif length <= context:
            logits = step(windows[:, length - 1])
        else:
            keep = max(1, context // 2)
            windows[:, :keep] = windows[:, length - keep : length].copy()
            length = keep
            logits = prefill(windows[:, :length])
        tokens = [sample(scores[:vocab_size], window[:length], sampling, rng)
                  for scores, window, rng in zip(logits, windows, rngs, strict=True)]
        windows[:, length] = tokens
        length += 1
        yield tokens


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
    return generate_texts(decoder, tokenizer, prompt, max_tokens, sampling, [rng], stop,
                          on_text)[0]


def generate_texts(
    decoder, tokenizer, prompt: str, max_tokens: int, sampling: Sampling,
    rngs: Sequence[np.random.Generator], stop: Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
) -> list[GeneratedText]:
    """As `generate_text`, several samples at once; `on_text` receives the text of the first."""
    ids = prompt_ids(tokenizer, prompt)
    samples = [_Sample(tokenizer, stop, None if index else on_text)
               for index in range(len(rngs))]
    for tokens in generate_rows(decoder, ids, max_tokens, sampling, rngs, tokenizer.vocab_size):
        for one, token in zip(samples, tokens, strict=True):
            one.push(token)
        if all(one.filtered.stopped_by is not None for one in samples):
            break
    used = min(len(ids), decoder.context)
    return [GeneratedText(one.finish(), one.tokens, one.filtered.stopped_by, len(ids), used)
            for one in samples]


class _Sample:
    """The text of a sample as its tokens are drawn; those after a stop string do not count."""

    def __init__(self, tokenizer, stop: Sequence[str], on_text: Callable[[str], None] | None):
        self.tokens: list[int] = []
        self.filtered = StopFilter(stop)
        self._characters, self._on_text = TextStream(tokenizer), on_text
        self._pieces: list[str] = []

    def push(self, token: int) -> None:
        if self.filtered.stopped_by is None:
            self.tokens.append(token)
            self._emit(self.filtered.push(self._characters.push(token)))

    def finish(self) -> str:
        """The whole text, once no token comes any more."""
        if self.filtered.stopped_by is None:
            self._emit(self.filtered.push(self._characters.flush()))
            self._emit(self.filtered.flush())
        return "".join(self._pieces)

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._on_text:
                self._on_text(piece)


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
