"""What the assembler makes of every CUDA kernel: python -m kernels.compile_report

Every kernel of every op is compiled for each architecture, on a machine with or without a GPU, and
its use of registers, stack and shared memory is written to gpu_resources.csv beside this file, and
what its hottest loop consists of (see loop_report). The tests compile again and compare. A row
whose stack or spills are not 0 needs a reason in its last column, which is written by hand and
kept. Only shared memory is compared if nvJitLink has not the table's version: another assembler
uses other registers.
"""

import argparse
import csv
import dataclasses
import hashlib
import importlib
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .common.cache import cache_folder
from .common.gpus import ARCHITECTURES, MOST_SHARED, occupancy
from .loop_report import PACKAGE, Loop, disassembler, hottest_loop
from .registry import OPS, implementations, load_op

TABLE = Path(__file__).parent / "gpu_resources.csv"
# One architecture of each of the two compilers in NVVM: the PTX of the others is alike.
READ_PTX = ((9, 0), (12, 0))
# What may not be in the PTX, and why.
FORBIDDEN = {
    r"\.f64\b": "double precision, 32 to 64 times slower on most GPUs",
    r"^\s*(@!?%p\d+\s+)?call\b": "a call of a function that was not inlined",
    r"\.local\b": "an array in local memory, not in registers",
    r"^\s*(@!?%p\d+\s+)?(ld|st)\.(volatile\.)?(v[24]\.)?[bfsu]\d+": "an access to generic memory",
}
MOST_STACK = 16  # bytes that a reason can excuse
MOST_RISE = 1.1  # of registers and of what is in a loop, over the committed table
EXACT = ("hmma", "ldsm", "ldgsts")  # in a loop: the shape of a product on the tensor cores
LOOP = tuple(field.name for field in dataclasses.fields(Loop))


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture; all fields are text or small numbers of bytes."""

    kernel: str
    capability: str
    threads: int
    registers: int
    stack: int
    spills: int
    shared: int
    occupancy: str
    instructions: int  # of the hottest loop, as what follows
    hmma: int
    ldsm: int
    ldgsts: int
    lds: int
    sts: int
    mufu: int
    ffma: int
    bar: int
    wavefronts: int
    loaded: int
    nvjitlink: str
    faults: str
    reason: str = ""

    @property
    def loop(self) -> Loop:
        """What its hottest loop consists of."""
        return Loop(**{name: getattr(self, name) for name in LOOP})


def compile_kernel(name: str) -> list[Row]:
    """The rows of one kernel, for every architecture."""
    from .common import cuda

    load_gpu_modules()
    kernel = cuda.all_kernels()[name]
    codes = cuda.intermediate_code(kernel, ARCHITECTURES)
    return [assemble(cuda, kernel, capability, code)
            for capability, code in zip(ARCHITECTURES, codes, strict=True)]


def assemble(cuda, kernel, capability: tuple[int, int], code) -> Row:
    """Link as numba does at a kernel's first launch, and read the assembler's log."""
    arch = f"sm_{capability[0]}{capability[1]}{'a' if capability >= (9, 0) else ''}"
    faults = []
    if capability in READ_PTX:
        options = cuda.core.LinkerOptions(arch=arch, link_time_optimization=True, ptx=True)
        ptx = cuda.core.Linker(code, options=options).link("ptx").code
        text = ptx if isinstance(ptx, str) else ptx.decode()
        faults = [why for pattern, why in FORBIDDEN.items() if re.search(pattern, text, re.M)]
    options = cuda.core.LinkerOptions(arch=arch, link_time_optimization=True, verbose=True)
    linker = cuda.core.Linker(code, options=options)
    loop = hottest_loop(linker.link("cubin").code)
    log = linker.get_info_log()
    registers = _number(log, r"Used (\d+) registers")
    shared = _number(log, r"(\d+) bytes smem")
    threads = kernel.launch_bounds[0]
    return Row(
        kernel.name, "{}.{}".format(*capability), threads, registers,
        _number(log, r"(\d+) bytes stack frame"), _number(log, r"(\d+) bytes spill stores"),
        shared, f"{occupancy(capability, threads, registers, shared):.2f}",
        *dataclasses.astuple(loop), cuda.linker_version(), "; ".join(faults),
    )


def _number(log: str, pattern: str) -> int:
    found = re.search(pattern, log)
    return int(found[1]) if found else 0


def load_gpu_modules() -> None:
    """Import every op's CUDA kernels, those in files beside gpu.py too."""
    for op in OPS:
        if "gpu" in implementations(op):
            load_op(op, "gpu")
            for path in sorted((Path(__file__).parent / op).glob("gpu_*.py")):
                importlib.import_module(f".{op}.{path.stem}", __package__)


def kernel_names() -> list[str]:
    """The names of the ops' kernels, the slowest to compile first."""
    from .common.cuda import all_kernels

    load_gpu_modules()
    names = [name for name, kernel in all_kernels().items()
             if kernel.function.__module__.startswith(f"{__package__}.")]
    return sorted(names, key=lambda name: (not name.startswith("attention"), name))


def compile_all(processes: int | None = None) -> list[Row]:
    """The rows of every kernel; kept in the cache folder until a source file changes."""
    kept = cache_folder().parents[1] / f"gpu_resources-{_sources_of_kernels()}.csv"
    if kept.exists():
        return read_table(kept)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=context) as pool:
        rows = [row for rows in pool.map(compile_kernel, kernel_names()) for row in rows]
    rows.sort(key=lambda row: (row.kernel, float(row.capability)))
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        for old in kept.parent.glob("gpu_resources-*.csv"):
            old.unlink(missing_ok=True)
        write_table(rows, kept)
    except OSError:
        pass  # it is compiled again next time
    return rows


def _sources_of_kernels() -> str:
    """A name for all files that kernels are made of, and for what compiles them."""
    from .common.cuda import linker_version, numba_cuda

    folder = Path(__file__).parent
    digest = hashlib.sha256(f"{linker_version()} {numba_cuda.__version__}"
                            f" {bool(disassembler())}".encode())
    for path in sorted((*folder.glob("*/gpu*.py"), *folder.glob("common/*.py"),
                        *folder.glob("*_report.py"))):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def faults_of(rows: Iterable[Row], table: Iterable[Row]) -> list[str]:
    """What is wrong with `rows`, given the committed table; one sentence each."""
    known = {(row.kernel, row.capability): row for row in table}
    found = []
    for row in rows:
        place, old = f"{row.kernel} on {row.capability}", known.get((row.kernel, row.capability))
        same_assembler = not old or old.nvjitlink == row.nvjitlink
        used = max(row.stack, row.spills)
        if row.faults:
            found.append(f"{place}: {row.faults}")
        if same_assembler and used and not (old and old.reason and used <= MOST_STACK):
            found.append(f"{place}: {row.stack} bytes of stack, {row.spills} spilled")
        if row.shared > MOST_SHARED:
            found.append(f"{place}: {row.shared} bytes of shared memory, at most {MOST_SHARED}")
        if not float(row.occupancy):
            found.append(f"{place}: {row.registers} registers, too many for a single block")
        if not old:
            found.append(f"{place}: not in {TABLE.name}; run python -m kernels.compile_report")
        elif same_assembler:
            found += [f"{place}: {what}" for what in _rises(row, old)]
    found += [f"{kernel} on {capability}: in {TABLE.name}, but there is no such kernel"
              for kernel, capability in known.keys() - {(r.kernel, r.capability) for r in rows}]
    return found


def _rises(row: Row, old: Row) -> Iterator[str]:
    """What grew too much; loops are compared where both were disassembled."""
    known = row.instructions and old.instructions
    for name in ("registers", *(LOOP if known else ())):
        new, before = getattr(row, name), getattr(old, name)
        if new > MOST_RISE * before or (name in EXACT and new != before):
            yield f"{new} {name}, {before} in {TABLE.name}"


def read_table(path: Path = TABLE) -> list[Row]:
    """The rows of a table that `write_table` wrote; none if there is no such file."""
    if not path.exists():
        return []
    fields = dataclasses.fields(Row)
    with open(path, encoding="utf-8", newline="") as file:
        return [Row(**{field.name: field.type(row[field.name]) for field in fields})
                for row in csv.DictReader(file)]


def write_table(rows: Iterable[Row], path: Path = TABLE) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)],
                                lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.compile_report",
        description="Compile every CUDA kernel for every architecture; needs no GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="compare with the table, leave it")
    options = parser.parse_args(argv)
    if not disassembler():
        print(f"loops are not counted: pip install {PACKAGE}", file=sys.stderr)
        if not options.check:
            return 1
    committed = read_table()
    reasons = {(row.kernel, row.capability): row.reason for row in committed}
    rows = [dataclasses.replace(row, reason=reasons.get((row.kernel, row.capability), ""))
            for row in compile_all()]
    if not options.check:
        write_table(rows)
        print(f"{len(rows)} rows written to {TABLE}", file=sys.stderr)
    table = committed if options.check else rows
    other = {row.nvjitlink for row in table} - {row.nvjitlink for row in rows}
    if other:
        print(f"nvJitLink {rows[0].nvjitlink} is not the table's {', '.join(sorted(other))}: "
              "registers, stack and spills are not compared", file=sys.stderr)
    faults = faults_of(rows, table)
    print("\n".join(faults), file=sys.stderr, end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
