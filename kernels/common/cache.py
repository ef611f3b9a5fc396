"""An `njit` whose on-disk cache notices every edit: all kernels are compiled through it.

Numba's own `cache=True` looks only at the file of the cached function, so it returns stale
code after an edit in a helper of another file. Here the cache folder itself is named by the
SHA-256 of all Python sources of the package, the versions of NumPy, Numba and llvmlite, and the
rung of cpu_features, by which sources choose what they compile:

    <base>/andrea-numba/jit/<hash>      base = $ANDREA_CACHE_DIR, else $NUMBA_CACHE_DIR,
                                        else $XDG_CACHE_HOME, else ~/.cache

Numba adds the processor's name and features to each key and writes through a rename, so the
folder may be shared between machines and by processes that run at the same time. Nothing is
compiled, hashed or written before a function's first call. Numba's configuration and the
environment are only read. CUDA kernels are kept in the same folder by the same code; common/cuda.py
adds the device to their keys.
"""

import functools
import hashlib
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import llvmlite
import numba
import numpy as np
from llvmlite.binding import Linkage
from numba.core import caching, codegen, compiler

from .cpu_features import RUNG

KEEP_FOLDERS = 4  # the newest; other versions of the sources, other environments
# What an unreadable folder or unpickling a damaged file may raise.
_DAMAGED = (OSError, EOFError, pickle.UnpicklingError, ValueError, TypeError, LookupError,
            AttributeError, ImportError)


def njit(**options) -> Callable:
    """`numba.njit` with the source-hashed cache; use as `@njit()` or `@njit(parallel=True)`.

    Two defaults differ from Numba's. Division follows IEEE rules (`error_model="numpy"`): the
    check for a zero divisor would keep loops from being vectorised. Without `fastmath` a function
    is exact: Numba would let it inherit the flags of whichever caller compiles it first.
    """
    options.setdefault("error_model", "numpy")
    options.setdefault("fastmath", False)

    def decorate(function: Callable) -> Callable:
        dispatcher = numba.njit(pipeline_class=_Compiler, **options)(function)
        dispatcher._cache = LazyCache(lambda: _CpuCache(function))
        return dispatcher

    return decorate


class _Library(codegen.JITCodeLibrary):
    """Machine code that calls its own copies of functions, the same whether compiled or loaded.

    Numba optimises a copy of each callee, the body of a `prange` among them, once more together
    with its caller and leaves it a weak symbol. Where the callee was compiled in the same process,
    the loader gives the caller that earlier code; where the caller comes from the disk, the copy.
    The two may round differently.
    """

    def _finalize_final_module(self):
        for function in self._final_module.functions:
            if function.linkage in (Linkage.linkonce_odr, Linkage.weak_odr):
                function.linkage = Linkage.internal
        super()._finalize_final_module()


class _Part(codegen.JITCodeLibrary):
    """What Numba compiles on the way, as the body of a `prange` and the wrappers around that.

    Only the copy in its caller's library is optimised and becomes machine code, once for all of
    them: 24 instead of 30 seconds for the kernels of training, in one process. It is made to run
    by itself if anyone asks for its address.
    """

    _runs = False

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name):
        self._ensure_finalized()
        if not self._runs:
            self._runs = True
            super()._optimize_final_module()
            super()._finalize_final_module()
        return super().get_pointer_to_function(name)


class _Compiler(compiler.Compiler):
    def _compile_core(self):
        target = self.state.targetctx.codegen()
        usual, target._library_class = target._library_class, _Part
        try:
            return super()._compile_core()
        finally:
            target._library_class = usual

    def define_pipelines(self):
        state = self.state
        state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().define_pipelines()


@functools.cache
def source_hash() -> str:
    """32 hex digits for the sources of the package and what they are compiled with and for."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    digest.update(f"{numba.__version__} {llvmlite.__version__} {np.__version__} "
                  f"{RUNG}".encode())
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def cache_folder() -> Path:
    """Folder of the compiled code of exactly these sources (it need not exist yet)."""
    base = os.environ.get("ANDREA_CACHE_DIR") or numba.config.CACHE_DIR
    base = base or os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    base = os.path.expanduser(base)
    if base.startswith("~"):  # nobody's home: this user has none
        base = tempfile.gettempdir()
    return Path(base).absolute() / "andrea-numba" / "jit" / source_hash()


@functools.cache
def _use_folder() -> Path:
    """The folder, marked as used now so that pruning keeps it; removes the oldest others."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        others = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
    except OSError:  # saving will notice
        return folder
    for old in others[:-KEEP_FOLDERS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


@functools.cache
def _notice_once() -> None:
    print(f"kernels: compiled code cannot be kept in {cache_folder()}; kernels are compiled again "
          "at every start. Set ANDREA_CACHE_DIR to a writable folder.", file=sys.stderr)


class _Locator(caching._CacheLocator):
    def __init__(self, function: Callable):
        self._py_file = function.__code__.co_filename
        self._line = function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(_use_folder())

    def get_source_stamp(self) -> str:
        # The function's own file may lie outside the package.
        return source_hash() + hashlib.sha256(Path(self._py_file).read_bytes()).hexdigest()

    def get_disambiguator(self) -> str:
        return str(self._line)


class CacheImpl:
    """Where the code of one function is kept; to be mixed into numba's class of that name."""

    def __init__(self, function: Callable, name: str | None = None):
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(function)
        name = name or f"{function.__module__}.{function.__qualname__}"
        self._filename_base = self.get_filename_base(name, getattr(sys, "abiflags", ""))


class CacheFile:
    """One data file per key, written before the index names it; to be mixed into
    numba's IndexDataCacheFile.

    Numba numbers the files, so two processes that compile different signatures at the same time
    can leave an index that names the other's code.
    """

    def save(self, key, data) -> None:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        name = self._data_name_pattern.format(number=int(digest, 16))
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})

    def load(self, key):
        try:
            return super().load(key)
        except _DAMAGED:
            return None

    def _load_index(self) -> dict:
        try:
            return super()._load_index()
        except _DAMAGED:
            return {}


class _CpuCacheImpl(CacheImpl, caching.CompileResultCacheImpl):
    pass


class _CpuCacheFile(CacheFile, caching.IndexDataCacheFile):
    pass


class _CpuCache(caching.FunctionCache):
    _impl_class = _CpuCacheImpl

    def __init__(self, function: Callable):
        super().__init__(function)
        self._cache_file = _CpuCacheFile(self.cache_path, self._impl.filename_base,
                                         self._impl.locator.get_source_stamp())


class LazyCache(caching.NullCache):
    """Opens the cache at the first call; a folder that cannot be written costs one notice."""

    def __init__(self, make_cache: Callable):
        self._make_cache = make_cache

    @functools.cached_property
    def _opened(self):
        return self._make_cache()

    @property
    def cache_path(self) -> str:
        return self._opened.cache_path

    def load_overload(self, sig, target_context):
        return self._opened.load_overload(sig, target_context)

    def save_overload(self, sig, cres) -> None:
        try:
            self._opened.save_overload(sig, cres)
        except OSError:
            _notice_once()
