"""Check each op against its oracle, then time it: python -m kernels.bench layernorm gelu

Each case is first compared with the float64 oracle, as in the tests; an op that is wrong is not
timed, and the exit code is 1. The table on standard output gives the median and the 20th and 80th
percentile of the time of a call, the arithmetic and memory rates by the counts of the op's spec,
and on a GPU that is listed in common/gpus.py the share of the rate that this GPU could reach at
most. What else is to be said goes to standard error.
"""

import argparse
import csv
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Before NumPy and Numba load, unless the user chose: their threads must not spin each other out.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import numpy as np

from .common.gpus import ceilings, least_seconds
from .common.spec import cases_of, label
from .common.timing import measure, measure_gpu
from .common.verify import (
    ALIGNED_GUARD_WORDS,
    GUARD_WORDS,
    build_arguments,
    cast,
    upload,
    verify,
)
from .registry import OPS, implementations, load_op, load_spec, problem

BACKENDS = ("cpu", "gpu")
COLUMNS = ("op", "backend", "median_ms", "p20_ms", "p80_ms", "GFLOP/s", "GB/s", "of limit", "case")


def bench(op: str, backends: Iterable[str], quick: bool, gpu: str) -> Iterator[dict | str]:
    """A row for each function, backend and case of `op`, or a message that it is wrong."""
    spec = load_spec(op)
    for name, function in spec.FUNCTIONS.items():
        timed = (function.bench_cases or spec.BENCH_CASES)[: 1 if quick else None]
        for backend in (b for b in implementations(op) if b in backends):
            faults = list(faults_of(op, name, backend, timed))
            if faults:
                yield from faults
                return
            for case in timed:
                arguments = cast(build_arguments(op, name, case), np.float32)
                times = time_call(op, name, backend, arguments, quick)
                low, *_, high = statistics.quantiles(times, n=5)
                median = statistics.median(times)
                flops, traffic = function.flops(case), function.traffic(case, arguments)
                known = ceilings(gpu) if backend == "gpu" else None
                share = f"{least_seconds(known, flops, traffic) / median:.0%}" if known else ""
                yield dict(zip(COLUMNS, (
                    f"{op}.{name}", backend,
                    f"{1e3 * median:.4f}", f"{1e3 * low:.4f}", f"{1e3 * high:.4f}",
                    f"{1e-9 * flops / median:.2f}", f"{1e-9 * traffic / median:.2f}",
                    share, label(case),
                ), strict=True))


def faults_of(op: str, name: str, backend: str, timed: tuple) -> Iterator[str]:
    """What is wrong with the first case that is wrong; nothing if all are right."""
    implementation = getattr(load_op(op, backend), name)
    guards = (GUARD_WORDS, ALIGNED_GUARD_WORDS) if backend == "gpu" else (GUARD_WORDS,)
    for case in (*cases_of(load_spec(op), name), *timed):
        for guard_words in guards:
            faults = verify(op, name, case, implementation, backend, guard_words)
            if faults:
                yield from (f"{op}.{name} ({backend}) is wrong for {label(case)}: {fault}"
                            for fault in faults)
                return


def time_call(op: str, name: str, backend: str, arguments: dict[str, Any],
              quick: bool) -> list[float]:
    """Seconds of each of many calls with the same arguments."""
    implementation = getattr(load_op(op, backend), name)
    positional = tuple(upload(value, backend) for value in arguments.values())
    clock = measure_gpu if backend == "gpu" else measure
    return clock(lambda: implementation(*positional), *((0.05, 3) if quick else (0.5, 10)))


def table_line(cells: Iterable[str]) -> str:
    op, backend, *numbers, case = cells
    return f"{op:24}{backend:8}" + "".join(f"{number:>11}" for number in numbers) + f"  {case}"


def machine(backends: Iterable[str]) -> dict[str, str]:
    """Where and with what the figures were taken."""
    import numba

    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        processor = names[0] if names else processor
    about = {
        "processor": processor,
        "threads": str(numba.get_num_threads()),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "commit": commit(),
    }
    if "gpu" in backends:
        from .common.cuda import versions

        about |= versions()
    return about


def commit() -> str:
    """The commit that is checked out, from git's files; empty outside of a repository."""
    git = Path(__file__).resolve().parents[1] / ".git"
    if not (git / "HEAD").is_file():
        return ""
    head = (git / "HEAD").read_text(encoding="utf-8").strip().removeprefix("ref: ")
    packed = git / "packed-refs"
    if (git / head).is_file():
        head = (git / head).read_text(encoding="utf-8").strip()
    elif packed.is_file():
        lines = packed.read_text(encoding="utf-8").splitlines()
        head = next((line.split()[0] for line in lines if line.endswith(f" {head}")), head)
    return head[:12]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description="Check ops against their float64 oracle, then time them.",
        allow_abbrev=False,
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"any of {', '.join(OPS)}")
    parser.add_argument("--all", action="store_true", help="every op")
    parser.add_argument("--backend", choices=BACKENDS, help="only this one; default: all there are")
    parser.add_argument("--quick", action="store_true", help="the small size only, a few calls")
    parser.add_argument("--csv", metavar="FILE", help="also write the rows, with the machine, here")
    options = parser.parse_args(argv)
    unknown = [op for op in options.ops if op not in OPS]
    if unknown or bool(options.ops) == options.all:
        parser.error(f"unknown op {unknown[0]!r}: choose from {', '.join(OPS)}" if unknown
                     else "name one or more ops, or give --all")
    backends = [options.backend] if options.backend else list(BACKENDS)
    reason = problem("gpu") if "gpu" in backends else ""
    if reason:
        print(reason if reason.startswith("no GPU") else f"no GPU: {reason}", file=sys.stderr)
        backends.remove("gpu")
        if options.backend:
            return 1
    about = machine(backends)
    if "gpu" in backends:
        from .common.cuda import untested_versions

        for warning in untested_versions():
            print(f"warning: {warning}", file=sys.stderr)
    print("; ".join(f"{key} {value}" for key, value in about.items()), file=sys.stderr)
    try:  # before minutes of work
        file = open(options.csv or os.devnull, "w", encoding="utf-8", newline="")  # noqa: SIM115
    except OSError as error:
        parser.error(f"--csv {options.csv} cannot be written: {error.strerror}")
    rows, wrong = 0, False
    print(table_line(COLUMNS))
    with file:
        writer = csv.DictWriter(file, (*COLUMNS, *about))
        writer.writeheader()
        for op in OPS if options.all else options.ops:
            for row in bench(op, backends, options.quick, about.get("gpu", "")):
                if isinstance(row, str):
                    print(row, file=sys.stderr)
                    wrong = True
                    continue
                rows += 1
                writer.writerow(row | about)
                file.flush()  # what was measured stays when the run is stopped
                print(table_line(row[column] for column in COLUMNS), flush=True)
    if options.csv:
        print(f"{rows} rows written to {options.csv}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
