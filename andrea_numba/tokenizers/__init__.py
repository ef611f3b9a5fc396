"""Tokenizers: text to token ids and back, without loss.

A tokenizer has

- `name`; `vocab_size`: ids are 0 .. vocab_size - 1;
- `document_mark`: the id that separates documents, or None. It is not the result of encoding
  text: one that holds `<|endoftext|>` or anything like it is ordinary text, unless
- `special_names`, the special tokens whose names in a text become their ids, holds it
  (`read_special_tokens`; empty at first);
- `start_token`: the id an empty prompt stands for: the document mark if the tokenizer was built
  on several documents, otherwise a line end (or a space, or the first id, if there is none);
- `encode(text) -> int32 [n]`; `decode(ids) -> str`, where the mark reads as a blank line;
- `token_bytes(id) -> bytes`: the UTF-8 bytes the id stands for (maybe part of a character);
- `count_text(ids) -> (bytes, characters)` of the text behind the ids, marks not counted;
- `to_dict()`, which JSON can hold, and `tokenizer_from_dict` for the way back.

README.md in this folder describes each of them.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import bounded_json
from ..errors import UserError
from .bpe import BpeTokenizer
from .byte import ByteTokenizer
from .char import CharTokenizer
from .errors import UnknownCharacters, lone_surrogates
from .harris import HarrisTokenizer
from .words import whole_words

Tokenizer = ByteTokenizer | CharTokenizer | HarrisTokenizer | BpeTokenizer
LEARNED = {"harris": HarrisTokenizer, "bpe": BpeTokenizer}  # of as many ids as are asked for
TOKENIZERS = {"byte": ByteTokenizer, "char": CharTokenizer, **LEARNED}
# Of a tokenizer.json. One of 200,000 tokens and 446,000 merges, each a list of two, has 22 MiB and
# 2.2 million quotes. Whatever the file holds, reading takes less than 700 MiB.
MAX_FILE_BYTES = 32 << 20
MAX_FILE_MARKS = 1 << 22

__all__ = ["LEARNED", "TOKENIZERS", "TextStream", "Tokenizer", "UnknownCharacters",
           "build_tokenizer", "read_special_tokens", "read_tokenizer", "tokenizer_from_dict",
           "whole_words"]


def build_tokenizer(name: str, chunks: Iterable[str], documents: int,
                    vocab_size: int = 0) -> Tokenizer:
    """The tokenizer `name` for a text, given as chunks, that holds so many documents; or the one
    that a file of that name holds.

    A learned one has exactly `vocab_size` ids, or what the text has up to a limit if that is 0;
    it takes each chunk for whole words.
    """
    if name in LEARNED:
        return LEARNED[name].build(_valid(chunks), documents, vocab_size)
    if name in TOKENIZERS:
        return TOKENIZERS[name].build(chunks, documents)
    return read_tokenizer(name)


def _valid(chunks: Iterable[str]) -> Iterator[str]:
    for chunk in chunks:
        try:
            chunk.encode()
        except UnicodeEncodeError:
            raise lone_surrogates(chunk) from None
        yield chunk


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a JSON file: a byte-level BPE as Hugging Face writes it (tokenizer.json),
    or what `to_dict` gives. UserError for anything else."""
    try:
        if not Path(path).is_file():
            raise UserError(f"--tokenizer {path}: expected {', '.join(TOKENIZERS)}, or a file like "
                            "tokenizer.json")
        with open(path, "rb") as file:
            saved = bounded_json.loads(file.read(MAX_FILE_BYTES + 1), MAX_FILE_BYTES,
                                       MAX_FILE_MARKS)
    except OSError as error:
        raise UserError(f"cannot read tokenizer {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"tokenizer {path} is not a JSON file of a tokenizer: {error}") from None
    if isinstance(saved, dict) and "model" in saved:
        return BpeTokenizer(saved)
    return tokenizer_from_dict(saved)


def read_special_tokens(tokenizer: Tokenizer, asked: bool) -> None:
    """Whether the names of the tokenizer's special tokens in a text become their ids from now on:
    part of `to_dict`. UserError if that is asked of a tokenizer without such tokens."""
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.read_special_tokens(asked)
    elif asked:
        raise UserError(f"--special-tokens: the {tokenizer.name} tokenizer has no special tokens "
                        "that a text can hold; leave it out, or use bpe or a tokenizer.json")


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
