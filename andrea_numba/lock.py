"""One writer at a time in the folder of a run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from pathlib import Path

from . import bounded_json
from .errors import UserError

NAME = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
_FAR = 1 << 30  # where Windows locks a byte: what is locked cannot be read, and others are to read


class RunLock:
    """Context manager: holds FOLDER/.lock, so that no other process trains into the folder.

    The system itself lets go of the lock when the process ends, however it ends; the file, which
    says who holds it, stays. UserError when another process holds it, or the file cannot be
    written. On a file system without locks there is none, and training goes on.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> RunLock:
        file = self.folder / NAME
        try:
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}") from None
        try:
            take(self._descriptor)
        except OSError as error:
            if error.errno in _TAKEN:
                holder = _holder(self._descriptor)
                os.close(self._descriptor)
                raise UserError(f"another andrea-train ({holder}) writes into {self.folder}; wait "
                                "for it to end, or give another folder with --out") from None
        ours = {"pid": os.getpid(), "host": socket.gethostname(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        with contextlib.suppress(OSError):  # a full disk takes nothing from the lock itself
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, json.dumps(ours).encode())
        return self

    def __exit__(self, *exception) -> None:
        os.close(self._descriptor)


def take(descriptor: int) -> None:
    """Lock an open file, or raise OSError."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        os.lseek(descriptor, _FAR, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(descriptor: int) -> str:
    """Who wrote the lock file; the file may be empty or hold anything."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        said = bounded_json.loads(os.read(descriptor, 1000))
        return f"process {said['pid']} on {said['host']}, since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "its process is not known"
