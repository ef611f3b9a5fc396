"""Graphs of captured work, and their executable form."""

from __future__ import annotations

import itertools

from .capture import Node
from .options import current
from .report import VirtualGPUError
from .streams import Operation, Stream

_handles = itertools.count(0x6800_0000, 16)
_graphs: dict[int, Graph] = {}
_executables: dict[int, Executable] = {}


class Graph:
    """Nodes in the order of their capture."""

    def __init__(self, nodes: list[Node]):
        self.nodes = nodes
        self.handle = next(_handles)
        _graphs[self.handle] = self

    def edges(self) -> list[tuple[int, int]]:
        """Pairs (from, to) of positions in `nodes`."""
        position = {node: i for i, node in enumerate(self.nodes)}
        return [(position[d], i) for i, node in enumerate(self.nodes) for d in node.dependencies]


class Executable:
    """A graph that can be launched; launches of one executable do not overlap."""

    def __init__(self, graph: Graph):
        self.nodes = list(graph.nodes)
        self.handle = next(_handles)
        self._last: Operation | None = None
        _executables[self.handle] = self

    def launch(self, stream: Stream) -> None:
        """Run the nodes in stream order, with the arguments of the capture."""
        if stream.capture is not None:
            raise VirtualGPUError("not supported", "launch of a graph inside a capture")
        if not current.lazy_streams:
            stream.submit("graph", self.run)
            return
        if self._last is not None and not self._last.done:
            stream.last = [*stream.last, self._last]
        stream.submit("graph", self.run)
        self._last = stream.last[-1] if stream.last else None

    def run(self) -> None:
        """Run all nodes: as captured, or with options.lazy_streams the last branch first."""
        for node in _late_order(self.nodes) if current.lazy_streams else self.nodes:
            node.run()


def graph_of(handle) -> Graph:
    """The graph of a handle; a VirtualGPUError if there is none."""
    return _lookup(_graphs, handle, "graph")


def executable_of(handle) -> Executable:
    """The executable graph of a handle; a VirtualGPUError if there is none."""
    return _lookup(_executables, handle, "executable graph")


def destroy_graph(handle) -> None:
    del _graphs[graph_of(handle).handle]


def destroy_executable(handle) -> None:
    del _executables[executable_of(handle).handle]


def _lookup(table: dict, handle, what: str):
    if int(handle) not in table:
        raise VirtualGPUError("bad driver call", f"no {what} {int(handle):#x} (destroyed?)")
    return table[int(handle)]


def _late_order(nodes: list[Node]) -> list[Node]:
    """An order that keeps the dependencies and runs the branch captured last first."""
    order: dict[Node, None] = {}
    position = {node: i for i, node in enumerate(nodes)}
    for leaf in reversed(nodes):
        stack = [leaf]
        while stack:
            waiting = [d for d in stack[-1].dependencies if d not in order]
            if waiting:
                stack += sorted(waiting, key=position.get)
            else:
                order.setdefault(stack.pop())
    return list(order)
