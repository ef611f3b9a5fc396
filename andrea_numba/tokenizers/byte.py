"""The byte tokenizer: ids 0-255 are the bytes of the UTF-8 text, id 256 separates documents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import UserError
from .errors import checked_ids, lone_surrogates

_MARK = 256


class ByteTokenizer:
    """Knows every text; see the package's docstring for the interface."""

    name = "byte"
    vocab_size = 257
    document_mark = _MARK

    def __init__(self, start_token: int = ord("\n")):
        self.start_token = start_token

    @classmethod
    def build(cls, chunks: Iterable[str], documents: int) -> ByteTokenizer:
        # A single document is trained without any mark, so a mark would start nothing.
        return cls(_MARK if documents > 1 else ord("\n"))

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> ByteTokenizer:
        start = d.get("start_token")
        if type(start) is not int or not 0 <= start < cls.vocab_size:
            raise UserError(f"saved byte tokenizer is damaged: start_token is {start!r}, "
                            "expected 0 to 256")
        return cls(start)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "start_token": self.start_token}

    def encode(self, text: str) -> np.ndarray:
        """The UTF-8 bytes of `text` as int32 ids; UserError for a lone surrogate."""
        try:
            return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)
        except UnicodeEncodeError:
            raise lone_surrogates(text) from None

    def decode(self, ids) -> str:
        """The text of `ids`; bytes that are not UTF-8 read as U+FFFD."""
        ids = checked_ids(ids, self.vocab_size)
        documents = np.split(ids, np.flatnonzero(ids == _MARK))
        # Every piece but the first starts with its mark.
        pieces = [documents[0], *(piece[1:] for piece in documents[1:])]
        joined = b"\n\n".join(piece.astype(np.uint8).tobytes() for piece in pieces)
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        checked_ids([token], self.vocab_size)
        return b"\n\n" if token == _MARK else bytes([token])

    def count_text(self, ids: np.ndarray) -> tuple[int, int]:
        text = ids[ids != _MARK]
        # Every character has exactly one byte that is not a continuation byte 10xxxxxx.
        return len(text), int(np.count_nonzero((text & 0xC0) != 0x80))
