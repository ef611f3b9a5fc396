"""Check each op against its oracle, then time it: python -m kernels.bench layernorm gelu

Each case is first compared with the float64 oracle, as in the tests; an op that is wrong is not
timed, and the exit code is 1. The table on standard output gives the median and the 20th and 80th
percentile of the time of a call, and the arithmetic and memory rates by the counts of the op's
spec. What else is to be said goes to standard error.
"""

import argparse
import csv
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Before NumPy and Numba load, unless the user chose: their threads must not spin each other out.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import numpy as np

from .common.spec import cases_of, label
from .common.verify import build_arguments, cast, verify
from .registry import OPS, implementations, load_op, load_spec

COLUMNS = ("op", "backend", "median_ms", "p20_ms", "p80_ms", "GFLOP/s", "GB/s", "case")


def measure(call: Callable[[], None], seconds: float, at_least: int) -> list[float]:
    """Seconds of each call, after one that is not counted; for `seconds`, `at_least` calls."""
    call()
    times: list[float] = []
    while len(times) < at_least or sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def bench(op: str, quick: bool) -> Iterator[dict[str, Any] | str]:
    """A row for each function, backend and case of `op`, or a message that it is wrong."""
    spec = load_spec(op)
    for name, function in spec.FUNCTIONS.items():
        timed = (function.bench_cases or spec.BENCH_CASES)[: 1 if quick else None]
        for backend in (b for b in implementations(op) if b == "cpu"):
            implementation = getattr(load_op(op, backend), name)
            for case in (*cases_of(spec, name), *timed):
                for fault in verify(op, name, case, implementation):
                    yield f"{op}.{name} ({backend}) is wrong for {label(case)}: {fault}"
                    return
            for case in timed:
                arguments = cast(build_arguments(op, name, case), np.float32)
                positional = tuple(arguments.values())
                times = measure(lambda: implementation(*positional),  # noqa: B023 (used at once)
                                *((0.05, 3) if quick else (0.5, 10)))
                low, *_, high = statistics.quantiles(times, n=5)
                median = statistics.median(times)
                yield dict(zip(COLUMNS, (
                    f"{op}.{name}", backend,
                    f"{1e3 * median:.4f}", f"{1e3 * low:.4f}", f"{1e3 * high:.4f}",
                    f"{1e-9 * function.flops(case) / median:.2f}",
                    f"{1e-9 * function.traffic(case, arguments) / median:.2f}",
                    label(case),
                ), strict=True))


def table_line(cells: Iterable[str]) -> str:
    op, backend, *numbers, case = cells
    return f"{op:24}{backend:8}" + "".join(f"{number:>11}" for number in numbers) + f"  {case}"


def machine() -> dict[str, str]:
    """Where and with what the figures were taken."""
    import numba

    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "threads": str(numba.get_num_threads()),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description="Check ops against their float64 oracle, then time them.",
        allow_abbrev=False,
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"any of {', '.join(OPS)}")
    parser.add_argument("--all", action="store_true", help="every op")
    parser.add_argument("--quick", action="store_true", help="the small size only, a few calls")
    parser.add_argument("--csv", metavar="FILE", help="also write the rows, with the machine, here")
    options = parser.parse_args(argv)
    unknown = [op for op in options.ops if op not in OPS]
    if unknown or bool(options.ops) == options.all:
        parser.error(f"unknown op {unknown[0]!r}: choose from {', '.join(OPS)}" if unknown
                     else "name one or more ops, or give --all")
    about = machine()
    print("; ".join(f"{key} {value}" for key, value in about.items()), file=sys.stderr)
    rows, wrong = [], False
    print(table_line(COLUMNS))
    for op in OPS if options.all else options.ops:
        for row in bench(op, options.quick):
            if isinstance(row, str):
                print(row, file=sys.stderr)
                wrong = True
                continue
            rows.append(row | about)
            print(table_line(row[column] for column in COLUMNS), flush=True)
    if options.csv:
        with open(options.csv, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, (*COLUMNS, *about))
            writer.writeheader()
            writer.writerows(rows)
        print(f"{len(rows)} rows written to {options.csv}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
