"""Our tokenizers in folders of the library `transformers`.

`andrea_tokenizer.json` is what `to_dict()` gives, and all that we read back. `tokenizer.json` is
for the library `tokenizers`, which splits text in another way than some of ours do: it is written
only where it gives the same ids for every text, and the same text for all ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoint_files import read_json
from .errors import UserError
from .tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, tokenizer_from_dict

OURS = "andrea_tokenizer.json"
THEIRS = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")
_DOCUMENT_END = "\n\n"  # how a document mark reads


def documents(tokenizer: Tokenizer, context: int) -> dict[str, dict[str, Any]]:
    """Name to contents of the files that describe a tokenizer."""
    files: dict[str, dict[str, Any]] = {OURS: tokenizer.to_dict()}
    make = EXACT.get(tokenizer.name)
    if make is not None:
        files["tokenizer.json"] = make(tokenizer)
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context,
            "clean_up_tokenization_spaces": False}
    return files


def read(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder, or None if there is none; UserError if it is not one of ours."""
    if (folder / OURS).exists():
        return tokenizer_from_dict(read_json((folder / OURS).resolve()))
    for name in THEIRS:
        if (folder / name).exists():
            raise UserError(f"{folder / name}: this tokenizer cannot be read; expected {OURS}. If "
                            f"andrea-generate --export has made this model, copy {OURS} from there")
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
    # GPT-2 writes bytes that are not printable, in their order, as the characters from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(0x100 + others.index(byte)) if byte in others else chr(byte)
               for byte in range(256)]
    mark = "".join(letters[byte] for byte in _DOCUMENT_END.encode())
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False}
    return _without_merges([*letters, mark], level, level)


def _char(tokenizer: CharTokenizer) -> dict[str, Any]:
    """Characters that the tokenizer does not know are left out, where ours refuses them."""
    marks = [] if tokenizer.document_mark is None else [_DOCUMENT_END]
    return _without_merges([*tokenizer.characters, *marks], None, {"type": "Fuse"})


EXACT = {"byte": _byte, "char": _char}  # name to what makes tokenizer.json
