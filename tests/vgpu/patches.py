"""Where numba-cuda and cuda.core are made to use the virtual GPU instead of the driver.

numba-cuda reaches the driver through the functions of `cuda.bindings.driver` and through the
compiled package `cuda.core`, which calls the C driver; so both are replaced where Python code
looks them up. These are internals: `install` first checks that all of them exist.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import warnings

import numpy as np

from . import launch, modules
from .device import device
from .options import current
from .report import VirtualGPUError

SUPPORTED = {"numba-cuda": "0.30.", "cuda-core": "1.2.", "cuda-bindings": "13.4."}
INSTALLATION = 'pip install "numba-cuda[cu13]>=0.30,<0.31"'

# Every name that is replaced or relied on: module, dotted path inside it.
NAMES = (
    ("numba.cuda.cudadrv.driver", "driver.is_initialized"),
    ("numba.cuda.cudadrv.driver", "driver.initialization_error"),
    ("numba.cuda.cudadrv.driver", "make_logger"),
    ("numba.cuda.cudadrv.driver", "ExperimentalDevice"),
    ("numba.cuda.cudadrv.driver", "Driver._check_cuda_python_error"),
    ("numba.cuda.cudadrv.driver", "Driver._cuda_python_wrap_fn"),
    ("numba.cuda.cudadrv.driver", "_Linker.complete"),
    ("numba.cuda.cudadrv.driver", "load_module_image"),
    ("numba.cuda.cudadrv.devicearray", "_to_strided_memory_view"),
    ("numba.cuda.api", "from_cuda_array_interface"),
    ("numba.cuda.cudadrv.devicearray", "_StridedMemoryViewShim"),
    ("numba.cuda.cudadrv.devicearray", "_StridedLayoutShim"),
    ("numba.cuda.dispatcher", "launch"),
    ("numba.cuda.dispatcher", "LaunchConfig"),
    ("numba.cuda.memory_management.nrt", "launch"),
    ("numba.cuda.memory_management.nrt", "LaunchConfig"),
    ("cuda.core", "launch"),
    ("cuda.core", "LaunchConfig"),
    ("cuda.core", "Linker"),
    ("cuda.bindings.driver", "CUresult"),
)

installed = False


def install(**options) -> None:
    """See vgpu.install."""
    global installed
    if installed:
        changed = {n for n in ("cc", "memory")
                   if n in options and options[n] != getattr(current, n)}
        if changed:
            raise ValueError(f"option {changed.pop()!r} cannot change after the first install")
        current.update(options)
        return
    check_names()
    current.update(options)
    modules.importable_anywhere()
    _replace_bindings()
    _replace_in_numba()
    installed = True


def check_names() -> None:
    """Refuse to start if something that is replaced does not exist (another version)."""
    missing = [name for name in SUPPORTED if _version(name) is None]
    if missing:
        raise VirtualGPUError("not supported", f"{', '.join(missing)} is not installed; "
                              f"the virtual GPU needs it: {INSTALLATION}")
    from . import driver

    absent = [f"{module}.{path}" for module, path in NAMES if not _exists(module, path)]
    absent += [f"cuda.bindings.driver.{name}" for name in driver.missing()]
    found = ", ".join(f"{name} {_version(name)}" for name in SUPPORTED)
    supported = ", ".join(f"{name} {version}*" for name, version in SUPPORTED.items())
    if absent:
        raise VirtualGPUError(
            "not supported", f"{', '.join(absent)} is missing in {found}; supported: {supported}")
    if not all(_version(name).startswith(version) for name, version in SUPPORTED.items()):
        warnings.warn(f"the virtual GPU was not tested with {found}; supported: {supported}",
                      stacklevel=4)  # the caller of vgpu.install


def _exists(module: str, path: str) -> bool:
    try:
        owner = importlib.import_module(module)
    except ImportError:
        return False
    for name in path.split("."):
        # numba's Driver makes up any attribute it is asked for
        if name not in vars(owner) and not hasattr(type(owner), name):
            return False
        owner = getattr(owner, name)
    return True


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _replace_bindings() -> None:
    from cuda import core  # not "import cuda.core": it may be the module being imported now
    from cuda.bindings import driver as bindings

    from . import driver

    for name, function in driver.functions().items():
        setattr(bindings, name, function)
    core.launch = launch.launch
    core.LaunchConfig = launch.LaunchConfig


def _replace_in_numba() -> None:
    from numba.cuda import dispatcher
    from numba.cuda.cudadrv import devicearray
    from numba.cuda.cudadrv import driver as numba_driver
    from numba.cuda.memory_management import nrt

    from .driver_context import FakeDevice

    singleton = numba_driver.driver
    for name in [n for n in vars(singleton) if n.startswith("cu")]:
        delattr(singleton, name)  # functions bound before
    numba_driver._logger = numba_driver.make_logger()
    singleton.is_initialized, singleton.initialization_error = True, None
    singleton.pid = os.getpid()
    numba_driver.ExperimentalDevice = FakeDevice
    numba_driver.Driver._check_cuda_python_error = _explained(
        numba_driver.Driver._check_cuda_python_error)
    numba_driver._Linker.complete = _complete_link
    numba_driver.load_module_image = _with_ptx(numba_driver.load_module_image)
    devicearray._to_strided_memory_view = _without_core_buffers(
        devicearray._to_strided_memory_view)
    device.delayed_frees.append(functools.partial(_run_delayed_frees, singleton))
    for module in (dispatcher, nrt):
        module.launch, module.LaunchConfig = launch.launch, launch.LaunchConfig


def _explained(check):
    """numba's check of a call's code: capture rules are VirtualGPUErrors, others get a note."""
    from .driver import last_reason

    @functools.wraps(check)
    def explained(self, name, returned):
        code = returned[0].name
        if "CAPTURE" in code:
            raise VirtualGPUError("stream capture", f"{last_reason()} ({name}: {code})")
        try:
            return check(self, name, returned)
        except Exception as error:
            error.add_note(last_reason())
            raise
    return explained


def _run_delayed_frees(singleton) -> None:
    """Do the frees that numba-cuda collects until there are many."""
    for found in singleton.devices.values():
        if found.primary_context is not None:
            found.primary_context.memory_manager.deallocations.clear()


def _complete_link(linker) -> modules.ObjectCode:
    """Replaces numba's _Linker.complete: a cubin, and the PTX that it was made of."""
    code = modules.link(linker._object_codes, linker.arch, max_registers=linker.max_registers)
    linker.linker, linker._info_log, linker._error_log = code, code.log, ""
    linker._complete = True
    return code


def _with_ptx(load):
    """numba's load_module_image, where object code of cuda.core is replaced by ours."""
    @functools.wraps(load)
    def load_with_ptx(context, image, *callbacks):
        if not isinstance(image, modules.ObjectCode):
            image = modules.assemble(image.code.decode().rstrip("\0")) \
                if image.code_type == "ptx" else modules.linked(bytes(image.code))
        return load(context, image, *callbacks)
    return load_with_ptx


def _without_core_buffers(view):
    """numba's _to_strided_memory_view, without the parts of cuda.core that ask the driver."""
    from numba.cuda import api
    from numba.cuda.cudadrv import devicearray, devices
    from numba.cuda.cudadrv import driver as numba_driver

    class OwningView(devicearray._StridedMemoryViewShim):
        __slots__ = ("memory",)  # freed with the view

    @functools.wraps(view)
    def to_view(obj, stream=0, copy=True, user_explicit=False):
        if numba_driver.is_device_memory(obj):
            return obj._strided_memory_view_shim, False
        if (description := getattr(obj, "__cuda_array_interface__", None)) is not None:
            array = api.from_cuda_array_interface(description, owner=obj)
            return array._strided_memory_view_shim, False
        if not isinstance(obj, (np.ndarray, np.generic)) and hasattr(obj, "__dlpack__"):
            raise VirtualGPUError("not supported", f"DLPack argument of {type(obj).__name__}")
        array = np.asanyarray(obj)
        memory = devices.get_context().memalloc(max(array.nbytes, 1))
        flags = array.flags
        result = OwningView(
            ptr=memory.device_pointer_value, shape=array.shape, dtype=array.dtype,
            size=array.size, _layout=devicearray._StridedLayoutShim(
                strides_in_bytes=array.strides, is_contiguous_c=flags.c_contiguous,
                is_contiguous_f=flags.f_contiguous, is_contiguous_any=flags.forc))
        result.memory = memory
        if copy:
            numba_driver.driver.cuMemcpyHtoDAsync(
                result.ptr, array.ctypes.data, array.nbytes, getattr(stream, "handle", stream))
        return result, True
    return to_view
