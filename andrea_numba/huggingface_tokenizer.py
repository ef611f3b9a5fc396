"""Our tokenizers in folders of the library `transformers`.

`andrea_tokenizer.json` is what `to_dict()` gives, and what is read back. `tokenizer.json` is for
the library `tokenizers`, which splits text in another way than some of ours do: it is written only
where it gives the same ids for every text. Without the former it is read if it is a byte-level BPE.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoint_files import read_json
from .errors import UserError
from .tokenizers import Tokenizer, read_tokenizer, tokenizer_from_dict
from .tokenizers.bpe import BpeTokenizer, byte_symbols
from .tokenizers.byte import ByteTokenizer
from .tokenizers.char import CharTokenizer

OURS, THEIRS = "andrea_tokenizer.json", "tokenizer.json"
OTHERS = ("vocab.json", "tokenizer.model", "vocab.txt")  # of older versions of the library
_DOCUMENT_END = "\n\n"  # how a document mark reads


def documents(tokenizer: Tokenizer, context: int) -> dict[str, dict[str, Any]]:
    """Name to contents of the files that describe a tokenizer."""
    files: dict[str, dict[str, Any]] = {OURS: tokenizer.to_dict()}
    make = EXACT.get(tokenizer.name)
    if make is not None:
        files[THEIRS] = make(tokenizer)
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True}  # the name of one inside a text is text
    return files


def read(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder, or None if there is none; UserError if it cannot be read."""
    if (folder / OURS).exists():
        return tokenizer_from_dict(read_json((folder / OURS).resolve()))
    if (folder / THEIRS).exists():
        try:
            tokenizer = read_tokenizer(folder / THEIRS)
        except UserError as error:
            raise UserError(f"{folder / THEIRS}: {error}. If andrea-generate --export has made "
                            f"this model, copy {OURS} from there") from None
        if tokenizer.document_mark is not None:
            tokenizer.start_token = tokenizer.document_mark  # as GPT-2's texts begin
        return tokenizer
    for name in OTHERS:
        if (folder / name).exists():
            raise UserError(f"{folder / name} cannot be read; expected {OURS} or {THEIRS}, which "
                            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) writes")
    return None


def _without_merges(vocabulary: list[str], pre_tokenizer: dict | None,
                    decoder: dict) -> dict[str, Any]:
    """A byte-pair encoder that merges nothing: a text falls into tokens of one character.

    So a token of two is never the result of encoding, whatever the text: the document mark.
    """
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": pre_tokenizer, "post_processor": None,
        "decoder": decoder,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {text: token for token, text in enumerate(vocabulary)}, "merges": []},
    }


def _byte(tokenizer: ByteTokenizer) -> dict[str, Any]:
    symbols = byte_symbols()
    letters = sorted(symbols, key=symbols.get)
    mark = "".join(letters[byte] for byte in _DOCUMENT_END.encode())
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False}
    return _without_merges([*letters, mark], level, level)


def _char(tokenizer: CharTokenizer) -> dict[str, Any]:
    """Characters that the tokenizer does not know are left out, where ours refuses them."""
    marks = [] if tokenizer.document_mark is None else [_DOCUMENT_END]
    return _without_merges([*tokenizer.characters, *marks], None, {"type": "Fuse"})


def _bpe(tokenizer: BpeTokenizer) -> dict[str, Any]:
    return tokenizer.to_dict()["tokenizer"]


EXACT = {"byte": _byte, "char": _char, "bpe": _bpe}  # name to what makes tokenizer.json
