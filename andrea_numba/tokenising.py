"""The ids of a text, made by all threads as it is read, and put into a token file."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError
from .partial_file import PartialFile, held
from .program import say
from .sources import Document
from .streams import in_order, watched
from .token_file import TokenFile, TokenWriter
from .tokenizers import LEARNED, Tokenizer, UnknownCharacters, build_tokenizer, whole_words


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
class Survey:
    """What a first pass over the text finds. `fingerprint` is a sha256 in hex."""

    fingerprint: str
    n_documents: int
    n_bytes: int
    n_characters: int
    notices: list[str]

    def check(self, fingerprint: _Fingerprint) -> None:
        """UserError unless another pass has found the same text."""
        if fingerprint.hexdigest() != self.fingerprint:
            raise UserError("the text changed while it was read; start again when it is complete")


def survey(documents: Iterable[Document]) -> Survey:
    """Read the documents once; UserError for what is no text, and for none."""
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
    return Survey(fingerprint.hexdigest(), fingerprint.n_documents, n_bytes, n_characters, notices)


def learn(name: str, documents: Iterable[Document], found: Survey, vocab_size: int,
          also: Iterable[Document] = ()) -> Tokenizer:
    """The tokenizer `name` for these documents, and the characters of `also`; UserError when the
    text that a learned one was learned from is not that of the survey."""
    chunks = chain(_learned_from(documents, found),
                   chain.from_iterable(document.chunks() for document in also))
    tokenizer = build_tokenizer(name, chunks, found.n_documents, vocab_size)
    if name in LEARNED:
        for _ in chunks:  # what bpe did not read is part of the fingerprint too
            pass
    return tokenizer


def _learned_from(documents: Iterable[Document], found: Survey) -> Iterator[str]:
    fingerprint = _Fingerprint()
    for document in watched(documents, found.n_characters, "learning the tokenizer"):
        fingerprint.start_document()
        for text in whole_words(document.chunks()):
            fingerprint.update(document, text)
            yield text
    found.check(fingerprint)


@dataclass(frozen=True)
class _Job:
    """What makes the next ids. `reached` is where the text is then: the jobs done, the marks set,
    the characters read and the sha256 of all text up to there."""

    ids: Callable[[], np.ndarray]
    reached: list

    def __call__(self) -> tuple[np.ndarray, list]:
        return self.ids(), self.reached


@dataclass(frozen=True)
class Tokenising:
    """Documents that a survey has found, to be written as ids, a mark after each if asked for."""

    documents: Iterable[Document]
    survey: Survey
    tokenizer: Tokenizer
    marks: bool

    def write(self, path: Path) -> None:
        """Write a token file; OSError as the system raises it, UserError for another text."""
        TokenFile.write(path, (ids for ids, _ in in_order(self._jobs())), *self._header())

    def write_resumably(self, path: Path) -> None:
        """As `write`, but what an interrupted process has made is not made again."""
        with held(path) as file:
            if file is None:
                self.write(path)
                return
            writer = TokenWriter(file.file, *self._header())
            for ids, reached in in_order(self._jobs_left(file, writer)):
                writer.append(ids)
                file.note(ids=writer.n_tokens, crc32=writer.crc32, reached=reached)
            writer.complete()
            file.complete()

    def _header(self) -> tuple[int, int, int, dict[str, Any]]:
        found = self.survey
        return (self.tokenizer.vocab_size, found.n_bytes, found.n_characters, {
            "tokenizer": self.tokenizer.to_dict(), "fingerprint": found.fingerprint,
            "documents": found.n_documents if self.marks else 1})

    def _jobs_left(self, file: PartialFile, writer: TokenWriter) -> Iterator[_Job]:
        """The jobs behind those whose ids are in the file; all when it holds none of this text."""
        ids, crc32, reached = file.noted()
        if ids and writer.keep(ids, crc32):
            jobs = self._jobs()
            # Read again, but not tokenised. The last one says whether it is the same text so far.
            skipped = deque(islice(jobs, reached[0]), maxlen=1)
            if skipped and skipped[0].reached == reached:
                say(f"tokenising goes on at {100 * reached[2] // self.survey.n_characters} %")
                return jobs
        writer.keep(0, 0)
        return self._jobs()

    def _jobs(self) -> Iterator[_Job]:
        documents = watched(self.documents, self.survey.n_characters, "tokenising")
        mark = np.array([self.tokenizer.document_mark], np.int32) if self.marks else None
        fingerprint = _Fingerprint()
        n_jobs = n_marks = n_characters = 0
        for document in documents:
            fingerprint.start_document()
            position = 0
            for text in whole_words(document.chunks(), self.tokenizer.special_names):
                fingerprint.update(document, text)
                n_jobs, n_characters = n_jobs + 1, n_characters + len(text)
                yield _Job(partial(_encoded, self.tokenizer, text, document.name, position),
                           [n_jobs, n_marks, n_characters, fingerprint.hexdigest()])
                position += len(text)
            if self.marks:
                n_jobs, n_marks = n_jobs + 1, n_marks + 1
                yield _Job(partial(np.copy, mark),
                           [n_jobs, n_marks, n_characters, fingerprint.hexdigest()])
        self.survey.check(fingerprint)


def _encoded(tokenizer: Tokenizer, text: str, name: str, position: int) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except UnknownCharacters as error:
        raise error.moved(position, f"{name}: ") from None
