"""What tokenizers share whose ids stand for strings of bytes: everything but finding the ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.common.cache import njit

from ..errors import UserError
from .errors import checked_ids, lone_surrogates

DOCUMENTS_APART = b"\n\n"  # what a mark between documents reads as


@njit(nogil=True)
def _join(ids, starts, pieces, joined):
    at = 0
    for token in ids:
        for byte in range(starts[token], starts[token + 1]):
            joined[at] = pieces[byte]
            at += 1


class PieceTokenizer:
    """Ids that stand for `pieces`, bytes each; a subclass has `name` and `encode_bytes`.

    Knows every text and, through `encode_bytes` and `decode_bytes`, every string of bytes. See
    the package's docstring for the rest of the interface.
    """

    name: str
    special_names: Sequence[str] = ()

    def __init__(self, pieces: Sequence[bytes], document_mark: int | None, start_token: int):
        self.document_mark, self.start_token = document_mark, start_token
        self.vocab_size = len(pieces)
        self._pieces = pieces
        self._starts = np.append(0, np.cumsum([len(piece) for piece in pieces]))
        self._bytes = np.frombuffer(b"".join(pieces), np.uint8)
        # Every character has exactly one byte that is not a continuation byte 10xxxxxx.
        before = np.append(0, np.cumsum((self._bytes & 0xC0) != 0x80))
        self._n_bytes, self._n_characters = np.diff(self._starts), np.diff(before[self._starts])

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """int32 ids of any string of bytes."""
        raise NotImplementedError

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of the UTF-8 bytes of `text`; UserError for a lone surrogate."""
        try:
            return self.encode_bytes(text.encode("utf-8"))
        except UnicodeEncodeError:
            raise lone_surrogates(text) from None

    def decode_bytes(self, ids) -> bytes:
        """The pieces of `ids`, joined."""
        ids = checked_ids(ids, self.vocab_size)
        joined = np.empty(self._n_bytes[ids].sum(), np.uint8)
        _join(ids.astype(np.int32), self._starts, self._bytes, joined)
        return joined.tobytes()

    def decode(self, ids) -> str:
        """The text of `ids`; bytes that are not UTF-8 read as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        checked_ids([token], self.vocab_size)
        return self._pieces[token]

    def count_text(self, ids: np.ndarray) -> tuple[int, int]:
        ids = ids if self.document_mark is None else ids[ids != self.document_mark]
        return int(self._n_bytes[ids].sum()), int(self._n_characters[ids].sum())


def checked_start(start: object, vocab_size: int, name: str) -> int:
    """A saved start token, or UserError for what is none."""
    if type(start) is not int or not 0 <= start < vocab_size:
        raise UserError(f"saved {name} tokenizer is damaged: start_token is {start!r}, expected 0 "
                        f"to {vocab_size - 1}")
    return start
