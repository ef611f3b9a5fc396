"""The functions of cuda.bindings.driver, as the virtual GPU implements them.

`@call(n)` makes a driver function of a Python function: under the device's lock, with the
results as (CUresult, values...), and `n` Nones beside an error code. Which errors become codes:
those a program may handle (out of memory, not ready, capture rules); the reason is logged in
`vgpu.refusals()`. Every other misuse raises VirtualGPUError at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from cuda.bindings import driver as bindings

from .device import Refused, device
from .report import VirtualGPUError

SUCCESS = bindings.CUresult.CUDA_SUCCESS
CALLS: dict[str, Callable] = {}


class _Thread(threading.local):
    in_callback = False
    reason = ""


_thread = _Thread()


def call(values: int = 0) -> Callable:
    """Register a driver function that returns `values` results beside its error code."""
    def register(function: Callable) -> Callable:
        name = function.__name__

        @functools.wraps(function)
        def entry(*arguments, **named):
            with device.lock:
                try:
                    device.check_process()
                    if _thread.in_callback:
                        raise Refused("CUDA_ERROR_NOT_PERMITTED", f"{name} in a stream callback")
                    result = function(*arguments, **named)
                except Refused as refused:
                    device.refuse(refused)
                    _thread.reason = refused.reason
                    return (getattr(bindings.CUresult, refused.code), *[None] * values)
            if values == 0:
                return (SUCCESS,)
            return (SUCCESS, *result) if values > 1 else (SUCCESS, result)
        CALLS[name] = entry
        return entry
    return register


def refuse_call(name: str) -> Callable:
    """A stand-in for a driver function that is not implemented."""
    def refuse(*arguments, **named):
        raise VirtualGPUError("bad driver call", f"{name} is not implemented by the virtual GPU")
    refuse.__name__ = name
    return refuse


def functions() -> dict[str, Callable]:
    """A replacement for every function of cuda.bindings.driver, by name."""
    from . import driver_context, driver_memory, driver_modules, driver_streams  # noqa: F401

    known = [name for name in dir(bindings) if name.startswith("cu") and name[2:3].isupper()]
    return {name: CALLS.get(name) or refuse_call(name) for name in known
            if callable(getattr(bindings, name))}


def missing() -> list[str]:
    """Implemented functions that the installed cuda-bindings does not have."""
    functions()
    return [name for name in CALLS if not hasattr(bindings, name)]


def last_reason() -> str:
    """Why the calling thread's last refused call was refused."""
    return _thread.reason


def run_callback(callback: Callable[[], None]) -> None:
    """Run host code of a stream, which may not call the driver."""
    _thread.in_callback = True
    try:
        callback()
    finally:
        _thread.in_callback = False
