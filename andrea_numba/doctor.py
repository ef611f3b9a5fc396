"""`andrea-train --doctor`: what is installed, where each part of CUDA was found, and the choice.

Nothing is imported before the probe that needs it. Each probe stands on its own: what one raises
becomes a line of the report, and the next one is asked.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGES = ("numpy", "numba", "llvmlite", "safetensors", "numba-cuda", "cuda-bindings",
            "cuda-core", "cuda-pathfinder", "cuda-toolkit")
TESTED_NUMBA = "0.68."
VECTORS = ("sse4.2", "avx", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "neon", "sve")
VARIABLES = ("CONDA_PREFIX", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
             "OPENBLAS_NUM_THREADS", "XDG_CACHE_HOME")
PREFIXES = ("ANDREA_", "CUDA_", "NUMBA_")
NO_EFFECT = {"NUMBA_CUDA_DRIVER": "numba-cuda does not read it"}
# cuda.bindings asks the system's loader for the first, numba-cuda for both; the files are where
# packages put it, and Windows for Linux in the last.
DRIVERS = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
DRIVER_FILES = () if sys.platform == "win32" else (
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so",
    "/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so", "/usr/lib/wsl/lib/libcuda.so.1")

Probe = Callable[[], Iterator[str]]


def report() -> None:
    """Print the report; its last line is what `--device auto` takes, and why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they warn of is in the report
        for title, probe in PROBES.items():
            _print(title)
            for line in _lines(probe):
                _print(f"  {line}")
        for line in _lines(_verdict):
            _print(line)


def _print(line: str) -> None:
    print(line, flush=True)  # a library that takes the process down shows where that was


def _lines(probe: Probe) -> Iterator[str]:
    """What `probe` yields, and a line for what it raises."""
    try:
        yield from probe()
    except Exception as error:
        yield f"failed: {type(error).__name__}: {' '.join(str(error).split())}"


def _packages() -> Iterator[str]:
    yield f"Python {platform.python_version()} ({sys.executable})"
    for name in PACKAGES:
        yield f"{name} {_version(name) or 'is not installed'}"
    numba = _version("numba")
    if numba and not numba.startswith(TESTED_NUMBA):
        yield f"numba {numba} is not the tested {TESTED_NUMBA}*"
    if importlib.util.find_spec("numba_cuda"):
        from kernels.common.cuda import untested_versions

        yield from untested_versions()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _machine() -> Iterator[str]:
    yield platform.platform()
    yield from _lines(_processor)
    yield from _lines(_rung)
    yield from _lines(_threads)
    yield from _lines(_free_memory)


def _processor() -> Iterator[str]:
    from llvmlite import binding

    from kernels.common.timing import processor_name

    features = binding.get_host_cpu_features()
    yield (f"{processor_name()} ({binding.get_host_cpu_name()}): "
           f"{', '.join(name for name in VECTORS if features.get(name)) or 'no vectors known'}")


def _rung() -> Iterator[str]:
    from kernels.common import cpu_features

    yield f"CPU kernels: {cpu_features.RUNG}, of {', '.join(cpu_features.RUNGS)}"


def _threads() -> Iterator[str]:
    import numba

    used = numba.get_num_threads()
    yield f"{os.cpu_count()} cores, {used} threads in use ({numba.threading_layer()})"


def _free_memory() -> Iterator[str]:
    from .metrics import available_memory, byte_size

    free = available_memory()
    yield f"{byte_size(free)} of memory free" if free else "the system does not say what is free"


def _environment() -> Iterator[str]:
    for name in sorted(os.environ):
        if name in VARIABLES or name.startswith(PREFIXES):
            note = f" ({NO_EFFECT[name]})" if name in NO_EFFECT else ""
            yield f"{name}={os.environ[name]}{note}"


def _caches() -> Iterator[str]:
    from kernels.common import cache

    from . import data

    for what, folder in (("compiled kernels", cache.cache_folder()),
                         ("token ids", data.cache_folder())):
        yield f"{what}: {folder} ({_writable(folder)})"


def _writable(folder: Path) -> str:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return "writable"
    except OSError as error:
        return f"cannot be written: {error.strerror}"


def _driver() -> Iterator[str]:
    for name in DRIVERS:
        yield f"{name}, by the system's loader: {_load(name)}"
    for path in map(Path, DRIVER_FILES):
        yield f"{path}: {path.resolve() if path.exists() else 'not there'}"
    kernel_module = Path("/proc/driver/nvidia/version")
    if kernel_module.exists():
        yield kernel_module.read_text(encoding="utf-8").splitlines()[0]
    yield from _lines(_newest_cuda)


def _load(library: str) -> str:
    """The path that was loaded, or why none was."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    maps = Path("/proc/self/maps")
    mapped = maps.read_text(encoding="utf-8").split() if maps.exists() else []
    return next((path for path in mapped if Path(path).name.startswith(library)), "loaded")


def _newest_cuda() -> Iterator[str]:
    from kernels.common.cuda import driver
    from kernels.common.gpus import dotted

    yield f"newest CUDA that it knows: {dotted(driver.get_version())}"


def _toolkit() -> Iterator[str]:
    from kernels.common import toolkit

    for name in toolkit.LIBRARIES:
        yield from _lines(lambda name=name: _library(name))
    yield from _lines(_libdevice)


def _library(name: str) -> Iterator[str]:
    from kernels.common import toolkit

    try:
        path, version = toolkit.find_library(name)
        yield f"{name} {version}: {path}"
    except Exception as error:  # not there, or not to be loaded
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        yield from _missing(name, reason, toolkit.library_places(name))


def _libdevice() -> Iterator[str]:
    from kernels.common import toolkit

    places = list(toolkit.libdevice_places())
    found = next((path for path in places if path.is_file()), None)
    if found:
        yield f"libdevice: {found}"
    else:
        yield from _missing("libdevice", "no such file", places)


def _missing(name: str, reason: str, places) -> Iterator[str]:
    from .device import EXTRAS

    yield f"{name} is missing ({reason}): {EXTRAS}; tried"
    yield from (f"  {place}" for place in places)


def _gpus() -> Iterator[str]:
    from kernels.common.cuda import cuda, device_name, driver
    from kernels.common.gpus import OLDEST, dotted

    from .metrics import byte_size

    for gpu in cuda.list_devices():
        capability = tuple(gpu.compute_capability)
        answer = ("supported" if capability >= OLDEST
                  else f"too old, {dotted(OLDEST)} is the oldest supported")
        yield (f"{gpu.id}: {device_name(gpu)}, compute capability {dotted(capability)} ({answer}), "
               f"{byte_size(int(driver.cuDeviceTotalMem(gpu.id)))}")


def _verdict() -> Iterator[str]:
    from . import device

    yield device.choose("auto").line


PROBES: dict[str, Probe] = {
    "packages": _packages,
    "machine": _machine,
    "environment": _environment,
    "caches": _caches,
    "NVIDIA driver": _driver,
    "CUDA toolkit": _toolkit,
    "GPUs": _gpus,
}
