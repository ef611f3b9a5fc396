"""Where text comes from: files, folders and JSON lines, read in chunks with bounded memory."""

from __future__ import annotations

import codecs
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from .errors import UserError

CHUNK_BYTES = 1 << 20
MAX_LINE_CHARACTERS = 1 << 23  # of a JSON line, which must be held in memory whole
SUFFIXES = (".txt", ".md", ".jsonl")  # what is read from a folder
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class Document:
    """A text that belongs together; `chunks()` reads it from the start, each time it is called."""

    name: str
    chunks: Callable[[], Iterator[str]]

    @classmethod
    def from_text(cls, name: str, text: str) -> Document:
        return cls(name, lambda: (text[start:start + CHUNK_BYTES]
                                  for start in range(0, len(text), CHUNK_BYTES)))


@dataclass(frozen=True)
class Sources:
    """The documents of some files, in order; can be iterated any number of times.

    Not a list: a JSONL file may hold millions of documents. `notices` are lines for the user.
    """

    paths: tuple[Path, ...]
    encoding: str
    notices: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Document]:
        for path in self.paths:
            if path.suffix == ".jsonl":
                yield from _json_documents(path, self.encoding)
            else:
                yield Document(str(path), partial(read_text, path, self.encoding))


def open_sources(paths: Sequence[str], encoding: str = "utf-8") -> Sources:
    """The documents of text files, `.jsonl` files (one document a line) and folders of them.

    A folder is read recursively in sorted order, files and folders named `.something` left out.
    Links to files are followed, links to folders are not: they may lead in a circle.
    Raises UserError for a path that does not exist, is empty, or comes twice, and for an unknown
    encoding. What is wrong inside a file is found, and raised the same way, while it is read.
    """
    encoding = _checked_encoding(encoding)
    files: list[Path] = []
    notices: list[str] = []
    if not paths:
        raise UserError("no text given; give a text file, a folder or a .jsonl file")
    for path in map(Path, paths):
        if os.path.isdir(path):
            used, left_out = _folder_files(path)
            counts = [f"left out {count} {kind}" for kind, count in left_out.items()]
            if not used:
                expected = ", ".join("*" + suffix for suffix in SUFFIXES)
                raise UserError("; ".join([f"folder {path.absolute()} holds no text: expected at "
                                           f"least one non-empty file named {expected}", *counts]))
            files += used
            notices += [f"{path}: {count}" for count in counts]
        else:
            files.append(_checked_file(path))
    seen: dict[str, Path] = {}
    for file in files:
        real = os.path.realpath(file)
        if real in seen:
            raise UserError(f"{file} is given twice (also as {seen[real]}): the copy could land "
                            "in both training and validation text; give it once")
        seen[real] = file
    return Sources(tuple(files), encoding, tuple(notices))


def _checked_file(path: Path) -> Path:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"no such file or folder: {path.absolute()}") from None
    except OSError as error:  # the reason comes first: a name may be too long for a line
        raise UserError(f"{error.strerror}: {path.absolute()}") from None
    if not path.is_file():
        raise UserError(f"{path.absolute()} is not a regular file; it is read more than once, so "
                        "save the text to a file first")
    if size == 0:
        raise UserError(f"{path.absolute()} is empty (0 bytes); give a file that holds text")
    return path


def _folder_files(folder: Path) -> tuple[list[Path], Counter[str]]:
    """The files with text in a folder, sorted; and how many entries of which kind are not."""
    used: list[Path] = []
    left_out: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        left_out["link(s) to folders: give them by name"] += sum(
            os.path.islink(os.path.join(parent, name)) for name in folders)
        for name in names:
            if not name.endswith(SUFFIXES) or name.startswith("."):
                continue
            file = Path(parent, name)
            if not os.path.isfile(file):
                left_out["broken link(s) or special file(s)"] += 1
            elif file.stat().st_size == 0:
                left_out["empty file(s)"] += 1
            else:
                used.append(file)
    return sorted(used, key=lambda file: file.parts), +left_out


def _unreadable(error: OSError) -> NoReturn:
    raise UserError(f"cannot read folder {os.path.abspath(error.filename)}: {error.strerror}")


def _checked_encoding(encoding: str) -> str:
    """The codec's canonical name; utf-8-sig is utf-8 here, because one mark is always dropped."""
    try:
        b"    ".decode(encoding)
    except (LookupError, ValueError) as error:
        if not isinstance(error, UnicodeDecodeError):
            raise UserError(f"unknown text encoding {encoding!r}; expected a name like utf-8, "
                            "latin-1, cp1252, utf-16 or gb18030") from None
    name = codecs.lookup(encoding).name
    return "utf-8" if name == "utf-8-sig" else name


def read_text(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """The file's text in chunks of about 1 MiB, exactly as it is, but for one leading U+FEFF.

    `encoding` is a canonical codec name, as `codecs.lookup` gives it. Line ends are not touched.
    Raises UserError for bytes that are not text in `encoding`, with their offset in the file.
    """
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    # Elsewhere a zero byte is U+0000, which no text holds; here it is half of most characters.
    zero_is_nul = not encoding.startswith(("utf-16", "utf-32"))
    offset, at_start = 0, True
    try:
        with open(path, "rb") as file:
            while True:
                chunk = file.read(CHUNK_BYTES)
                if offset == 0 and zero_is_nul and chunk[:2] in _UTF16_MARKS:
                    raise UserError(f"{path} starts with the byte order mark of UTF-16: give "
                                    "--encoding utf-16 (or utf-32)")
                if zero_is_nul and b"\0" in chunk:
                    raise UserError(
                        f"{path} is not a text file: zero byte at offset "
                        f"{offset + chunk.index(0)}; expected {encoding} text (if it is UTF-16 "
                        "text, give --encoding utf-16-le or utf-16-be)")
                held = len(decoder.getstate()[0])  # bytes of a character cut by the last chunk
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    at = offset - held + error.start
                    raise UserError(
                        f"{path}: byte 0x{error.object[error.start]:02X} at offset {at} is not "
                        f"{encoding} ({error.reason}); if the text has another encoding, give it "
                        "with --encoding, for example --encoding latin-1") from None
                except UnicodeError as error:
                    raise UserError(f"{path} is not {encoding} text: {error}") from None
                offset += len(chunk)
                if text and at_start:
                    text, at_start = text.removeprefix("\ufeff"), False
                if text:
                    yield text
                if not chunk:
                    return
    except OSError as error:
        raise UserError(f"cannot read {path.absolute()}: {error.strerror}") from None


def _lines(path: Path, encoding: str) -> Iterator[str]:
    """Lines split at "\\n" alone: other separators may stand inside a JSON string."""
    begun: list[str] = []  # the pieces of a line that has not ended yet
    for number, chunk in enumerate(read_text(path, encoding)):
        first, *others = chunk.split("\n")
        begun.append(first)
        if sum(map(len, begun)) > MAX_LINE_CHARACTERS:
            raise UserError(f"{path}: a line around MiB {number} is longer than "
                            f"{MAX_LINE_CHARACTERS:,} characters; expected one JSON object a line")
        if others:
            others.insert(0, "".join(begun))
            begun = [others.pop()]
            yield from others
    yield "".join(begun)


def _json_documents(path: Path, encoding: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(path, encoding), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "too deep or too large")
            column = f" at column {error.colno}" if hasattr(error, "colno") else ""
            raise UserError(f"{where}: not a JSON object: {reason}{column}; expected "
                            'a line like {"text": "..."}') from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = type(record).__name__
            if isinstance(record, dict):
                found = f"fields {', '.join(map(repr, list(record)[:8])) or 'none'}"
                if "text" in record:
                    found = f"a {type(text).__name__}"
            raise UserError(f'{where}: no string in the field "text" (found: {found}); expected a '
                            'line like {"text": "..."}')
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: character {error.start} of the text is half of a surrogate "
                            f"pair (\\u{ord(text[error.start]):04x}) and cannot be written as "
                            "UTF-8; repair or drop the line") from None
        if text:
            yield Document.from_text(where, text)
