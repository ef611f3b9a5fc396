"""From documents to the token ids of a training and a validation part.

`prepare` reads the text as a stream: once to identify it, once more to build a tokenizer that
needs it, and once to write its ids to a token file in the user's cache folder, which later runs
on the same text reuse. What stays in memory is a chunk.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError
from .loader import Loader, validation_windows
from .sources import Document, Sources, open_sources
from .token_file import VERSION, TokenFile, Tokens, is_token_file
from .tokenizers import Tokenizer, UnknownCharacters, build_tokenizer, tokenizer_from_dict

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


ABANDONED_SECONDS = 3600  # a file still being written has changed more recently


class _Fingerprint:
    """sha256 of the UTF-8 of documents, in which they cannot run into each other."""

    def __init__(self):
        self._digest = hashlib.sha256()
        self.n_documents = 0
        self.hexdigest = self._digest.hexdigest

    def start_document(self) -> None:
        if self.n_documents:
            self._digest.update(b"\xff")  # never part of UTF-8
        self.n_documents += 1

    def update(self, document: Document, text: str) -> bytes:
        """Add a piece of the document; returns its UTF-8."""
        try:
            encoded = text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{document.name} decodes to half of a surrogate pair; give the "
                            "right --encoding") from None
        self._digest.update(encoded)
        return encoded


@dataclass
class _Survey:
    """What a first pass over the text finds."""

    fingerprint: str
    n_documents: int
    n_bytes: int
    n_characters: int
    notices: list[str]


def _survey(documents: Iterable[Document]) -> _Survey:
    fingerprint = _Fingerprint()
    n_bytes = n_characters = n_carriage_returns = 0
    with_returns: list[str] = []
    for document in documents:
        fingerprint.start_document()
        returns = 0
        for text in document.chunks():
            encoded = fingerprint.update(document, text)
            n_bytes += len(encoded)
            n_characters += len(text)
            returns += encoded.count(b"\r")
        n_carriage_returns += returns
        if returns and len(with_returns) < 2:
            with_returns.append(document.name)
    if n_characters == 0:
        raise UserError("the data hold no text: 0 characters; give a file that holds text")
    notices = []
    if with_returns:
        others = " and others" if len(with_returns) > 1 else ""
        notices.append(f"{with_returns[0]}{others}: {n_carriage_returns:,} carriage returns (CR) "
                       "in the text are kept, and learnt, as they are")
    return _Survey(fingerprint.hexdigest(), fingerprint.n_documents, n_bytes, n_characters, notices)


def _all_chunks(documents: Iterable[Document]) -> Iterator[str]:
    for document in documents:
        yield from document.chunks()


def _encoded(documents: Iterable[Document], survey: _Survey, tokenizer: Tokenizer,
             marks: bool) -> Iterator[np.ndarray]:
    """The ids of all documents, chunk by chunk, a mark after each if asked for."""
    fingerprint = _Fingerprint()
    for document in documents:
        fingerprint.start_document()
        position = 0
        for text in document.chunks():
            fingerprint.update(document, text)
            try:
                yield tokenizer.encode(text)
            except UnknownCharacters as error:
                raise error.moved(position, f"{document.name}: ") from None
            position += len(text)
        if marks:
            yield np.array([tokenizer.document_mark], np.int32)
    if fingerprint.hexdigest() != survey.fingerprint:
        raise UserError("the text changed while it was read; start again when it is complete")


def _write(path: Path, documents: Iterable[Document], survey: _Survey, tokenizer: Tokenizer,
           marks: bool) -> None:
    metadata = {"tokenizer": tokenizer.to_dict(), "fingerprint": survey.fingerprint,
                "documents": survey.n_documents if marks else 1}
    TokenFile.write(path, _encoded(documents, survey, tokenizer, marks),
                    tokenizer.vocab_size, survey.n_bytes, survey.n_characters, metadata)


def _uses_marks(survey: _Survey, tokenizer: Tokenizer) -> bool:
    """Marks separate documents; a single one has nothing to be separated from."""
    return survey.n_documents > 1 and tokenizer.document_mark is not None


def write_token_file(path: str | Path, documents: Iterable[Document],
                     tokenizer_name: str) -> list[str]:
    """Write the documents' ids, with the tokenizer, to `path`; returns notices for the user.

    Raises UserError for text that cannot be read and a file that cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a device would be replaced by a file
        raise UserError(f"{Path(path).absolute()} is not a regular file; give another name")
    survey = _survey(documents)
    tokenizer = build_tokenizer(tokenizer_name, _all_chunks(documents), survey.n_documents)
    try:
        _write(Path(path), documents, survey, tokenizer, _uses_marks(survey, tokenizer))
    except OSError as error:
        raise UserError(f"cannot write {Path(path).absolute()}: {error.strerror}") from None
    return survey.notices


def cache_folder() -> Path:
    """Where token files are kept: below ANDREA_CACHE_DIR, XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("ANDREA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = os.path.expanduser(base)
    if base.startswith("~"):  # nobody's home: this user has none
        base = tempfile.gettempdir()
    return Path(base, "andrea-numba", "tokens")


class _Cache:
    """A folder of token files, or a temporary one when that folder cannot be written."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.temporary: tempfile.TemporaryDirectory | None = None
        self.notices: list[str] = []

    def tokens(self, documents: Iterable[Document], survey: _Survey, tokenizer: Tokenizer,
               marks: bool) -> TokenFile:
        """The ids of the documents: found, or else written."""
        identity = json.dumps([VERSION, survey.fingerprint, marks, tokenizer.to_dict()])
        name = hashlib.sha256(identity.encode()).hexdigest() + ".tokens"
        try:
            return TokenFile.open(self.folder / name)
        except UserError:
            if os.path.lexists(self.folder / name):
                self.notices.append(f"the token ids in {self.folder / name} are damaged: they are "
                                    "made anew")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            _write(self.folder / name, documents, survey, tokenizer, marks)
        except OSError as error:
            self._fall_back(error)
            try:
                _write(self.folder / name, documents, survey, tokenizer, marks)
            except OSError as second:
                raise _no_space(self.folder, second) from None
        return TokenFile.open(self.folder / name)

    def _remove_abandoned(self) -> None:
        """Remove what processes left behind that were killed while they wrote."""
        for file in self.folder.glob("*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > ABANDONED_SECONDS:
                    file.unlink()

    def _fall_back(self, error: OSError) -> None:
        self.notices.append(f"cannot keep token ids in {self.folder} ({error.strerror}): they go "
                            "to a temporary folder and are made anew by the next run; set "
                            "ANDREA_CACHE_DIR to a folder with free space")
        try:
            self.temporary = tempfile.TemporaryDirectory(prefix="andrea-numba-")
        except OSError as second:
            raise _no_space(Path(tempfile.gettempdir()), second) from None
        self.folder = Path(self.temporary.name)


def _no_space(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot write token ids to {folder}: {error.strerror}; set ANDREA_CACHE_DIR "
                     "to a folder with free space")


def prepare(documents: Iterable[Document], tokenizer_name: str, val_fraction: float, context: int,
            cache_dir: str | Path | None = None, tokenizer: Tokenizer | None = None,
            val_documents: Iterable[Document] | None = None) -> Dataset:
    """Tokenise the documents (or reuse the ids in the cache) and split them once, by position.

    `documents` must be iterable several times. `tokenizer` takes the place of the one that
    `tokenizer_name` would build from the text: a resumed run must keep its own. `cache_dir`
    stands for `cache_folder()`; if it cannot be written, a temporary folder is used. With
    `val_documents` these are the validation part, all of `documents` is the training part, and
    `val_fraction` is not looked at.

    Raises UserError for text that cannot be read, characters a given tokenizer does not know,
    and a part that is shorter than a window of `context` and its last target.
    """
    survey = _survey(documents)
    val_survey = _survey(val_documents) if val_documents is not None else None
    if val_survey and val_survey.fingerprint == survey.fingerprint:
        raise UserError("the validation text is the training text: its loss would say nothing; "
                        "give another text")
    if tokenizer is None:
        # Validation characters are known to the tokenizer, or no loss could be given for them.
        chunks = itertools.chain(_all_chunks(documents), _all_chunks(val_documents or ()))
        tokenizer = build_tokenizer(tokenizer_name, chunks, survey.n_documents)
    marks = _uses_marks(survey, tokenizer)
    cache = _Cache(Path(cache_dir) if cache_dir is not None else cache_folder())
    train = cache.tokens(documents, survey, tokenizer, marks)
    if val_survey:
        val = cache.tokens(val_documents, val_survey, tokenizer, marks)
        _check_lengths(len(train.tokens), len(val.tokens), context, "")
        both = hashlib.sha256((survey.fingerprint + val_survey.fingerprint).encode()).hexdigest()
        dataset = _dataset(train, train.tokens, val.tokens, tokenizer, both, marks)
    else:
        dataset = _split(train, tokenizer, survey.fingerprint, marks, val_fraction, context)
    dataset.notices = [*survey.notices, *(val_survey.notices if val_survey else ()),
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
