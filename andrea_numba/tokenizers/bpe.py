"""Byte-pair encoding through the library `tokenizers`: built from a text, or read from a file.

Only byte-level ones, as of GPT-2, are taken: the others lose spaces, case or rare characters.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..errors import UserError
from ..program import say
from .byte import BYTES
from .errors import too_little_text
from .pieces import DOCUMENTS_APART, PieceTokenizer

MOST = 8449           # ids, where the text decides
MARK = "<|endoftext|>"
MARKS = (MARK, "<|end_of_text|>", "</s>", "<eos>")  # names of document marks in files
MAX_IDS = 1 << 24     # as of a model
# The library holds every different word of what it learns from, in several copies.
MAX_CHARACTERS = 1 << 28
_PROBE = ("two  Words\r\n\tit's ÀÉ e\u0301 ﬁ １２３ 45\u00a0\u3000\n\n \u2581x <s> </s> [UNK] 😀 "
          + "".join(map(chr, range(0x180))))
_NOT_UTF8 = re.compile("([\udc80-\udcff])")


def _library():
    try:
        import tokenizers
    except ImportError:
        raise UserError("the bpe tokenizer needs the library tokenizers: pip install "
                        "'andrea-numba[bpe]'") from None
    return tokenizers


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Make the library's complaints about a file readable. It raises plain Exceptions, and for
    some damage a PanicException, which is none and has no importable name."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError("not a tokenizer.json that the library tokenizers reads: "
                        f"{str(error)[:200]}") from None


def byte_symbols() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: itself if it is printable Latin-1, else the next
    character from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in shown]
    symbols = {chr(value): value for value in shown}
    return symbols | {chr(0x100 + i): value for i, value in enumerate(hidden)}


class BpeTokenizer(PieceTokenizer):
    """Knows every text; see the package's docstring for the interface.

    The name of a special token inside a text is ordinary text unless it is in `special_names`.
    """

    name = "bpe"

    def __init__(self, saved: dict[str, Any], start_token: int | None = None):
        """From the contents of a `tokenizer.json`; UserError for one that is not lossless."""
        library = _library()
        with _refusals():
            self._model = library.Tokenizer.from_str(json.dumps(saved))
        self._model.no_truncation()
        self._model.no_padding()
        self.read_special_tokens(False)
        ids = self._model.get_vocab()
        special = {token.content: number
                   for number, token in self._model.get_added_tokens_decoder().items()}
        mark = next((special[name] for name in MARKS if name in special), None)
        largest = max(ids.values(), default=0)
        if largest >= MAX_IDS or len(set(ids.values())) < len(ids):
            raise UserError(f"this tokenizer has ids up to {largest:,} for {len(ids):,} tokens; "
                            f"expected different ones below {MAX_IDS:,}")
        pieces = [b""] * (largest + 1)
        symbols = byte_symbols()
        for token, number in ids.items():
            try:
                pieces[number] = (token.encode() if token in special
                                  else bytes(symbols[symbol] for symbol in token))
            except KeyError:
                raise UserError(f"token {number}, {token!r}, is not written in byte symbols; "
                                "expected a byte-level BPE such as GPT-2's") from None
        if mark is not None:
            pieces[mark] = DOCUMENTS_APART
        super().__init__(pieces, mark, 0)
        self._id_of_byte = {piece[0]: number for number, piece in enumerate(pieces)
                            if len(piece) == 1}
        with _refusals():
            lossless = len(self._id_of_byte) == 256 and self.decode(self.encode(_PROBE)) == _PROBE
        if not lossless:
            raise UserError("this tokenizer does not give back every text; expected a byte-level "
                            "BPE without normalizer, such as GPT-2's")
        self.start_token = self._id_of_byte[ord("\n")] if start_token is None else start_token

    @classmethod
    def build(cls, chunks: Iterable[str], documents: int, vocab_size: int) -> BpeTokenizer:
        """Of `vocab_size` ids, or as many as the text has up to MOST if 0.

        Learns from the first MAX_CHARACTERS of the text. Raises UserError when the text has not
        so many pairs.
        """
        library = _library()
        if 0 < vocab_size <= len(BYTES):
            raise UserError(f"--vocab-size {vocab_size} is too small for --tokenizer bpe: the "
                            f"bytes and the mark take {len(BYTES) + 1}")
        byte_level = library.pre_tokenizers.ByteLevel
        model = library.Tokenizer(library.models.BPE())
        model.pre_tokenizer = byte_level(add_prefix_space=False)
        model.decoder = library.decoders.ByteLevel()
        model.train_from_iterator(_beginning(chunks), library.trainers.BpeTrainer(
            vocab_size=(vocab_size or MOST) - 1, initial_alphabet=byte_level.alphabet(),
            show_progress=False))
        model.add_special_tokens([MARK])
        if vocab_size and model.get_vocab_size() != vocab_size:
            raise too_little_text(cls.name, vocab_size, model.get_vocab_size())
        mark = model.token_to_id(MARK)
        return cls(json.loads(model.to_str()), mark if documents > 1 else None)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> BpeTokenizer:
        saved, start = d.get("tokenizer"), d.get("start_token")
        if not isinstance(saved, dict) or type(start) is not int:
            raise UserError("saved bpe tokenizer is damaged: expected `tokenizer`, the contents of "
                            "a tokenizer.json, and `start_token`")
        tokenizer = cls(saved, start)
        tokenizer.read_special_tokens(d.get("special_tokens") is True)
        if not 0 <= start < tokenizer.vocab_size:
            raise UserError(f"saved bpe tokenizer is damaged: start_token is {start}")
        return tokenizer

    def to_dict(self) -> dict[str, Any]:
        saved = json.loads(self._model.to_str())
        # As strings, not as lists of two, which the library reads as well: half as much of JSON.
        saved["model"]["merges"] = [" ".join(pair) for pair in saved["model"]["merges"]]
        asked = {"special_tokens": True} if self.special_names else {}
        return {"name": self.name, "start_token": self.start_token, **asked, "tokenizer": saved}

    def read_special_tokens(self, asked: bool) -> None:
        """See `read_special_tokens` of the package."""
        self.special_names = self._checked_names() if asked else []
        self._model.encode_special_tokens = not asked

    def _checked_names(self) -> list[str]:
        special = [token for token in self._model.get_added_tokens_decoder().values()
                   if token.special]
        if not special:
            raise UserError("--special-tokens: the tokenizer has no special tokens; leave it out")
        for token in special:
            # Text is cut at spaces before it is encoded.
            if token.lstrip or token.rstrip or any(map(str.isspace, token.content)):
                raise UserError(f"--special-tokens: {token.content!r} of the tokenizer holds "
                                "spaces, or takes those beside it; leave --special-tokens out")
        return [token.content for token in special]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        # Texts, and between each two of them one byte that is not UTF-8.
        pieces = _NOT_UTF8.split(data.decode("utf-8", "surrogateescape"))
        bytes_between = [self._id_of_byte[ord(piece) - 0xDC00] for piece in pieces[1::2]]
        # Unlike `encode`, this does not keep track of places in the text: twice as fast.
        texts = self._model.encode_batch_fast(pieces[::2], add_special_tokens=False)
        ids = list(texts[0].ids)
        for byte, text in zip(bytes_between, texts[1:], strict=True):
            ids += [byte, *text.ids]
        return np.array(ids, np.int32)


def _beginning(chunks: Iterable[str]) -> Iterator[str]:
    left = MAX_CHARACTERS
    for chunk in chunks:
        yield chunk[:left]
        left -= len(chunk)
        if left <= 0:
            say(f"bpe learns from the first {MAX_CHARACTERS:,} characters of the text")
            return
