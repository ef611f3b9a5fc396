"""Stream capture: which work becomes graph nodes, and what a capture forbids."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from .device import Refused

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # CUstreamCaptureMode
MODES = ("global", "thread-local", "relaxed")
PREFIX = "CUDA_ERROR_STREAM_CAPTURE_"

_ids = itertools.count(1)
_active: list[Capture] = []


class _Thread(threading.local):
    mode = GLOBAL


_thread = _Thread()


class Node:
    """One captured operation; `run` holds its arguments as they were at the capture."""

    def __init__(self, kind: str, run: Callable[[], None], dependencies: frozenset[Node]):
        self.kind, self.run, self.dependencies = kind, run, dependencies


class Capture:
    """A capture in progress: its nodes, and per stream the nodes that new work depends on."""

    def __init__(self, origin, mode: int):
        self.origin, self.mode = origin, mode
        self.id = next(_ids)
        self.thread = threading.get_ident()
        self.nodes: list[Node] = []
        self.tails: dict[object, frozenset[Node]] = {origin: frozenset()}
        self.reason: str | None = None  # why the capture is invalid
        origin.capture = self
        _active.append(self)

    def add(self, stream, kind: str, run: Callable[[], None]) -> None:
        """Record work of a capturing stream."""
        self.check()
        node = Node(kind, run, self.tails[stream])
        self.nodes.append(node)
        self.tails[stream] = frozenset((node,))

    def join(self, stream, nodes: frozenset[Node]) -> None:
        """Let further work of `stream` depend on `nodes`; the stream becomes part of this."""
        stream.capture = self
        self.tails[stream] = self.tails.get(stream, frozenset()) | nodes

    def check(self) -> None:
        """Refuse if the capture is invalid already."""
        if self.reason is not None:
            raise Refused(PREFIX + "INVALIDATED", f"the capture is invalid: {self.reason}")

    def invalidate(self, code: str, reason: str) -> Refused:
        """Mark the capture invalid; returns the refusal for the caller to raise."""
        self.reason = self.reason or reason
        return Refused(PREFIX + code, reason)

    def end(self, stream) -> list[Node]:
        """Finish; returns the nodes, or refuses and leaves the streams without a capture."""
        if stream is not self.origin:
            raise self.invalidate("UNMATCHED", "the capture was not begun on this stream")
        if self.mode != RELAXED and self.thread != threading.get_ident():
            raise self.invalidate("WRONG_THREAD", "the capture was begun by another thread")
        _active.remove(self)
        for member in self.tails:
            member.capture = None
        self.check()
        depended = frozenset().union(*(node.dependencies for node in self.nodes))
        loose = [n for n in self.nodes if n not in depended and n not in self.tails[self.origin]]
        if loose:
            raise Refused(PREFIX + "UNJOINED", f"{len(loose)} branches (the last node is a "
                          f"{loose[0].kind}) are not joined to the capture's first stream")
        return self.nodes


def begin(stream, mode: int) -> None:
    """Start a capture on a stream that is not the legacy default stream."""
    if stream.legacy:
        raise Refused(PREFIX + "UNSUPPORTED", "capture of the legacy default stream")
    if stream.capture is not None:
        raise Refused("CUDA_ERROR_ILLEGAL_STATE", "the stream is capturing already")
    Capture(stream, mode)


def exchange_mode(mode: int) -> int:
    """Set the calling thread's capture mode; returns the one before."""
    before, _thread.mode = _thread.mode, mode
    return before


def forbid(what: str) -> None:
    """Refuse a call that may break captures: allocations, loads, synchronisation, queries."""
    broken = []
    for capture in _active:
        mine = capture.thread == threading.get_ident() and capture.mode != RELAXED
        if _thread.mode != RELAXED and (
                mine or (_thread.mode == GLOBAL and capture.mode == GLOBAL)):
            broken.append(capture)
    _break(broken, "UNSUPPORTED", f"{what} during a {{}} capture")


def forbid_always(what: str) -> None:
    """Refuse what is impossible while any stream captures, whatever the mode."""
    _break(list(_active), "UNSUPPORTED", f"{what} during a {{}} capture")


def forbid_legacy(what: str) -> None:
    """Refuse work of the legacy stream, which would wait for capturing blocking streams."""
    broken = [c for c in _active if any(stream.blocking for stream in c.tails)]
    _break(broken, "IMPLICIT",
           f"{what} on the legacy default stream would wait for a {{}} capture")


def wait_event(stream, event, what: str) -> bool:
    """Handle a wait that concerns a capture; False if it concerns none."""
    if event.capture is None:
        if stream.capture is not None and event.recorded:
            raise stream.capture.invalidate(
                "ISOLATION", f"{what}: the event was recorded outside the capture")
        return stream.capture is not None
    capture, nodes = event.capture
    if capture not in _active:
        raise Refused("CUDA_ERROR_CAPTURED_EVENT", f"{what}: the event's capture has ended")
    capture.check()
    if stream.legacy:
        raise capture.invalidate("IMPLICIT", f"{what} on the legacy default stream")
    if stream.capture not in (None, capture):
        stream.capture.invalidate("MERGE", what)
        raise capture.invalidate("MERGE", f"{what} would merge two captures")
    capture.join(stream, nodes)
    return True


def _break(captures: list[Capture], code: str, reason: str) -> None:
    for capture in captures:
        refused = capture.invalidate(code, reason.format(MODES[capture.mode]))
    if captures:
        raise refused
