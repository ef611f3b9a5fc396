"""Driver calls for libraries, modules, kernels, launches and occupancy."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver as bindings

from . import launch, modules
from .device import Refused, device
from .driver import call
from .limits import DEFAULT_SHARED, MAX_THREADS
from .modules import loaded_kernel, loaded_module
from .report import VirtualGPUError
from .streams import stream_of, when_idle

ELF = b"\x7fELF"


def _load(image):
    """Load PTX text; a cubin only if it came from this process's own linker."""
    if isinstance(image, int):
        image = ctypes.string_at(image)
    image = bytes(image)
    code = modules.linked(image) if image.startswith(ELF) else \
        modules.assemble(image.decode().rstrip("\0"))
    return modules.LoadedModule(code)


@call(1)
def cuLibraryLoadData(code, options=None, option_values=None, option_count=0,
                      library_options=None, library_values=None, library_count=0):
    if option_count or library_count:
        raise VirtualGPUError("bad driver call", "library load options are not modelled")
    return bindings.CUlibrary(_load(code).handle)


@call(1)
def cuModuleLoadData(image):
    return bindings.CUmodule(_load(image).handle)


@call(1)
def cuModuleLoadDataEx(image, count, options, values):
    if count:
        raise VirtualGPUError("bad driver call", "module load options are not modelled")
    return bindings.CUmodule(_load(image).handle)


@call()
def cuLibraryUnload(library):
    when_idle(loaded_module(library).unload)


@call()
def cuModuleUnload(module):
    when_idle(loaded_module(module).unload)


@call(1)
def cuLibraryGetModule(library):
    return bindings.CUmodule(loaded_module(library).handle)


@call(1)
def cuLibraryGetKernelCount(library):
    return len(loaded_module(library).resources)


@call(1)
def cuLibraryEnumerateKernels(count, library):
    module = loaded_module(library)
    return [bindings.CUkernel(module.kernel(n).handle) for n in list(module.resources)[:count]]


@call(1)
def cuLibraryGetKernel(library, name):
    return bindings.CUkernel(_kernel(library, name).handle)


@call(1)
def cuModuleGetFunction(module, name):
    return bindings.CUfunction(_kernel(module, name).handle)


def _kernel(module, name: bytes):
    found = loaded_module(module)
    if name.decode() not in found.resources:
        raise Refused("CUDA_ERROR_NOT_FOUND", f"no kernel {name.decode()!r}")
    return found.kernel(name.decode())


@call(2)
def cuLibraryGetGlobal(library, name):
    return _global(library, name)


@call(2)
def cuModuleGetGlobal(module, name):
    return _global(module, name)


def _global(module, name: bytes):
    found = loaded_module(module).variable(name.decode())
    if found is None:
        raise Refused("CUDA_ERROR_NOT_FOUND", f"no variable {name.decode()!r}")
    return bindings.CUdeviceptr(found[0]), found[1]


@call(1)
def cuKernelGetFunction(kernel):
    return bindings.CUfunction(loaded_kernel(kernel).handle)


@call(1)
def cuKernelGetLibrary(kernel):
    return bindings.CUlibrary(loaded_kernel(kernel).module.handle)


@call(1)
def cuFuncGetModule(function):
    return bindings.CUmodule(loaded_kernel(function).module.handle)


@call(1)
def cuKernelGetName(kernel):
    return loaded_kernel(kernel).name.encode()


@call(1)
def cuFuncGetName(function):
    return loaded_kernel(function).name.encode()


@call()
def cuFuncLoad(function):
    loaded_kernel(function)


@call(2)
def cuKernelGetParamInfo(kernel, index):
    return _parameter(kernel, index)


@call(2)
def cuFuncGetParamInfo(function, index):
    return _parameter(function, index)


def _parameter(kernel, index: int):
    parameters = loaded_kernel(kernel).code.parameters
    if index >= len(parameters):
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"parameter {index} of {len(parameters)}")
    return parameters[index].offset, parameters[index].size


@call(1)
def cuFuncGetAttribute(attribute, function):
    return _attribute(attribute, function)


@call(1)
def cuKernelGetAttribute(attribute, kernel, number):
    return _attribute(attribute, kernel)


def _attribute(attribute, handle) -> int:
    kernel = loaded_kernel(handle)
    attributes = kernel.attributes
    name = _name(attribute)
    major, minor = divmod(int(kernel.target.removeprefix("sm_").rstrip("af")), 10)
    default = DEFAULT_SHARED - attributes.shared_size_bytes
    values = {
        "MAX_THREADS_PER_BLOCK": attributes.max_threads_per_block,
        "SHARED_SIZE_BYTES": attributes.shared_size_bytes,
        "CONST_SIZE_BYTES": attributes.const_size_bytes,
        "LOCAL_SIZE_BYTES": attributes.local_size_bytes,
        "NUM_REGS": attributes.num_regs,
        "PTX_VERSION": 10 * major + minor, "BINARY_VERSION": 10 * major + minor,
        "MAX_DYNAMIC_SHARED_SIZE_BYTES":
            default if kernel.max_dynamic_shared is None else kernel.max_dynamic_shared,
        "PREFERRED_SHARED_MEMORY_CARVEOUT": kernel.carveout,
    }
    if name not in values:
        raise VirtualGPUError("bad driver call", f"function attribute {name} is not modelled")
    return values[name]


@call()
def cuFuncSetAttribute(function, attribute, value):
    _set_attribute(function, attribute, value)


@call()
def cuKernelSetAttribute(attribute, value, kernel, number):
    _set_attribute(kernel, attribute, value)


def _set_attribute(handle, attribute, value: int) -> None:
    kernel, name = loaded_kernel(handle), _name(attribute)
    if name == "MAX_DYNAMIC_SHARED_SIZE_BYTES":
        limit = device.limits.optin_shared - kernel.resources.shared_bytes
        if not 0 <= value <= limit:
            raise Refused("CUDA_ERROR_INVALID_VALUE", f"MAX_DYNAMIC_SHARED_SIZE_BYTES {value}: "
                          f"the device allows this kernel {limit}")
        kernel.max_dynamic_shared = value
    elif name == "PREFERRED_SHARED_MEMORY_CARVEOUT":
        kernel.carveout = value
    else:
        raise VirtualGPUError("bad driver call", f"function attribute {name} is not modelled")


def _name(attribute) -> str:
    name = bindings.CUfunction_attribute(int(attribute)).name
    return name.removeprefix("CU_FUNC_ATTRIBUTE_")


@call()
def cuKernelSetCacheConfig(kernel, config, number):
    loaded_kernel(kernel)


@call()
def cuFuncSetCacheConfig(function, config):
    loaded_kernel(function)


@call()
def cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, dynamic_shared,
                   stream, parameters, extra):
    _launch(function, (grid_x, grid_y, grid_z), (block_x, block_y, block_z), dynamic_shared,
            stream, parameters, extra)


@call()
def cuLaunchCooperativeKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                              dynamic_shared, stream, parameters):
    _launch(function, (grid_x, grid_y, grid_z), (block_x, block_y, block_z), dynamic_shared,
            stream, parameters, 0, cooperative=True)


@call()
def cuLaunchKernelEx(config, function, parameters, extra):
    cooperative = False
    for attribute in (config.attrs or [])[:config.numAttrs]:
        if attribute.id != bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            name = bindings.CUlaunchAttributeID(int(attribute.id)).name
            raise VirtualGPUError("bad launch", f"launch attribute {name} is not supported")
        cooperative = bool(attribute.value.cooperative)
    _launch(function, (config.gridDimX, config.gridDimY, config.gridDimZ),
            (config.blockDimX, config.blockDimY, config.blockDimZ), config.sharedMemBytes,
            config.hStream, parameters, extra, cooperative)


def _launch(function, grid, block, dynamic_shared, stream, parameters, extra,
            cooperative: bool = False) -> None:
    if extra:
        raise VirtualGPUError("bad launch", "arguments in `extra` are not supported")
    kernel = loaded_kernel(function)
    launch.submit(stream_of(stream), kernel, tuple(map(int, grid)), tuple(map(int, block)),
                  int(dynamic_shared), launch.read_parameters(kernel, parameters), cooperative)


@call(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, dynamic_shared):
    return _resident(function, threads, dynamic_shared)


@call(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(function, threads, dynamic_shared,
                                                         flags):
    return _resident(function, threads, dynamic_shared)


def _resident(function, threads: int, dynamic_shared: int) -> int:
    return device.limits.resident_blocks(loaded_kernel(function).resources, threads,
                                         dynamic_shared)


@call(2)
def cuOccupancyMaxPotentialBlockSize(function, shared_of_block, dynamic_shared, limit):
    """The smallest grid that fills the device, and the block size with the best occupancy."""
    if shared_of_block:
        raise VirtualGPUError("bad driver call", "occupancy with a function of the block size")
    resources = loaded_kernel(function).resources
    top = min(limit or MAX_THREADS, device.limits.max_threads(resources))
    occupancy = {threads: threads * device.limits.resident_blocks(
        resources, threads, dynamic_shared) for threads in range(32, top + 1, 32)}
    best = max(occupancy, key=lambda threads: (occupancy[threads], threads))
    resident = device.limits.resident_blocks(resources, best, dynamic_shared)
    return resident * device.limits.model.multiprocessors, best
