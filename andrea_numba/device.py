"""Where to compute: asked once, never raising for `auto`, said in one line."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernels
from kernels.common.gpus import OLDEST, dotted

from .errors import UserError
from .memory import HOST, HostMemory
from .program import SMALLER_RUN, say

INSTALL = "pip install '.[cu13]'"
EXTRAS = f"{INSTALL} (NVIDIA driver r580 or newer) or '.[cu12]' (r525 or newer)"
WSL_HINT = (" (under WSL a Linux driver package hides the one of Windows, "
            "/usr/lib/wsl/lib/libcuda.so.1: remove the package)")


@dataclass(frozen=True)
class Device:
    """The chosen backend: its kernel table, its memory, and the line that says what and why."""

    name: str
    ops: SimpleNamespace
    memory: Any
    line: str


def op_table(backend: str) -> SimpleNamespace:
    """The kernels of one backend, after a look at whose `kernels` package was found."""
    if getattr(kernels, "IDENTITY", None) != "andrea-numba":
        raise UserError(f"the package `kernels` at {kernels.__path__[0]} belongs to another "
                        "project of that name; install andrea-numba in an environment of its own")
    from kernels import registry

    return registry.op_table(backend)


def choose(device: str, precision: str = "auto", graph: bool = True,
           smaller: str = SMALLER_RUN) -> Device:
    """The backend for `--device` auto, cpu or cuda; UserError when cuda is asked for in vain.

    `precision` is auto, fp32 or bf16, `graph` whether a GPU's steps are recorded. `smaller` says
    what needs less memory, for the line that is printed when a GPU's is full.
    """
    if device == "cpu":
        return _cpu(precision)
    problem = cuda_problem()
    if not problem:
        from .device_memory import DeviceMemory

        precision = "bf16" if precision == "auto" else precision
        return Device("cuda", op_table("gpu"), DeviceMemory(precision, graph, smaller),
                      f"device: cuda ({gpu().line}), products in {precision}")
    if device == "cuda":
        raise UserError(f"--device cuda: {problem}; use --device cpu")
    return _cpu(precision, f"; {problem}")


def _cpu(precision: str, reason: str = "") -> Device:
    ops = op_table("cpu")
    from kernels.common import cpu_features

    line = f"device: cpu ({cpu_features.RUNG} kernels{reason})"
    if precision != "bf16":
        return Device("cpu", ops, HOST, line)
    if not cpu_features.BF16:
        raise UserError("--precision bf16 needs a GPU or a processor with avx512_bf16, and this is "
                        f"{line}; use --precision fp32")
    return Device("cpu", ops, HostMemory("bf16"), f"{line}, products in bf16")


def cuda_problem() -> str:
    """Why CUDA cannot be used here, in one line; empty when it can. Never raises."""
    try:
        if importlib.util.find_spec("numba_cuda") is None:
            return f"numba-cuda not installed: {INSTALL}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they warn of is said below, or harmless
            return _problem()
    except Exception as error:  # a driver or a package that is broken in a way of its own
        return explain(error) or f"CUDA does not work: {_one_line(error)}"


def _problem() -> str:
    try:
        from kernels.common.cuda import cuda, linker_version
    except ImportError as error:
        return _one_line(error)
    found = gpu()
    if found.capability < OLDEST:
        return (f"{found.name} has compute capability {dotted(found.capability)}; "
                f"{dotted(OLDEST)} is the oldest that these kernels run on")
    extra = "cu13" if found.driver >= (13, 0) else "cu12"
    if not cuda.cudadrv.nvvm.is_available():
        return f"the CUDA compiler (NVVM) is not installed: pip install '.[{extra}]'"
    linker_version()  # raises where nvJitLink is missing
    toolkit = cuda.runtime.get_version()
    if toolkit[0] > found.driver[0]:
        return (f"the NVIDIA driver (CUDA {dotted(found.driver)}) is older than the installed "
                f"toolkit (CUDA {dotted(toolkit)}): update the driver, or "
                f"pip install '.[{extra}]'")
    return ""


@dataclass(frozen=True)
class Gpu:
    """The current CUDA device."""

    name: str
    capability: tuple[int, int]
    driver: tuple[int, int]  # the newest CUDA version that the driver knows

    @property
    def line(self) -> str:
        return (f"{self.name}, compute capability {dotted(self.capability)}, "
                f"driver for CUDA {dotted(self.driver)}")


def gpu() -> Gpu:
    """The current CUDA device; whatever numba-cuda raises when there is none."""
    from kernels.common.cuda import cuda, device_name, driver

    capability = cuda.current_context().device.compute_capability
    return Gpu(device_name(), tuple(capability), driver.get_version())


def explain(error: BaseException) -> str:
    """In one line, what an error of CUDA means for the user; empty for one that is not known."""
    text = _one_line(error)
    if "NUMBA_DISABLE_CUDA" in text:
        return "NUMBA_DISABLE_CUDA=1 turns CUDA off: unset it"
    if "driver library cannot be found" in text:
        return "no NVIDIA driver (libcuda) is installed" + _wsl_hint()
    if "CUDA_ERROR_NO_DEVICE" in text:
        return "the NVIDIA driver finds no GPU (is CUDA_VISIBLE_DEVICES set?)" + _wsl_hint()
    if "libnvvm" in text.lower() or "NvvmSupportError" in type(error).__name__:
        return f"the CUDA compiler (NVVM) is not installed: {EXTRAS}"
    if "nvjitlink" in text.lower():
        return f"the CUDA linker (nvJitLink) is not installed: {EXTRAS}"
    if "libnvrtc" in text.lower():
        return f"a part of the CUDA toolkit (NVRTC) is not installed: {EXTRAS}"
    if re.search("UNSUPPORTED_PTX_VERSION|PTX was compiled with an unsupported toolchain", text):
        return ("the NVIDIA driver is older than the installed CUDA toolkit: update the driver, or "
                "install the other extra (cu12, cu13)")
    if "OUT_OF_MEMORY" in text:
        return "the GPU has not enough free memory"
    return ""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn errors of CUDA that the user can do something about into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        meaning = explain(error)
        if not meaning:
            raise
        raise UserError(f"{meaning}; --device cpu works without CUDA") from error


def compile_notice() -> bool:
    """Say that the first use will take a while, when no compiled kernels are in the cache."""
    from kernels.common.cache import cache_folder

    if cache_folder().exists():
        return False
    say("compiling kernels for this machine: once, up to a minute")
    return True


def _wsl_hint() -> str:
    try:
        version = Path("/proc/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return WSL_HINT if "microsoft" in version.lower() else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
