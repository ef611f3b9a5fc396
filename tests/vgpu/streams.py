"""Streams and events: work that runs at once, or as late as its order allows.

With options.lazy_streams, work waits in a queue until something synchronises; then only what
has to be finished is run, and independent work of other streams stays queued. When all of it
must run, the stream that was used last goes first. So a missing synchronisation shows.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from . import capture
from .device import Refused
from .options import current
from .report import VirtualGPUError

LEGACY, PER_THREAD = 1, 2  # the special stream handles; 0 is the legacy stream too
POLLS = 3  # the query of unfinished work that makes it run; earlier ones say "not ready"

_handles = itertools.count(0x6000_0000, 16)
_streams: dict[int, Stream] = {}
_events: dict[int, Event] = {}
_pending: dict[Operation, None] = {}
_orphans: list[Operation] = []  # the last work of destroyed blocking streams
_thread = threading.local()
_executing = 0  # depth of operations that run now
_delayed: list[Callable[[], None]] = []  # what has to wait for their end


class Operation:
    """Queued work and what has to run before it."""

    __slots__ = ("dependencies", "done", "polls", "run")

    def __init__(self, run: Callable[[], None], dependencies: list[Operation]):
        self.run, self.dependencies = run, dependencies
        self.done, self.polls = False, 0

    def retire(self) -> Callable[[], None]:
        """Mark as done and let go of everything; returns what there was to run."""
        run, self.run = self.run, None
        self.done, self.dependencies = True, []
        return run


class Stream:
    """A CUDA stream. Blocking streams are ordered with the legacy default stream."""

    def __init__(self, blocking: bool = True, priority: int = 0, legacy: bool = False):
        self.blocking, self.priority, self.legacy = blocking, priority, legacy
        self.handle = LEGACY if legacy else next(_handles)
        self.capture: capture.Capture | None = None
        self.last: list[Operation] = []  # what further work has to wait for
        _streams[self.handle] = self

    def submit(self, kind: str, run: Callable[[], None], host: bool = False) -> None:
        """Do some work in stream order: now, later, or when a captured graph is launched.

        kind: "kernel", "memcpy", "memset", "host" or "graph". host: host code, which runs
        with options.execute=False too.
        """
        if self.capture is not None:
            self.capture.add(self, kind, run)
            return
        if self.legacy:
            capture.forbid_legacy(kind)
        if not (current.execute or host):
            return
        if current.lazy_streams:
            self.enqueue(run)
            return
        flush()
        _execute(run)

    def enqueue(self, run: Callable[[], None]) -> Operation:
        operation = Operation(run, self.predecessors())
        _pending[operation] = None
        self.last = [operation]
        return operation

    def predecessors(self) -> list[Operation]:
        """Queued operations that work submitted now would have to wait for."""
        found = list(self.last)
        if self.legacy:
            found += [o for s in _streams.values() if s.blocking and s is not self
                      for o in s.last] + _orphans
        elif self.blocking:
            found += legacy.last
        return [operation for operation in found if not operation.done]

    def unfinished(self) -> list[Operation]:
        """The queued operations that are finished last here."""
        if self.legacy:
            return self.predecessors()
        return [operation for operation in self.last if not operation.done]

    def synchronize(self) -> None:
        """Run everything that is queued here."""
        if self.capture is not None:
            raise self.capture.invalidate("UNSUPPORTED", "synchronising a capturing stream")
        if self.legacy:
            capture.forbid_legacy("synchronising")
        for operation in reversed(self.unfinished()):
            complete(operation)

    def query(self) -> bool:
        """Whether all work is finished; asking often lets it finish."""
        if self.capture is not None:
            raise self.capture.invalidate("UNSUPPORTED", "query of a capturing stream")
        finished = [poll(operation) for operation in self.unfinished()]
        return all(finished)

    def wait(self, event: Event) -> None:
        """Let further work wait for the work that `event` marks."""
        if capture.wait_event(self, event, "cuStreamWaitEvent"):
            return
        if event.operation is not None and not event.operation.done:
            self.last = [*self.last, event.operation]


class Event:
    """A mark in a stream's work."""

    def __init__(self, timing: bool = True):
        self.timing = timing
        self.handle = next(_handles)
        self.recorded = False
        self.capture: tuple | None = None  # (Capture, nodes) if last recorded in a capture
        self.operation: Operation | None = None  # queued mark
        self.time = 0.0
        _events[self.handle] = self

    def record(self, stream: Stream) -> None:
        if stream.capture is not None:
            stream.capture.check()
            self.capture = stream.capture, stream.capture.tails[stream]
            return
        if stream.legacy:
            capture.forbid_legacy("event record")
        self.capture, self.recorded, self.operation = None, True, None
        if not current.lazy_streams:
            self.time = time.perf_counter()
            return

        def mark():
            if self.operation is operation:
                self.time = time.perf_counter()
        operation = self.operation = stream.enqueue(mark)

    def query(self) -> bool:
        self._refuse_captured("cuEventQuery")
        return self.operation is None or poll(self.operation)

    def synchronize(self) -> None:
        self._refuse_captured("cuEventSynchronize")
        if self.operation is not None:
            complete(self.operation)

    def milliseconds_to(self, end: Event) -> float:
        """Time between two finished marks; never negative."""
        for event in (self, end):
            event._refuse_captured("cuEventElapsedTime")
            if not (event.timing and event.recorded):
                raise Refused("CUDA_ERROR_INVALID_HANDLE",
                              "an event without timing or that was never recorded")
            if event.operation is not None and not event.operation.done:
                raise Refused("CUDA_ERROR_NOT_READY", "the event has not happened yet")
        return max(0.0, 1000 * (end.time - self.time))

    def _refuse_captured(self, what: str) -> None:
        if self.capture is not None:
            owner = self.capture[0]
            owner.invalidate("UNSUPPORTED", f"{what} of an event recorded in the capture")
            raise Refused("CUDA_ERROR_CAPTURED_EVENT",
                          f"{what} of an event that was last recorded in a capture")


def stream_of(handle) -> Stream:
    """The stream of a handle (CUstream or int); a VirtualGPUError if there is none."""
    number = 0 if handle is None else int(handle)
    if number in (0, LEGACY):
        return legacy
    if number == PER_THREAD:
        if not hasattr(_thread, "stream"):
            _thread.stream = Stream()
        return _thread.stream
    if number not in _streams:
        raise VirtualGPUError("bad driver call", f"no stream {number:#x} (destroyed?)")
    return _streams[number]


def event_of(handle) -> Event:
    """The event of a handle; a VirtualGPUError if there is none."""
    if int(handle) not in _events:
        raise VirtualGPUError("bad driver call", f"no event {int(handle):#x} (destroyed?)")
    return _events[int(handle)]


def destroy_stream(handle) -> None:
    """Forget a stream; what is queued in it still runs."""
    stream = stream_of(handle)
    if stream.capture is not None:
        stream.capture.invalidate("UNJOINED", "a capturing stream was destroyed")
    if stream.blocking:
        _orphans[:] = [o for o in _orphans + stream.last if not o.done]
    del _streams[stream.handle]


def destroy_event(handle) -> None:
    del _events[event_of(handle).handle]


def complete(operation: Operation) -> None:
    """Run an operation after all it depends on. An error drops everything that is queued."""
    stack = [operation]
    while stack:
        top = stack[-1]
        waiting = [o for o in top.dependencies if not o.done]
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        if top.done:
            continue
        del _pending[top]
        run = top.retire()
        try:
            _execute(run)
        except BaseException:
            for lost in _pending:
                lost.retire()
            _pending.clear()
            raise


def when_idle(action: Callable[[], None]) -> None:
    """Run everything that is queued and then `action`.

    Python's garbage collector may free device memory in the middle of an operation that uses
    it; as on a GPU, that waits until the operation is finished.
    """
    if _executing:
        _delayed.append(action)
        return
    flush()
    action()


def _execute(run: Callable[[], None]) -> None:
    global _executing
    _executing += 1
    try:
        run()
    finally:
        _executing -= 1
        while _delayed and not _executing:
            when_idle(_delayed.pop(0))


def poll(operation: Operation) -> bool:
    """Whether an operation is finished; asking POLLS times makes it so."""
    operation.polls += 1
    if not operation.done and operation.polls >= POLLS:
        complete(operation)
    return operation.done


def flush() -> None:
    """Run everything that is queued, last stream first."""
    while _pending:
        complete(next(reversed(_pending)))


def synchronize_device() -> None:
    """Wait for all work; impossible while anything is captured."""
    capture.forbid_always("synchronising the context")
    flush()


legacy = Stream(legacy=True)
