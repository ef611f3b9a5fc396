"""The character tokenizer: one id for each distinct character of the training text, sorted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import UserError
from .errors import UnknownCharacters, checked_ids, lone_surrogates

_CODE_POINTS = 0x110000


def _code_points(text: str) -> np.ndarray:
    """uint32 [len(text)]."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.uint32)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


class CharTokenizer:
    """Knows the characters it was built from; see the package's docstring for the interface.

    The document mark exists only if the text held more than one document, and is then the last
    id: a text in one file has exactly its own characters as its vocabulary.
    """

    name = "char"
    special_names = ()

    def __init__(self, characters: str, document_mark: bool):
        self.characters = characters
        self.document_mark = len(characters) if document_mark else None
        self.vocab_size = len(characters) + document_mark
        starts = [self.document_mark, characters.find("\n"), characters.find(" "), 0]
        self.start_token = next(s for s in starts if s is not None and s >= 0)
        self._pieces = [*characters, "\n\n"][:self.vocab_size]
        points = _code_points(characters).astype(np.int64)
        # One entry past the largest known character stands for everything above it.
        self._id_of = np.full(int(points[-1]) + 2, -1, np.int32)
        self._id_of[points] = np.arange(len(characters), dtype=np.int32)
        byte_length = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
        self._byte_length = np.append(byte_length, 0)[:self.vocab_size]

    @classmethod
    def build(cls, chunks: Iterable[str], documents: int) -> CharTokenizer:
        seen = np.zeros(_CODE_POINTS, bool)
        for chunk in chunks:
            seen[_code_points(chunk)] = True
            if seen[0xD800:0xE000].any():
                raise lone_surrogates(chunk)
        if not seen.any():
            raise UserError("no character to build a char tokenizer from: the text is empty")
        return cls("".join(map(chr, np.flatnonzero(seen).tolist())), document_mark=documents > 1)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> CharTokenizer:
        characters, mark = d.get("characters"), d.get("document_mark")
        good = (isinstance(characters, str) and characters and isinstance(mark, bool)
                and list(characters) == sorted(set(characters))
                and not any("\ud800" <= c <= "\udfff" for c in characters))
        if not good:
            raise UserError("saved char tokenizer is damaged: expected `characters`, sorted and "
                            "distinct, and `document_mark`, true or false")
        return cls(characters, mark)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "characters": self.characters,
                "document_mark": self.document_mark is not None}

    def encode(self, text: str) -> np.ndarray:
        """int32 ids [len(text)]; UnknownCharacters for what is not in the vocabulary."""
        points = _code_points(text)
        ids = self._id_of[np.minimum(points, len(self._id_of) - 1)]
        if ids.size and ids.min() < 0:
            where = np.flatnonzero(ids < 0)
            _, first = np.unique(points[where], return_index=True)
            raise UnknownCharacters([(text[p], p) for p in sorted(where[first].tolist())])
        return ids

    def decode(self, ids) -> str:
        ids = checked_ids(ids, self.vocab_size)
        return "".join(map(self._pieces.__getitem__, ids.tolist()))

    def token_bytes(self, token: int) -> bytes:
        checked_ids([token], self.vocab_size)
        return self._pieces[token].encode("utf-8")

    def count_text(self, ids: np.ndarray) -> tuple[int, int]:
        ids = ids if self.document_mark is None else ids[ids != self.document_mark]
        return int(self._byte_length[ids].sum()), len(ids)
