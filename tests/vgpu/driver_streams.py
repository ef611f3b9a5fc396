"""Driver calls for streams, events, host functions, stream capture and graphs."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver as bindings

from . import capture, graphs, streams
from .device import Refused
from .driver import call, run_callback
from .driver_context import CONTEXT
from .report import VirtualGPUError
from .streams import event_of, stream_of

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
NON_BLOCKING = 1
EVENT_FLAGS = 3  # blocking synchronisation, no timing


def _stream(flags, priority: int = 0):
    if flags not in (0, NON_BLOCKING):
        raise VirtualGPUError("bad driver call", f"stream flags {flags} are not modelled")
    return bindings.CUstream(streams.Stream(flags != NON_BLOCKING, priority).handle)


@call(1)
def cuStreamCreate(flags):
    return _stream(flags)


@call(1)
def cuStreamCreateWithPriority(flags, priority):
    return _stream(flags, min(0, max(-5, priority)))


@call()
def cuStreamDestroy(stream):
    streams.destroy_stream(stream)


@call(1)
def cuStreamGetPriority(stream):
    return stream_of(stream).priority


@call(1)
def cuStreamGetFlags(stream):
    return 0 if stream_of(stream).blocking else NON_BLOCKING


@call(1)
def cuStreamGetId(stream):
    return stream_of(stream).handle


@call(1)
def cuStreamGetCtx(stream):
    stream_of(stream)
    return CONTEXT


@call(1)
def cuStreamGetDevice(stream):
    stream_of(stream)
    return bindings.CUdevice(0)


@call()
def cuStreamSynchronize(stream):
    found = stream_of(stream)
    if found.capture is None:
        capture.forbid("cuStreamSynchronize")
    found.synchronize()


@call()
def cuStreamQuery(stream):
    found = stream_of(stream)
    if found.capture is None:
        capture.forbid("cuStreamQuery")
    if not found.query():
        raise Refused("CUDA_ERROR_NOT_READY", "the stream has unfinished work")


@call()
def cuStreamWaitEvent(stream, event, flags):
    if flags:
        raise VirtualGPUError("bad driver call", f"event wait flags {flags} are not modelled")
    stream_of(stream).wait(event_of(event))


@call()
def cuStreamAddCallback(stream, callback, data, flags):
    found = stream_of(stream)
    if found.capture is not None:
        raise found.capture.invalidate("UNSUPPORTED", "cuStreamAddCallback during a capture")
    function, handle = CALLBACK(int(callback)), int(stream)
    found.submit("host", lambda: run_callback(lambda: function(handle, 0, data)), host=True)


@call()
def cuLaunchHostFunc(stream, function, data):
    host = HOST_FUNCTION(int(function))
    stream_of(stream).submit("host", lambda: run_callback(lambda: host(data)), host=True)


@call(1)
def cuEventCreate(flags):
    if flags & ~EVENT_FLAGS:
        raise VirtualGPUError("bad driver call", f"event flags {flags} are not modelled")
    disable = int(bindings.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    return bindings.CUevent(streams.Event(timing=not flags & disable).handle)


@call()
def cuEventDestroy(event):
    streams.destroy_event(event)


@call()
def cuEventRecord(event, stream):
    event_of(event).record(stream_of(stream))


@call()
def cuEventRecordWithFlags(event, stream, flags):
    if flags:
        raise VirtualGPUError("bad driver call", f"event record flags {flags} are not modelled")
    event_of(event).record(stream_of(stream))


@call()
def cuEventQuery(event):
    found = event_of(event)
    if found.capture is None:
        capture.forbid("cuEventQuery")
    if not found.query():
        raise Refused("CUDA_ERROR_NOT_READY", "the event has not happened yet")


@call()
def cuEventSynchronize(event):
    found = event_of(event)
    if found.capture is None:
        capture.forbid("cuEventSynchronize")
    found.synchronize()


@call(1)
def cuEventElapsedTime(start, end):
    return event_of(start).milliseconds_to(event_of(end))


@call()
def cuStreamBeginCapture(stream, mode):
    capture.begin(stream_of(stream), int(mode))


@call(1)
def cuStreamEndCapture(stream):
    found = stream_of(stream)
    if found.capture is None:
        raise Refused("CUDA_ERROR_ILLEGAL_STATE", "the stream is not capturing")
    return bindings.CUgraph(graphs.Graph(found.capture.end(found)).handle)


def _status(found):
    kinds = bindings.CUstreamCaptureStatus
    if found.legacy:
        capture.forbid_legacy("query of the capture status")
    if found.capture is None:
        return kinds.CU_STREAM_CAPTURE_STATUS_NONE
    if found.capture.reason is not None:
        return kinds.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    return kinds.CU_STREAM_CAPTURE_STATUS_ACTIVE


@call(1)
def cuStreamIsCapturing(stream):
    return _status(stream_of(stream))


@call(6)
def cuStreamGetCaptureInfo(stream):
    """Status and capture id; the graph and its nodes are not exposed before the end."""
    found = stream_of(stream)
    number = found.capture.id if found.capture is not None else 0
    return (_status(found), bindings.cuuint64_t(number), bindings.CUgraph(0), [], [],
            len(found.capture.tails[found]) if found.capture is not None else 0)


@call(1)
def cuThreadExchangeStreamCaptureMode(mode):
    return bindings.CUstreamCaptureMode(capture.exchange_mode(int(mode)))


@call(1)
def cuGraphInstantiate(graph, flags):
    return _instantiate(graph, flags)


@call(1)
def cuGraphInstantiateWithParams(graph, parameters):
    return _instantiate(graph, int(parameters.flags))


def _instantiate(graph, flags: int):
    if flags:
        raise VirtualGPUError("bad driver call", f"instantiation flags {flags} are not modelled")
    return bindings.CUgraphExec(graphs.Executable(graphs.graph_of(graph)).handle)


@call()
def cuGraphUpload(executable, stream):
    graphs.executable_of(executable)
    stream_of(stream)


@call()
def cuGraphLaunch(executable, stream):
    graphs.executable_of(executable).launch(stream_of(stream))


@call()
def cuGraphExecDestroy(executable):
    graphs.destroy_executable(executable)


@call()
def cuGraphDestroy(graph):
    graphs.destroy_graph(graph)


@call(2)
def cuGraphGetNodes(graph, count=0):
    """Handles of the first `count` nodes, and the number of nodes."""
    nodes = graphs.graph_of(graph).nodes
    return [_node(graph, i) for i in range(min(count, len(nodes)))], len(nodes)


@call(4)
def cuGraphGetEdges(graph, count=0):
    """The first `count` edges as two lists of nodes, no edge data, and the number of edges."""
    edges = graphs.graph_of(graph).edges()
    start, end = ([_node(graph, edge[side]) for edge in edges[:count]] for side in (0, 1))
    return start, end, [], len(edges)


@call(1)
def cuGraphNodeGetType(node):
    graph, position = divmod(int(node), NODES)
    kind = graphs.graph_of(graph).nodes[position].kind.upper()
    return getattr(bindings.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{kind}")


NODES = 1 << 24  # a node's handle is its graph's handle times this, plus its position


def _node(graph, position: int):
    return bindings.CUgraphNode(int(graph) * NODES + position)
