"""Tokenizers: text to token ids and back, without loss.

A tokenizer has

- `name`; `vocab_size`: ids are 0 .. vocab_size - 1;
- `document_mark`: the id that separates documents, or None. It is never the result of encoding
  text, so a text that holds `<|endoftext|>` or anything like it is ordinary text;
- `start_token`: the id an empty prompt stands for: the document mark if the tokenizer was built
  on several documents, otherwise a line end (or a space, or the first id, if there is none);
- `encode(text) -> int32 [n]`; `decode(ids) -> str`, where the mark reads as a blank line;
- `token_bytes(id) -> bytes`: the UTF-8 bytes the id stands for (maybe part of a character);
- `count_text(ids) -> (bytes, characters)` of the text behind the ids, marks not counted;
- `to_dict()`, which JSON can hold, and `tokenizer_from_dict` for the way back.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from ..errors import UserError
from .byte import ByteTokenizer
from .char import CharTokenizer
from .errors import UnknownCharacters

Tokenizer = ByteTokenizer | CharTokenizer
TOKENIZERS = {"byte": ByteTokenizer, "char": CharTokenizer}

__all__ = ["TOKENIZERS", "TextStream", "Tokenizer", "UnknownCharacters", "build_tokenizer",
           "tokenizer_from_dict"]


def build_tokenizer(name: str, chunks: Iterable[str], documents: int) -> Tokenizer:
    """The tokenizer `name` for a text, given as chunks, that holds so many documents."""
    if name not in TOKENIZERS:
        raise UserError(f"unknown tokenizer {name!r}; known: {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name].build(chunks, documents)


def tokenizer_from_dict(d: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose `to_dict()` is `d`; UserError when `d` is no such thing."""
    name = d.get("name") if isinstance(d, dict) else None
    if not isinstance(name, str) or name not in TOKENIZERS:
        raise UserError(f"saved tokenizer is damaged or from another version: name is {name!r}; "
                        f"known: {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name].from_dict(d)


class TextStream:
    """Decodes ids one by one; the pieces joined are exactly `decode` of all ids.

    Bytes of an unfinished character are held back until it is complete or can no longer become so.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(int(token)))

    def flush(self) -> str:
        """What is still held back; the stream can then be used again."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
