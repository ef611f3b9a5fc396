"""CUDA as the kernels see it: the only file that imports numba.cuda and cuda.core.

    @kernel(threads=256)
    def _scale(out: Floats, x: Floats, n: int32, factor: float32):
        i = cuda.grid(1)
        if i < n:
            out[i] = factor * x[i]

    _scale.launch(ceil_div(x.size, 256), out, x, x.size, 0.5)

A kernel takes raw pointers and scalars, declared by annotations. A pointer is indexed like an
array, but has no shape and no negative indexes, and costs one parameter instead of seven. It is
compiled at its first launch and kept on disk, and it is launched through cuda.core. Beside the
driver's time that costs the host 3 µs; numba's own path takes 5 µs for each array.

A kernel runs after its launch returns, so that its error shows up in some later call. With
CUDA_LAUNCH_BLOCKING=1 in the environment a launch waits, and names its kernel if it failed.

Importing this file compiles nothing, touches no device and changes no setting. It raises
ImportError, in one line, where numba-cuda is not installed or does not fit the rest.
"""

import functools
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from .cache import CacheFile, CacheImpl, LazyCache, source_hash
from .gpus import OLDEST, dotted

try:
    import numba_cuda
    from cuda import bindings, core
    from cuda.bindings import nvjitlink
    from numba import cuda
    from numba.cuda import cgutils, types
    from numba.cuda.core import caching
    from numba.cuda.cudadrv import devices
    from numba.cuda.cudadrv.driver import binding, driver
    from numba.cuda.dispatcher import CUDACache, CUDACacheImpl
    from numba.cuda.extending import intrinsic
except (ImportError, AttributeError) as error:  # the latter from versions that do not fit
    target = sys.modules.get("numba.cuda")
    found = getattr(target, "implementation", None)
    if found == "NVIDIA" and target.config.ENABLE_CUDASIM:
        raise ImportError("NUMBA_ENABLE_CUDASIM=1 puts numba's simulator in the place of CUDA, "
                          "and it cannot run these kernels: unset it") from None
    problem = "numba-cuda not installed"
    if found == "Built-in":
        problem += f", only numba's own CUDA target ({found})"
    elif isinstance(error, AttributeError):
        problem = "the installed versions of numba, numba-cuda and cuda-python do not fit together"
    elif sys.modules.get("numba_cuda"):
        problem = "a package that numba-cuda needs cannot be imported"
    raise ImportError(
        f"{problem}: pip install '.[cu13]', with an older driver '.[cu12]' ({error})") from None

__all__ = ["Bfloats", "Floats", "Ints", "Kernel", "address", "all_kernels", "cgutils",
           "clear_cache", "core", "cuda", "default_stream", "device_function", "device_name",
           "device_number", "device_problem", "float32", "int32", "int64", "intermediate_code",
           "intrinsic", "kernel", "linker_version", "thread", "types", "uint32", "uint64",
           "untested_versions", "versions"]

int32, int64, uint32, uint64 = types.int32, types.int64, types.uint32, types.uint64
float32 = types.float32
Floats = types.CPointer(float32)
Bfloats = types.CPointer(types.uint16)  # bfloat16, by its bits
Ints = types.CPointer(int32)

TESTED = {"numba-cuda": "0.30", "cuda-core": "1.2", "cuda-bindings": "13.4", "nvJitLink": "13.5"}
BLOCKING = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"  # each launch waits for its kernel
SHARED_WITHOUT_OPT_IN = 48 << 10  # bytes of a block, static and dynamic
_NUMBERS = {int32: np.int32, int64: np.int64, uint32: np.uint32, uint64: np.uint64,
            float32: np.float32}
_kernels: dict[str, "Kernel"] = {}


class _Thread(threading.local):
    """What a host thread launches with; `launch.using_stream` sets the stream."""

    stream = None  # a cuda.core.Stream, None for the default stream
    device: int | None = None  # kept where there is only one: asking numba takes 2 µs


thread = _Thread()


def device_number() -> int:
    """The number of this thread's device; its context is current afterwards."""
    if thread.device is not None:
        return thread.device
    number = devices.get_context().device.id
    if len(devices.gpus) == 1:
        thread.device = number
    return number


def kernel(threads: int | tuple[int, ...], min_blocks: int | None = None,
           name: str | None = None) -> Callable[[Callable], "Kernel"]:
    """Make a `Kernel` of a function whose parameters are annotated with the types above.

    threads     the block, and the launch bound that decides how many registers a thread may use
    min_blocks  blocks that shall fit on a multiprocessor together: fewer registers for each
    name        for factories that make several kernels of one function; names are unique
    """

    def decorate(function: Callable) -> Kernel:
        made = Kernel(function, threads, min_blocks, name)
        if made.name in _kernels:
            raise ValueError(f"two kernels are named {made.name}; give one of them a `name=`")
        _kernels[made.name] = made
        return made

    return decorate


def device_function(function: Callable) -> Callable:
    """A function for kernels to call; it is always inlined."""
    return cuda.jit(device=True, forceinline=True)(function)


def all_kernels() -> dict[str, "Kernel"]:
    """Every kernel of the modules that have been imported, as "matmul.gpu._forward"."""
    return dict(_kernels)


class Kernel:
    """A CUDA kernel with a fixed signature and block; see the top of this file."""

    def __init__(self, function: Callable, threads: int | tuple[int, ...],
                 min_blocks: int | None, name: str | None):
        self.function = function
        self.threads = threads
        self.min_blocks = min_blocks
        module = ".".join(function.__module__.split(".")[-2:])
        self.name = f"{module}.{name or function.__name__}"
        self.__doc__ = function.__doc__
        parameters = inspect.signature(function).parameters.values()
        self.parameters = tuple(parameter.name for parameter in parameters)
        argument_types = tuple(parameter.annotation for parameter in parameters)
        for parameter, annotation in zip(self.parameters, argument_types, strict=True):
            if not isinstance(annotation, types.CPointer) and annotation not in _NUMBERS:
                raise TypeError(f"kernel {self.name}: {parameter} is annotated {annotation!r}, "
                                "expected Floats, Bfloats, Ints, int32, uint32, int64, uint64 or "
                                "float32")
        self.signature = types.void(*argument_types)
        self._convert = tuple(_NUMBERS.get(kind, address) for kind in argument_types)
        self._loaded: dict[int, _Loaded] = {}  # by device number

    def __repr__(self) -> str:
        return f"<kernel {self.name}{self.signature.args}>"

    @property
    def launch_bounds(self) -> tuple[int, ...]:
        """Threads of a block and, if given, `min_blocks`."""
        threads = int(np.prod(self.threads))
        return (threads, self.min_blocks) if self.min_blocks else (threads,)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """numba's dispatcher; making it compiles nothing."""
        made = cuda.jit(launch_bounds=self.launch_bounds, lineinfo=True)(self.function)
        made._cache = LazyCache(lambda: _KernelCache(self))
        return made

    def launch(self, grid: int | tuple[int, ...], *arguments: Any, shared: int = 0) -> None:
        """Run on `grid` blocks, on the current stream.

        Arrays are device arrays or anything with ``__cuda_array_interface__``; None is the null
        pointer; an int is an address. `shared` is dynamic shared memory in bytes.
        """
        try:
            values = [convert(argument) for convert, argument
                      in zip(self._convert, arguments, strict=True)]
        except (TypeError, ValueError, OverflowError) as error:
            raise self._explained(error, arguments) from None
        loaded = self._loaded.get(device_number()) or self._load()
        if shared > loaded.shared_limit:
            loaded.raise_shared_limit(shared)
        config = core.LaunchConfig(grid=grid, block=self.threads, shmem_size=shared)
        stream = thread.stream or default_stream()
        if BLOCKING:
            self._launch_and_wait(grid, stream, config, loaded.kernel, *values)
        else:
            core.launch(stream, config, loaded.kernel, *values)

    def _launch_and_wait(self, grid: int | tuple[int, ...], stream: Any, *launch: Any) -> None:
        """core.launch, and RuntimeError with the kernel's name if it fails or the kernel does.

        A launch that is captured into a graph does not run, and its stream cannot be waited for.
        """
        try:
            core.launch(stream, *launch)
            if not driver.cuStreamIsCapturing(int(stream.handle)):
                driver.cuStreamSynchronize(int(stream.handle))
        except Exception as error:  # of cuda.core, or of numba's calls of the driver
            blocks = grid if isinstance(grid, tuple) else (grid,)
            reason = " ".join(str(error).split())
            raise RuntimeError(f"kernel {self.name} failed on grid {blocks} of {self.threads} "
                               f"threads: {reason}") from error

    def _load(self) -> "_Loaded":
        """Compile, or read from the cache, for the current device."""
        compiled = self.dispatcher.compile(self.signature.args)
        compiled.bind()
        loaded = _Loaded(compiled._codelibrary.get_cufunc(), device_number())
        self._loaded[loaded.device] = loaded
        return loaded

    def _explained(self, error: Exception, arguments: tuple) -> Exception:
        if len(arguments) != len(self.parameters):
            expected = ", ".join(self.parameters)
            return TypeError(f"kernel {self.name} got {len(arguments)} arguments, expected "
                             f"{len(self.parameters)}: {expected}")
        for parameter, convert, argument in zip(self.parameters, self._convert, arguments,
                                                strict=True):
            try:
                convert(argument)
            except (TypeError, ValueError, OverflowError) as reason:
                return type(reason)(f"kernel {self.name}: {parameter}: {reason}")
        return error


class _Loaded:
    """A kernel on one device."""

    def __init__(self, function: Any, device: int):
        self.function = function  # keeps the module loaded
        self.kernel = function.kernel
        self.device = device
        self.shared_limit = SHARED_WITHOUT_OPT_IN - function.attrs.shared

    def raise_shared_limit(self, shared: int) -> None:
        """Allow the kernel more dynamic shared memory than CUDA grants without being asked."""
        attribute = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.cuKernelSetAttribute(attribute, shared, self.kernel.handle, self.device)
        self.shared_limit = shared


def address(array: Any) -> int:
    """Where a device array's memory begins; None is 0, and an int is an address already."""
    pointer = getattr(array, "device_ctypes_pointer", None)  # numba's: 0.2 µs instead of 1.1
    if pointer is not None:
        return pointer.value
    if array is None:
        return 0
    if isinstance(array, int):
        return array
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"{type(array).__name__} is no device array; copy it with "
                        "numba.cuda.to_device")
    return interface["data"][0]


@functools.cache
def default_stream() -> Any:
    """The legacy default stream, which waits for other streams and lets them wait."""
    return core.Stream.from_handle(0)


def device_problem() -> str:
    """Why kernels cannot run here, in one line; empty when they can."""
    try:
        device = devices.get_context().device
    except Exception as error:  # whatever the driver, or its absence, makes numba raise
        return "no GPU: " + " ".join(str(error).split()).rstrip(" :")
    if device.compute_capability < OLDEST:
        return (f"the GPU has compute capability {dotted(device.compute_capability)}, expected "
                f"{dotted(OLDEST)} or newer")
    return ""


def device_name(device: Any = None) -> str:
    """The name of one of numba's devices, or of the current one."""
    name = (device or devices.get_context().device).name
    return name.decode() if isinstance(name, bytes) else name


def intermediate_code(kernel: Kernel, capabilities: Iterable[tuple[int, int]]) -> Iterator[Any]:
    """`kernel` for each compute capability as LTO-IR, for a cuda.core.Linker; needs no GPU."""
    ask = cuda.dispatcher.get_current_device
    cuda.dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
    try:  # device functions ask for the device's capability, and make no use of it
        library, _ = cuda.compiler._compile_pyfunc_with_fixup(
            kernel.function, kernel.signature, device=False, abi="numba", lto=True, lineinfo=True,
            launch_bounds=kernel.launch_bounds, cc=(9, 0))
    finally:
        cuda.dispatcher.get_current_device = ask
    for major, minor in capabilities:
        # from 9.0 on numba compiles for exactly one architecture, "sm_90a"
        code = library.get_ltoir(cc=(major, minor, "a" if major >= 9 else ""))
        yield core.ObjectCode.from_ltoir(code, name=kernel.name)


def linker_version() -> str:
    """The version of nvJitLink, which contains the assembler."""
    return ".".join(map(str, nvjitlink.version()))


@functools.cache
def _cache_filler() -> Any:
    return cuda.device_array(4 * devices.get_context().device.L2_CACHE_SIZE, np.uint8)


def clear_cache() -> None:
    """Put work into the default stream that leaves nothing of other arrays in the L2 cache."""
    filler = _cache_filler()
    driver.cuMemsetD8Async(filler.device_ctypes_pointer.value, 0, filler.nbytes, 0)


def versions() -> dict[str, str]:
    """The GPU, its driver and the packages that compile for it."""
    driver_version = driver.cuDriverGetVersion()
    found = re.search(r"Kernel Module[^0-9]*([0-9.]+)", _read("/proc/driver/nvidia/version"))
    return {
        "gpu": device_name(),
        "capability": "{}.{}".format(*devices.get_context().device.compute_capability),
        "driver": found[1] if found else "unknown",
        "cuda": f"{driver_version // 1000}.{driver_version % 1000 // 10}",
        **compiler_versions(),
    }


def compiler_versions() -> dict[str, str]:
    """What compiles and launches kernels: the figures of two machines depend on it."""
    return {
        "numba-cuda": numba_cuda.__version__,
        "cuda-core": core.__version__,
        "cuda-bindings": bindings.__version__,
        "nvJitLink": linker_version(),
    }


def untested_versions() -> list[str]:
    """One line for each package that is not of a version these kernels are tested with."""
    found = compiler_versions()
    return [f"{name} {found[name]} is not the tested {tested}.*"
            for name, tested in TESTED.items() if not f"{found[name]}.".startswith(f"{tested}.")]


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


class _KernelCacheImpl(CacheImpl, CUDACacheImpl):
    pass


class _KernelCacheFile(CacheFile, caching.IndexDataCacheFile):
    pass


class _KernelCache(CUDACache):
    """numba's cache of kernels in our folder, with a key of our own.

    Numba's key pickles what the function closes over, and intrinsics and device functions pickle
    differently in every process. The folder's name stands for the sources already, so the
    kernel's name, its launch bounds and the device are enough. The device is in the key because
    code made on the tests' virtual GPU must never reach a real one.
    """

    def __init__(self, owner: Kernel):
        self._impl_class = functools.partial(_KernelCacheImpl, name=owner.name)
        self._owner = owner
        super().__init__(owner.function)
        self._cache_file = _KernelCacheFile(self.cache_path, self._impl.filename_base,
                                            source_hash())

    def _index_key(self, sig: Any, codegen: Any) -> tuple:
        owner, constants = self._owner, _constants(self._owner.function.__closure__ or ())
        return (owner.name, str(sig), owner.launch_bounds, constants, numba_cuda.__version__,
                linker_version(), codegen.magic_tuple(), device_name())


def _constants(cells: Iterable) -> tuple:
    """The numbers that a factory's kernel closes over."""
    contents = (cell.cell_contents for cell in cells)
    return tuple(repr(value) for value in contents if isinstance(value, (Number, str, tuple)))
