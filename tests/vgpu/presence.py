"""Which device a test run uses: a real GPU if there is one, else the virtual one."""

from __future__ import annotations

import ctypes
import importlib.util
import sys

from .options import current

DRIVER_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# The import of one of these is the first use of CUDA.
TRIGGERS = ("numba.cuda", "cuda.core", "cuda.bindings.driver")


def real_gpu() -> bool:
    """Whether the CUDA driver is installed and finds a device."""
    try:
        library = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return False
    count = ctypes.c_int()
    return library.cuInit(0) == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0 \
        and count.value > 0


def prepare(choice: str | None, **options) -> str:
    """Decide on the device and return a line that says which it is.

    choice: "virtual", "real", or None or "" for the real one where there is one. The virtual
    GPU is installed when CUDA is imported for the first time, so that a run without CUDA tests
    pays nothing. Raises RuntimeError when the choice is impossible.
    """
    if choice not in (None, "", "virtual", "real"):
        raise RuntimeError(f"the test device can be 'virtual' or 'real', not {choice!r}")
    numba_cuda = importlib.util.find_spec("numba_cuda") is not None
    if choice == "real" and not (numba_cuda and real_gpu()):
        raise RuntimeError("the real GPU was asked for, but " + (
            f"{DRIVER_LIBRARY} finds none" if numba_cuda else "numba-cuda is not installed"))
    if choice == "virtual" and not numba_cuda:
        raise RuntimeError("the virtual GPU was asked for, but numba-cuda is not installed")
    if not numba_cuda:
        return "no CUDA (numba-cuda is not installed)"
    if choice != "virtual" and real_gpu():
        return "real GPU"
    install_on_import(options)
    major, minor = current.cc
    return f"virtual GPU sm_{major}{minor}"


def install_on_import(options: dict) -> None:
    """Install the virtual GPU as soon as numba.cuda or the driver bindings are imported."""
    from . import install

    if any(name in sys.modules for name in TRIGGERS):
        install(**options)
    else:
        current.update(options)
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Lets the other finders find the module, and installs after it was executed."""

    def find_spec(self, name: str, path, target=None):
        if name not in TRIGGERS:
            return None
        sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader.exec_module = _then_install(spec.loader.exec_module)
                return spec
        return None


def _then_install(execute):
    def execute_and_install(module):
        from . import install

        execute(module)
        install()
    return execute_and_install
