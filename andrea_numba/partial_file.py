"""A file that is written over several runs of the program: what is on the disk is not lost.

`NAME.partial` becomes `NAME` when it is complete. `NAME.partial.json` says how much of it is right:
it is replaced as a whole, after what it speaks of was flushed to the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from . import bounded_json
from .checkpoint_files import write_file
from .errors import UserError
from .lock import take

NOTE_SECONDS = 5.0  # of work that an interruption costs at most


class PartialFile:
    """The partial file of `path`, open as `file` and locked; made by `held`."""

    def __init__(self, path: Path, file: BinaryIO):
        self.file = file
        self._path, self._partial = path, partial_path(path)
        self._note = self._partial.with_name(f"{self._partial.name}.json")
        self._due = time.monotonic() + NOTE_SECONDS

    def noted(self) -> tuple[int, int, list]:
        """What the last `note` was given; zeros and an empty list if there is none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = bounded_json.loads(self._note.read_bytes())
            ids, crc32, reached = note["ids"], note["crc32"], note["reached"]
            jobs, marks, characters, _ = reached
            if all(type(n) is int and n >= 0 for n in (ids, crc32, jobs, marks, characters)):
                return ids, crc32, reached
        return 0, 0, []

    def note(self, ids: int, crc32: int, reached: list) -> None:
        """Now and then: put the file on the disk, and then a note that it holds `ids` ids of this
        checksum, which stand for the text up to `reached`."""
        if time.monotonic() < self._due:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        temporary = self._note.with_name(f"{self._note.name}.tmp")
        temporary.unlink(missing_ok=True)  # of a process that was killed
        write_file(temporary, [json.dumps(
            {"ids": ids, "crc32": crc32, "reached": reached}).encode()])
        os.replace(temporary, self._note)
        self._due = time.monotonic() + NOTE_SECONDS

    def complete(self) -> None:
        """The file is whole: give it its name."""
        self.file.flush()
        os.replace(self._partial, self._path)
        self._note.unlink(missing_ok=True)

    def interrupted(self, error: BaseException) -> None:
        """Keep what can be gone on with; a text that is refused cannot."""
        if isinstance(error, UserError) or not self._note.exists():
            for file in (self._partial, self._note):
                file.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


@contextlib.contextmanager
def held(path: Path) -> Iterator[PartialFile | None]:
    """The partial file of `path`, for this process alone; None while another process holds it, and
    where files cannot be locked. OSError as the system raises it."""
    if os.name == "nt":  # renames no open file
        yield None
        return
    name = partial_path(path)
    with open(os.open(name, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        try:
            take(file.fileno())
            # Not renamed nor removed meanwhile by the process that held it before.
            free = os.path.samestat(os.fstat(file.fileno()), os.stat(name))
        except OSError:
            free = False
        if not free:
            yield None
            return
        partial = PartialFile(path, file)
        try:
            yield partial
        except BaseException as error:
            partial.interrupted(error)
            raise
