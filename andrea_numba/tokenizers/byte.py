"""The byte tokenizer: ids 0-255 are the bytes of the UTF-8 text, id 256 separates documents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .pieces import DOCUMENTS_APART, PieceTokenizer, checked_start

BYTES = [bytes([value]) for value in range(256)]
MARK = 256


def first_token(documents: int) -> int:
    """The start token where ids 0-255 are bytes and 256 is the mark."""
    # A single document is trained without any mark, so a mark would start nothing.
    return MARK if documents > 1 else ord("\n")


class ByteTokenizer(PieceTokenizer):
    """Knows every text; see the package's docstring for the interface."""

    name = "byte"

    def __init__(self, start_token: int = ord("\n")):
        super().__init__([*BYTES, DOCUMENTS_APART], MARK, start_token)

    @classmethod
    def build(cls, chunks: Iterable[str], documents: int) -> ByteTokenizer:
        return cls(first_token(documents))

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> ByteTokenizer:
        return cls(checked_start(d.get("start_token"), MARK + 1, cls.name))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "start_token": self.start_token}

    def encode_bytes(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(np.int32)
