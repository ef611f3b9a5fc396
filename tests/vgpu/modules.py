"""Linked device code: nvJitLink's PTX after link-time optimisation, and the cubin made of it."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import weakref
from collections.abc import Iterable

from . import capture, lower, ptx
from .cubin import KernelResources, kernel_resources
from .device import Refused, device
from .report import VirtualGPUError

PICKLED_AS = "virtual_gpu_modules"

_handles = itertools.count(0x5000_0000, 16)
_loaded: dict[int, LoadedModule] = {}
_kernels: dict[int, LoadedKernel] = {}
_linked: weakref.WeakValueDictionary[bytes, ObjectCode] = weakref.WeakValueDictionary()


class ObjectCode:
    """Stands in for cuda.core.ObjectCode: linked code that loads itself when it is first used.

    It can be pickled, which numba-cuda's `cache=True` relies on; handles are of this process.
    Its pickles name PICKLED_AS, since this package has different names in different programs.
    """

    def __init__(self, text: str, cubin: bytes, log: str = "", name: str = ""):
        self.ptx, self.code, self.log, self.name = text, cubin, log, name
        self.code_type = "cubin"
        self._module: LoadedModule | None = None
        _linked[cubin] = self

    def __reduce__(self):
        return type(self), (self.ptx, self.code, self.log, self.name)

    @property
    def module(self) -> LoadedModule:
        """The loaded module; loading allocates the module's variables in device memory."""
        if self._module is None or not self._module.live:
            try:
                self._module = LoadedModule(self)
            except Refused as refused:
                device.refuse(refused)
                raise refused.error() from None
        return self._module

    @property
    def handle(self) -> int:
        return self.module.handle

    def get_kernel(self, name: str | bytes) -> LoadedKernel:
        """The kernel of that mangled name; a VirtualGPUError if there is none."""
        return self.module.kernel(name.decode() if isinstance(name, bytes) else name)


class LoadedModule:
    """One code object in the device: its variables have addresses, its kernels have handles."""

    def __init__(self, code: ObjectCode):
        capture.forbid("loading a module")
        self.code, self.live = code, True
        self.parsed = ptx.parse(code.ptx)
        self.resources = kernel_resources(code.code, code.log)
        self.variables = [v for v in self.parsed.variables.values()
                          if v.space in ("global", "const") and v.size]
        for variable in self.variables:
            address = device.allocate(variable.size, f"variable {variable.name}", owned=True)
            device.arena.write(address, variable.initializer or bytes(variable.size))
            self.parsed.addresses[variable.name] = address
        self.handle = next(_handles)
        self._kernels: dict[str, LoadedKernel] = {}
        _loaded[self.handle] = self

    def kernel(self, name: str) -> LoadedKernel:
        if name not in self._kernels:
            function = self.parsed.functions.get(name)
            if function is None or not function.entry:
                known = ", ".join(n for n, f in self.parsed.functions.items() if f.entry)
                raise VirtualGPUError("bad driver call", f"no kernel {name!r}, only: {known}")
            self._kernels[name] = LoadedKernel(self, name)
        return self._kernels[name]

    def variable(self, name: str) -> tuple[int, int] | None:
        """Address and size in bytes of a variable, or None."""
        found = self.parsed.variables.get(name)
        address = self.parsed.addresses.get(name)
        return None if found is None or address is None else (address, found.size)

    def unload(self) -> None:
        """Free the variables; handles of the module and its kernels become invalid."""
        self.live = False
        del _loaded[self.handle]
        for kernel in self._kernels.values():
            del _kernels[kernel.handle]
        for variable in self.variables:
            device.free(self.parsed.addresses[variable.name], owned=True)


class LoadedKernel:
    """Stands in for cuda.core.Kernel: handle, attributes, and the lowered code to run."""

    def __init__(self, module: LoadedModule, name: str):
        self.module, self.name = module, name
        self.resources: KernelResources = module.resources[name]
        self.target = module.parsed.target
        self.max_dynamic_shared: int | None = None  # the opt-in attribute, None if not set
        self.carveout = -1  # preferred shared memory, percent; without effect
        self.handle = next(_handles)
        _kernels[self.handle] = self

    @functools.cached_property
    def code(self) -> lower.Kernel:
        return lower.compile_kernel(self.module.parsed, self.name)

    @property
    def attributes(self) -> KernelAttributes:
        return KernelAttributes(self)


class KernelAttributes:
    """What cuda.core.Kernel.attributes offers and numba-cuda reads."""

    def __init__(self, kernel: LoadedKernel):
        resources = kernel.resources
        self.num_regs = resources.registers
        self.shared_size_bytes = resources.shared_bytes
        self.local_size_bytes = resources.local_bytes
        self.const_size_bytes = resources.const_bytes
        self.spill_size_bytes = resources.spill_bytes
        self.max_threads_per_block = device.limits.max_threads(resources)


ObjectCode.__module__ = PICKLED_AS


def importable_anywhere() -> None:
    """Make pickles of object code loadable, under whatever name this package was imported."""
    sys.modules[PICKLED_AS] = sys.modules[__name__]


def loaded_module(handle) -> LoadedModule:
    """The module of a library or module handle; a VirtualGPUError if it is unloaded."""
    if int(handle) not in _loaded:
        raise VirtualGPUError("bad driver call", f"no module is loaded as {int(handle):#x}")
    return _loaded[int(handle)]


def loaded_kernel(handle) -> LoadedKernel:
    """The kernel of a kernel or function handle; a VirtualGPUError if its module is unloaded."""
    if isinstance(handle, LoadedKernel):
        handle = handle.handle
    if int(handle) not in _kernels:
        raise VirtualGPUError("bad driver call", f"no kernel is loaded as {int(handle):#x}")
    return _kernels[int(handle)]


def loaded_modules() -> list[LoadedModule]:
    return list(_loaded.values())


def linked(cubin: bytes) -> ObjectCode:
    """The object code that this process linked or unpickled to `cubin`; others have no PTX."""
    if cubin not in _linked:
        raise VirtualGPUError("not supported", "loading a cubin whose PTX is not known")
    return _linked[cubin]


def link(codes: Iterable, arch: str, lineinfo: bool = False,
         max_registers: int | None = None) -> ObjectCode:
    """Link cuda.core.ObjectCode objects (LTO-IR or PTX) into PTX to run and a cubin.

    LTO-IR is optimised as a whole, as numba-cuda does by default; PTX inputs are joined to it.
    Any other input (cubin, fatbin, library) has no PTX and is refused.
    """
    from cuda.core import Linker, LinkerOptions

    codes = list(codes)
    refused = [c for c in codes if c.code_type not in ("ltoir", "ptx")]
    if refused:
        kinds = ", ".join(f"{c.name!r} ({c.code_type})" for c in refused)
        purpose = "; it is for grid-wide barriers" if "cudadevrt" in kinds else ""
        raise VirtualGPUError(
            "not supported", f"linked code without LTO-IR or PTX: {kinds}{purpose}")
    lto = [c for c in codes if c.code_type == "ltoir"]
    settings = dict(arch=arch, lineinfo=lineinfo or None, max_register_count=max_registers)
    texts = [_text(c.code) for c in codes if c.code_type == "ptx"]
    if lto:
        options = LinkerOptions(**settings, link_time_optimization=True, ptx=True)
        texts.insert(0, _text(Linker(*lto, options=options).link("ptx").code))
    linker = Linker(*codes, options=LinkerOptions(
        **settings, link_time_optimization=bool(lto) or None, verbose=True))
    cubin = linker.link("cubin").code
    name = codes[0].name if codes else ""
    return ObjectCode(join_ptx(texts), bytes(cubin), linker.get_info_log() or "", name)


@functools.lru_cache(maxsize=64)
def assemble(text: str) -> ObjectCode:
    """PTX text assembled by the real ptxas for its own `.target`; refused text is an error."""
    from cuda.bindings.nvjitlink import nvJitLinkError
    from cuda.core import ObjectCode as RealObjectCode

    target = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    if target is None:
        raise VirtualGPUError("bad driver call", "PTX text without a .target line")
    try:
        return link([RealObjectCode.from_ptx(text.encode(), name="ptx")], target[1])
    except nvJitLinkError as error:
        reason = str(error).rstrip("\0 \n")
        raise VirtualGPUError("bad driver call", f"ptxas refuses the PTX: {reason}") from None


def join_ptx(texts: list[str]) -> str:
    """One PTX text of several; declarations of what another text defines are dropped.

    Line information is kept for the first text only, since file numbers are per text.
    """
    if len(texts) == 1:
        return texts[0]
    first, *others = texts
    for i, text in enumerate(others):
        text = re.sub(r"\.section\s+\.debug_\w+\s*\{[^}]*\}", "", text)
        others[i] = re.sub(r"^\s*\.(version|target|address_size|file|loc)\b.*$", "", text,
                           flags=re.MULTILINE)
    joined = "\n".join([first, *others])
    defined = set(re.findall(
        r"^\s*\.(?:visible|weak)\s+\.(?:func|global|const)\b[^;{=]*?(\w+)(?:\[\d*\])?\s*[(;=]",
        joined, re.MULTILINE))
    pattern = re.compile(r"^\s*\.extern\s+\.(?:func|global|const)\b[^;]*;", re.MULTILINE)

    def keep(match: re.Match) -> str:
        return "" if defined & set(re.findall(r"[\w$]+", match[0])) else match[0]
    return pattern.sub(keep, joined)


def _text(code: bytes | str) -> str:
    return code if isinstance(code, str) else code.decode().rstrip("\0")
