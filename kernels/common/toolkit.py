"""Where the parts of the CUDA toolkit lie, and every place that is searched for them.

The search itself is NVIDIA's: cuda.pathfinder, which serves all of cuda.bindings and cuda.core.
Nothing here needs a GPU or a driver. Importing this file raises ImportError where cuda.pathfinder
is not installed.
"""

import ctypes
import os
import site
import sys
from collections.abc import Iterator
from pathlib import Path

from cuda import pathfinder

# What numba-cuda and cuda.core load, and the function that tells the version.
LIBRARIES = {"nvvm": "nvvmVersion", "nvJitLink": "nvJitLinkVersion", "nvrtc": "nvrtcVersion",
             "cudart": "cudaRuntimeGetVersion"}
WINDOWS = sys.platform == "win32"
LIBDEVICE = Path("nvvm", "libdevice", "libdevice.10.bc")


def find_library(name: str) -> tuple[str, str]:
    """Path and version of one of LIBRARIES, which is loaded for it.

    Raises what cuda.pathfinder does where there is none, OSError for one that cannot be loaded.
    """
    path = pathfinder.load_nvidia_dynamic_lib(name).abs_path
    ask = getattr(ctypes.CDLL(path), LIBRARIES[name])
    major, minor = ctypes.c_int(), ctypes.c_int()
    if name == "cudart":  # one number, 13050 for 13.5
        ask(ctypes.byref(major))
        return path, f"{major.value // 1000}.{major.value % 1000 // 10}"
    ask(ctypes.byref(major), ctypes.byref(minor))
    return path, f"{major.value}.{minor.value}"


def library_places(name: str) -> Iterator[str]:
    """Where one of LIBRARIES is looked for, in this order."""
    # The tables of the search are not public; the search itself does without this function.
    from cuda.pathfinder._dynamic_libs.lib_descriptor import LIB_DESCRIPTORS
    from cuda.pathfinder._dynamic_libs.search_platform import PLATFORM

    library = LIB_DESCRIPTORS[name]
    files = library.windows_dlls if WINDOWS else library.linux_sonames
    below_roots = PLATFORM.anchor_rel_dirs(library)
    folders = [Path(root, below) for below in PLATFORM.site_packages_rel_dirs(library)
               for root in _site_packages()]
    if conda := os.environ.get("CONDA_PREFIX"):
        folders += [Path(PLATFORM.conda_anchor_point(conda), below) for below in below_roots]
    yield from (str(folder / file) for folder in folders for file in files)
    yield from (f"{file}, by the system's loader" for file in files)
    if root := _cuda_root():
        yield from (str(Path(root, below, file)) for below in below_roots for file in files)
    for other in library.ctk_root_canary_anchor_libnames:
        yield from (f"{below} of the toolkit whose {other} the system's loader finds"
                    for below in below_roots)


def libdevice_places() -> Iterator[Path]:
    """Where numba-cuda looks for libdevice, the bitcode of math functions, in this order."""
    if Path(sys.prefix, "conda-meta").is_dir():
        yield Path(sys.prefix, "Library" if WINDOWS else "", LIBDEVICE)
    for wheel in ("cuda_nvcc", "cu13"):
        yield from (Path(root, "nvidia", wheel, LIBDEVICE) for root in _site_packages())
    if root := _cuda_root():
        yield Path(root, LIBDEVICE)
    if not WINDOWS:
        yield Path("/usr/local/cuda", LIBDEVICE)


def _site_packages() -> list[str]:
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return user + site.getsitepackages()


def _cuda_root() -> str | None:
    return os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME")
