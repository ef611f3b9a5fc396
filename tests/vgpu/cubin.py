"""Resource use of the kernels in a cubin, from its ELF sections and the assembler's log."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

# Attribute numbers of the .nv.info sections; see `cuobjdump -elf`.
MAX_THREADS, FRAME_SIZE, MIN_STACK_SIZE, REGCOUNT = 0x05, 0x11, 0x12, 0x2F
SIZED = 4  # attribute format: a 16-bit size and as many bytes follow
RESERVED_SHARED = 1024  # the system's own, in front of a kernel's variables from sm_90 on


@dataclass(frozen=True)
class KernelResources:
    """What one kernel needs, as the assembler decided it."""

    registers: int
    local_bytes: int  # per thread
    shared_bytes: int  # static, per block
    const_bytes: int  # of the module, without the kernel parameters
    max_threads: int  # declared launch bound, 1024 if none
    spill_bytes: int


def kernel_resources(cubin: bytes, log: str = "") -> dict[str, KernelResources]:
    """The kernels of `cubin` by mangled name; spills are known only from nvJitLink's `log`."""
    sections, symbols = _elf(cubin)
    table: dict[str, dict[int, int]] = {}
    for attribute, data in _attributes(sections.get(".nv.info", b"")):
        if attribute in (REGCOUNT, FRAME_SIZE, MIN_STACK_SIZE):
            index, value = struct.unpack_from("<II", data)
            table.setdefault(symbols[index], {})[attribute] = value
    spills = _spills(log)
    const = len(sections.get(".nv.constant3", b""))
    architecture = cubin[49] if cubin[8] >= 8 else cubin[48]  # by the version of the ELF ABI
    reserved = RESERVED_SHARED if architecture >= 90 else 0
    kernels = {}
    for name in (section[6:] for section in sections if section.startswith(".text.")):
        if f".nv.constant0.{name}" not in sections:
            continue  # a device function that was not inlined
        own = dict(_attributes(sections.get(f".nv.info.{name}", b"")))
        values = table.get(name, {})
        block = struct.unpack("<III", own[MAX_THREADS]) if MAX_THREADS in own else (1024, 1, 1)
        kernels[name] = KernelResources(
            registers=values.get(REGCOUNT, 0),
            local_bytes=max(values.get(FRAME_SIZE, 0), values.get(MIN_STACK_SIZE, 0)),
            shared_bytes=max(0, len(sections.get(f".nv.shared.{name}", b"")) - reserved),
            const_bytes=const, max_threads=block[0] * block[1] * block[2],
            spill_bytes=spills.get(name, 0))
    return kernels


def _elf(image: bytes) -> tuple[dict[str, bytes], list[str]]:
    """Section contents by name (zeros for sections without bits) and symbol names by index."""
    if image[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    offset = struct.unpack_from("<Q", image, 40)[0]
    size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
    bodies = [bytes(h[5]) if h[1] == 8 else image[h[4]:h[4] + h[5]] for h in headers]
    sections = {_text(bodies[names], h[0]): body for h, body in zip(headers, bodies, strict=True)}
    symbols = [_text(sections[".strtab"], struct.unpack_from("<I", sections[".symtab"], at)[0])
               for at in range(0, len(sections[".symtab"]), 24)]
    return sections, symbols


def _text(table: bytes, start: int) -> str:
    return table[start:table.index(b"\0", start)].decode()


def _attributes(data: bytes):
    at = 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == SIZED:
            yield attribute, data[at:at + size]
            at += size


def _spills(log: str) -> dict[str, int]:
    pattern = r"Function properties for (\S+)\n.*?(\d+) bytes spill stores"
    return {name: int(stores) for name, stores in re.findall(pattern, log)}
