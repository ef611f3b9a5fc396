"""From documents to the token ids of a training and a validation part.

`prepare` reads the text as a stream: once to identify it, once more to build a tokenizer that
needs it, and once to write its ids to a token file in the user's cache folder, which later runs
on the same text reuse. What stays in memory is a chunk.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError
from .loader import Loader, validation_windows
from .sources import Document, Sources, open_sources
from .token_cache import TokenCache, cache_folder
from .token_file import TokenFile, Tokens, is_token_file
from .tokenising import Survey, Tokenising, learn, survey
from .tokenizers import Tokenizer, read_special_tokens, tokenizer_from_dict

__all__ = ["Dataset", "Document", "Loader", "Sources", "TokenFile", "Tokens", "cache_folder",
           "is_token_file", "load_token_file", "open_sources", "prepare", "validation_windows",
           "write_token_file"]


@dataclass
class Dataset:
    """A text as ids. `train` and `val` have `len`, slices and integer-array indexing.

    `val` is empty when there is no validation text. `val_bytes` and `val_characters` measure the
    text that its targets stand for (everything after the first token), so that the sum of its
    losses divided by them is nats per byte and per character. `fingerprint` is the sha256, in
    hex, of the text: for a single file without byte order mark, that of the file. `notices` are
    lines for the user.
    """

    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    fingerprint: str
    val_bytes: int
    val_characters: int
    n_val_documents: int
    notices: list[str]
    path: Path
    _temporary_folder: Any = field(default=None, repr=False)  # removed with the dataset


def _uses_marks(found: Survey, tokenizer: Tokenizer) -> bool:
    """Marks separate documents; a single one has nothing to be separated from."""
    return found.n_documents > 1 and tokenizer.document_mark is not None


def write_token_file(path: str | Path, documents: Iterable[Document],
                     tokenizer_name: str, vocab_size: int = 0,
                     special_tokens: bool = False) -> list[str]:
    """Write the documents' ids, with the tokenizer, to `path`; returns notices for the user.
    `vocab_size` is that of a tokenizer that is learned (see `build_tokenizer`); `special_tokens`
    is for `read_special_tokens`.

    Raises UserError for text that cannot be read and a file that cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a device would be replaced by a file
        raise UserError(f"{Path(path).absolute()} is not a regular file; give another name")
    found = survey(documents)
    tokenizer = learn(tokenizer_name, documents, found, vocab_size)
    read_special_tokens(tokenizer, special_tokens)
    try:
        Tokenising(documents, found, tokenizer, _uses_marks(found, tokenizer)).write(Path(path))
    except OSError as error:
        raise UserError(f"cannot write {Path(path).absolute()}: {error.strerror}") from None
    return found.notices


def prepare(documents: Iterable[Document], tokenizer_name: str, val_fraction: float, context: int,
            cache_dir: str | Path | None = None, tokenizer: Tokenizer | None = None,
            val_documents: Iterable[Document] | None = None, vocab_size: int = 0,
            special_tokens: bool = False) -> Dataset:
    """Tokenise the documents (or reuse the ids in the cache) and split them once, by position.

    `documents` must be iterable several times. `tokenizer` takes the place of the one that
    `tokenizer_name` would build from the text: a resumed run must keep its own. `cache_dir`
    stands for `cache_folder()`; if it cannot be written, a temporary folder is used. With
    `val_documents` these are the validation part, all of `documents` is the training part, and
    `val_fraction` is not looked at. `vocab_size` is that of a tokenizer that is learned (see
    `build_tokenizer`); `special_tokens` is for `read_special_tokens`, of a tokenizer built here.

    Raises UserError for text that cannot be read, characters a given tokenizer does not know,
    and a part that is shorter than a window of `context` and its last target.
    """
    found = survey(documents)
    val_found = survey(val_documents) if val_documents is not None else None
    if val_found and val_found.fingerprint == found.fingerprint:
        raise UserError("the validation text is the training text: its loss would say nothing; "
                        "give another text")
    cache = TokenCache(Path(cache_dir) if cache_dir is not None else cache_folder())
    if tokenizer is None:
        # Validation characters are known to the tokenizer, or no loss could be given for them.
        also = val_documents if val_documents and tokenizer_name == "char" else ()
        tokenizer = cache.tokenizer(
            tokenizer_name, [found.fingerprint, found.n_documents, vocab_size],
            lambda: learn(tokenizer_name, documents, found, vocab_size, also))
        read_special_tokens(tokenizer, special_tokens)
    marks = _uses_marks(found, tokenizer)
    train = cache.tokens(Tokenising(documents, found, tokenizer, marks))
    if val_found:
        val = cache.tokens(Tokenising(val_documents, val_found, tokenizer, marks))
        _check_lengths(len(train.tokens), len(val.tokens), context, "")
        both = hashlib.sha256((found.fingerprint + val_found.fingerprint).encode()).hexdigest()
        dataset = _dataset(train, train.tokens, val.tokens, tokenizer, both, marks)
    else:
        dataset = _split(train, tokenizer, found.fingerprint, marks, val_fraction, context)
    dataset.notices = [*found.notices, *(val_found.notices if val_found else ()),
                       *cache.notices]
    dataset._temporary_folder = cache.temporary
    return dataset


def load_token_file(path: str | Path, val_fraction: float, context: int) -> Dataset:
    """The dataset of a token file written by `write_token_file`; errors as of `prepare`."""
    file = TokenFile.open(path)
    saved = file.metadata.get("tokenizer")
    if saved is None:
        raise UserError(f"token file {path} does not say which tokenizer made it; make it with "
                        "data/prepare.py")
    tokenizer = tokenizer_from_dict(saved)
    if tokenizer.vocab_size != file.vocab_size:
        raise UserError(f"token file {path} is damaged: a vocabulary of {file.vocab_size} and a "
                        f"tokenizer of {tokenizer.vocab_size}; make it again with data/prepare.py")
    marks = file.metadata.get("documents", 1) != 1 and tokenizer.document_mark is not None
    fingerprint = str(file.metadata.get("fingerprint", ""))
    return _split(file, tokenizer, fingerprint, marks, val_fraction, context)


def _split(file: TokenFile, tokenizer: Tokenizer, fingerprint: str, marks: bool,
           val_fraction: float, context: int) -> Dataset:
    if not 0 <= val_fraction < 1:
        raise UserError(f"--val-fraction {val_fraction}: must be at least 0 and below 1")
    tokens, n_tokens = file.tokens, len(file.tokens)
    cut = n_tokens - int(n_tokens * val_fraction)
    _check_lengths(cut, n_tokens - cut if val_fraction else None, context,
                   ", or change --val-fraction (0 = no validation)" if val_fraction else "")
    if marks and val_fraction:
        start = _next_document(tokens, cut, tokenizer.document_mark)
        if n_tokens - start > context:
            cut = start
    return _dataset(file, tokens.part(0, cut), tokens.part(cut, n_tokens), tokenizer, fingerprint,
                    marks)


def _dataset(file: TokenFile, train: Tokens, val: Tokens, tokenizer: Tokenizer, fingerprint: str,
             marks: bool) -> Dataset:
    n_val_documents = int(len(val) > 0)
    if marks:
        n_val_documents = sum(int(np.count_nonzero(ids == tokenizer.document_mark))
                              for ids in val.chunks())
    counts = [tokenizer.count_text(ids) for ids in val.part(1, len(val)).chunks()]
    val_bytes, val_characters = (sum(column) for column in zip((0, 0), *counts, strict=True))
    return Dataset(tokenizer, train, val, fingerprint, val_bytes, val_characters, n_val_documents,
                   [], file.path)


def _next_document(tokens: Tokens, cut: int, mark: int) -> int:
    """The first document start at or after `cut`; the number of tokens if there is none."""
    position = cut - 1  # a mark just before the cut means that a document starts there
    for ids in tokens.part(position, len(tokens)).chunks():
        found = np.flatnonzero(ids == mark)
        if found.size:
            return position + int(found[0]) + 1
        position += len(ids)
    return len(tokens)


def _check_lengths(n_train: int, n_val: int | None, context: int, other_remedy: str) -> None:
    parts = {"training": n_train} | ({} if n_val is None else {"validation": n_val})
    for name, found in parts.items():
        if found <= context:
            largest = min(parts.values()) - 1
            remedy = (f"use --context {largest} or less, or give more text" if largest >= 1
                      else "give more text")
            raise UserError(f"the {name} part has {found} tokens (of {sum(parts.values())} in "
                            f"all), but --context {context} needs at least {context + 1}: "
                            f"{remedy}{other_remedy}")
