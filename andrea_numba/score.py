"""How likely a text is to a model: `andrea-generate --score FILE`.

The text is scored as what would follow an empty prompt, in windows that do not overlap, each
token once; so bits per byte count every byte, and models with other tokenizers compare.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import model
from .buffers import PRECISIONS, Buffers
from .config import ModelConfig
from .data import Dataset, prepare
from .errors import UserError
from .evaluate import bits_per_byte
from .sources import open_sources


@dataclass
class TextScore:
    """Sums over the tokens of a text: `nats` of -log p, and bytes of UTF-8."""

    tokens: int = 0
    nats: float = 0.0
    bytes: int = 0

    def summary(self) -> dict[str, float]:
        """What is printed: loss in nats per token, its exponential, bits per byte."""
        loss = self.nats / self.tokens
        return {"tokens": self.tokens, "bytes": self.bytes, "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),
                "bits_per_byte": bits_per_byte(loss, self.tokens, self.bytes)}


class Scorer:
    """Scores tokens with a model whose parameters `p` lie in `memory`, a window at a time."""

    def __init__(self, config: ModelConfig, p, ops, memory):
        self._config, self._p, self._ops = config, p, ops
        self._buffers = Buffers(config, 1, config.context, training=False, memory=memory)
        shape = config.context, config.padded_vocab_size
        self._logits = memory.empty(math.prod(shape), PRECISIONS[memory.precision]).reshape(shape)
        self._losses = memory.empty(config.context)
        self._transfers = memory.transfers(config.context)

    def score(self, tokens, tokenizer, receive: Callable[[np.ndarray, np.ndarray], None]
              ) -> TextScore:
        """The score of `tokens` (`len` and slices); `receive` gets the ids of each window and
        -log p of each of them in nats, float32."""
        total, before = TextScore(), tokenizer.start_token
        for start in range(0, len(tokens), self._config.context):
            targets = np.asarray(tokens[start:start + self._config.context], np.int32)
            ids = np.concatenate(([before], targets[:-1])).astype(np.int32)
            before = targets[-1]
            self._window(ids, targets, lambda losses, targets=targets: self._take(
                total, tokenizer, targets, losses, receive))
        self._transfers.finish()
        return total

    def _window(self, ids: np.ndarray, targets: np.ndarray, receive) -> None:
        length = len(ids)
        ids, targets = self._transfers.upload(ids[None], targets)
        a = self._buffers.views(1, length)
        model.forward(self._ops, self._p, a, ids)
        model.head(self._ops, self._p, self._logits[:length], a.ln_f)
        losses = self._losses[:length]
        self._ops.cross_entropy.forward(losses, self._logits[:length], targets,
                                        self._config.vocab_size)
        self._transfers.download(losses, receive)

    def _take(self, total: TextScore, tokenizer, ids, losses, receive) -> None:
        if not np.isfinite(losses).all():
            raise UserError("the model's scores are not finite (NaN or infinity): its weights are "
                            "broken; use an earlier checkpoint")
        total.tokens += len(ids)
        total.nats += float(losses.sum(dtype=np.float64))
        total.bytes += tokenizer.count_text(ids)[0]
        receive(ids, losses)


def open_text(file: str, tokenizer) -> Dataset:
    """A text file, or `.jsonl` documents, to be scored: the ids are its part `train`. UserError
    for one that cannot be read, or holds no text or characters that the tokenizer does not know."""
    return prepare(open_sources([file]), tokenizer.name, 0.0, 0, tokenizer=tokenizer)


def write_scores(text: Dataset, scorer: Scorer, as_json: bool, write: Callable[[str], None]
                 ) -> str:
    """Score a text; `write` gets a line for each token. Returns the summary in one line.

    A line is `log p <TAB> id <TAB> text`, log p in nats, the text as a JSON string. With `as_json`
    it is an object of the same, and the last one holds the summary.
    """
    tokenizer = text.tokenizer
    texts: dict[int, str] = {}

    def receive(ids: np.ndarray, losses: np.ndarray) -> None:
        lines = []
        for token, nats in zip(ids.tolist(), losses.tolist(), strict=True):
            if token not in texts:
                # A piece of a character is shown as Python shows bytes.
                texts[token] = json.dumps(tokenizer.token_bytes(token)
                                          .decode("utf-8", "backslashreplace"))
            shown = texts[token]
            lines.append(f'{{"log_p": {-nats:.6f}, "id": {token}, "text": {shown}}}\n' if as_json
                         else f"{-nats:.6f}\t{token}\t{shown}\n")
        write("".join(lines))

    summary = scorer.score(text.train, tokenizer, receive).summary()
    if as_json:
        write(json.dumps({"summary": summary}) + "\n")
    return (f"{summary['tokens']:,} tokens, {summary['bytes']:,} bytes; loss "
            f"{summary['loss']:.4f} nats per token, perplexity {summary['perplexity']:.4g}, "
            f"{summary['bits_per_byte']:.4f} bits per byte")
