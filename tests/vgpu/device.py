"""The one virtual device: its memory, its pinned host memory, and the log of its refusals."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable

from .limits import Limits
from .memory import Arena
from .options import current
from .report import VirtualGPUError


class Refused(Exception):
    """A driver call that returns an error code; `code` names a member of CUresult.

    Only for what a program may handle or what the driver reports as a code; a plain mistake in
    a call is a VirtualGPUError.
    """

    def __init__(self, code: str, reason: str):
        super().__init__(code, reason)
        self.code, self.reason = code, reason


    def error(self) -> VirtualGPUError:
        """The same for callers that get exceptions instead of codes."""
        kind = "stream capture" if "CAPTURE" in self.code else "bad driver call"
        return VirtualGPUError(kind, f"{self.reason} ({self.code})")


class Device:
    """State of the device that all threads of the process share."""

    def __init__(self):
        self.lock = threading.RLock()
        self.refusals: deque[str] = deque(maxlen=100)  # "CODE: reason", the newest last
        self.pinned: dict[int, int] = {}  # host address -> bytes
        self.used = 0  # bytes of live allocations
        self.delayed_frees: list[Callable[[], None]] = []  # hooks that do them
        self._own: set[int] = set()  # addresses of module variables
        self._process: int | None = None  # the process that used the device first

    @functools.cached_property
    def limits(self) -> Limits:
        return Limits(current.cc)

    @functools.cached_property
    def arena(self) -> Arena:
        weakref.finalize(self, bool).detach()  # registers weakref's own exit function, so that
        atexit.register(self.report_leaks)  # ours runs before it drops all objects
        # Addresses are not scarce on a GPU: holes between allocations do not use up its memory.
        return Arena(2 * current.memory)

    def refuse(self, refused: Refused) -> None:
        """Log a refusal, so that a test can read why a call returned its code."""
        self.refusals.append(f"{refused.code}: {refused.reason}")

    def check_process(self) -> None:
        """Refuse calls of a process that was forked from one that has used the device."""
        if self._process is None:
            self._process = os.getpid()
        elif self._process != os.getpid():
            raise Refused("CUDA_ERROR_NOT_INITIALIZED",
                          "this process was forked after CUDA had been used")

    def allocate(self, nbytes: int, label: str | None = None, owned: bool = False) -> int:
        """Address of fresh device memory; labelled with the caller's place in Python.

        owned: memory of a loaded module, which no program frees.
        """
        if self.used + nbytes > current.memory:
            raise Refused("CUDA_ERROR_OUT_OF_MEMORY",
                          f"{nbytes} bytes asked for, {current.memory - self.used} are free")
        try:
            address = self.arena.allocate(nbytes, label or f"allocated at {calling_place()}")
        except VirtualGPUError as error:
            if "out of memory" in error.detail:
                raise Refused("CUDA_ERROR_OUT_OF_MEMORY", error.detail) from None
            raise
        self.used += nbytes
        if owned:
            self._own.add(address)
        return address

    def free(self, address: int, owned: bool = False) -> None:
        """Free an allocation; freeing a module's variable is refused unless `owned`."""
        if address in self._own and not owned:
            raise VirtualGPUError(
                "bad driver call", f"free of {self.arena.describe(address, 1)}")
        freed = self.arena.find(address)
        self.arena.free(address)
        self.used -= freed.nbytes
        self._own.discard(address)

    def check(self, address: int, nbytes: int, what: str) -> None:
        """Refuse a host access that does not lie in one live allocation."""
        found = self.arena.find(address)
        if found is None or address + nbytes > found.address + found.nbytes:
            raise VirtualGPUError(self.arena.misuse(address),
                                  f"host {what} {self.arena.describe(address, nbytes)}")

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Whether a range of host memory lies in page-locked memory."""
        return any(start <= address and address + nbytes <= start + size
                   for start, size in self.pinned.items())

    def allocations(self) -> list:
        """Live allocations of the program, as memory.Allocation."""
        return [a for a in self.arena.allocations() if a.address not in self._own]

    def leaks(self) -> list:
        """Live allocations after all frees that are only delayed."""
        gc.collect()
        for run_delayed_frees in self.delayed_frees:
            run_delayed_frees()
        return self.allocations()

    def report_leaks(self) -> None:
        """List memory that is in use at exit on stderr, if options.leak_check asks for it."""
        leaks = self.leaks() if current.leak_check else []
        if leaks:
            total = sum(a.nbytes for a in leaks)
            print(f"virtual GPU: memory leak: {len(leaks)} allocations, {total} bytes",
                  file=sys.stderr)
        for allocation in leaks:
            print(f"  {allocation}", file=sys.stderr)


def of_program(file: str) -> bool:
    """Whether code of a file is neither numba-cuda's nor this package's, nor generated."""
    return not (os.path.dirname(file) == _HERE or "numba_cuda" in file or file == _CONTEXTLIB
                or file.startswith("<"))


def calling_place() -> str:
    """file:line of the innermost Python frame outside numba-cuda and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        if of_program(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"


_HERE = os.path.dirname(__file__)
_CONTEXTLIB = contextlib.__file__
device = Device()
