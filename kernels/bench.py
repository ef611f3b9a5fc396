"""Check each op against its oracle, then time it: python -m kernels.bench layernorm gelu

Each case is first compared with the float64 oracle, as in the tests; an op that is wrong is not
timed, and the exit code is 1. The table on standard output gives the median and the 20th and 80th
percentile of the time of a call, and the arithmetic and memory rates by the counts of the op's
spec. On a GPU it goes on with

    of limit     the least time by published rates (common/gpus.py), over the time
    of ceiling   the same by the rates of a copy and of large products, measured at the start
    model_ms     what the time model predicts (time_model.py)
    fp32_ms      the same case in float32, for those in bf16
    torch_ms     the same by PyTorch, where it is installed with CUDA (bench_torch.py)

each where it is known. What else is to be said goes to standard error.
"""

import argparse
import csv
import functools
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# Before NumPy and Numba load, unless the user chose: their threads must not spin each other out.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import numpy as np

from .bench_readme import update
from .bench_tiles import COLUMNS as COLUMNS_OF_TILES
from .bench_tiles import rows as rows_of_tiles
from .bench_torch import peer, product, torch
from .common.gpus import CHIPS, Gpu, ceilings, least_seconds
from .common.spec import BFLOAT16, Case, cases_of, label
from .common.timing import copy_rate, measure, measure_gpu, processor_name
from .common.verify import (
    ALIGNED_GUARD_WORDS,
    GUARD_WORDS,
    as_stored,
    build_arguments,
    is_in_bf16,
    upload,
    verify,
)
from .registry import OPS, implementations, load_op, load_spec, problem
from .time_model import predict

BACKENDS = ("cpu", "gpu")
COLUMNS = ("op", "backend", "median_ms", "p20_ms", "p80_ms", "TFLOP/s", "GB/s", "of limit",
           "of ceiling", "model_ms", "fp32_ms", "torch_ms", "case")
COPIED, SIZE = 1 << 28, 8192  # bytes of the copy, edge of the products that show the ceilings
QUICK_COPIED, QUICK_SIZE = 1 << 16, 128


def bench(op: str, backends: Iterable[str], quick: bool, gpu: str,
          ceiling: Gpu | None = None) -> Iterator[dict | str]:
    """A row for each function, backend and case of `op`, or a message that it is wrong.

    gpu: the driver's name of it; ceiling: its rates as `measured_ceiling` found them.
    """
    spec = load_spec(op)
    for name, function in spec.FUNCTIONS.items():
        cases = function.bench_cases or spec.BENCH_CASES
        if quick:  # the first of each precision
            cases = tuple({is_in_bf16(case): case for case in reversed(cases)}.values())
        for backend in (b for b in implementations(op) if b in backends):
            timed = [case for case in cases if backend == "gpu" or not is_in_bf16(case)]
            faults = list(faults_of(op, name, backend, timed))
            if faults:
                yield from faults
                return
            for case in timed:
                arguments = as_stored(function, case, build_arguments(op, name, case))
                times = time_call(op, name, backend, arguments, quick)
                low, *_, high = statistics.quantiles(times, n=5)
                median = statistics.median(times)
                flops, traffic = function.flops(case), function.traffic(case, arguments)
                rates = (ceilings(gpu), ceiling) if backend == "gpu" else (None, None)
                least = [rate and least_seconds(rate, flops, traffic, is_in_bf16(case))
                         for rate in rates]
                yield dict(zip(COLUMNS, (
                    f"{op}.{name}", backend,
                    f"{1e3 * median:.4f}", f"{1e3 * low:.4f}", f"{1e3 * high:.4f}",
                    f"{1e-12 * flops / median:.4g}", f"{1e-9 * traffic / median:.4g}",
                    *(f"{share / median:.0%}" if share else "" for share in least),
                    *(beside(op, name, case, arguments, quick, gpu) if backend == "gpu"
                      else ("", "", "")), label(case),
                ), strict=True))


def beside(op: str, name: str, case: Case, arguments: dict[str, Any], quick: bool,
           gpu: str) -> tuple[str, str, str]:
    """Milliseconds by the model, of ours in float32, and of PyTorch; empty where there is none."""
    known, model = ceilings(gpu), ""
    if known and known.name in CHIPS:
        launches = predict(op, name, arguments, known.name, case)
        model = f"{1e3 * sum(launch.seconds for launch in launches):.4f}"
    float32 = ""
    if is_in_bf16(case):
        alike = {key: value for key, value in case.items() if key != "precision"}
        function = load_spec(op).FUNCTIONS[name]
        stored = as_stored(function, alike, build_arguments(op, name, alike))
        times = time_call(op, name, "gpu", stored, quick)
        float32 = f"{1e3 * statistics.median(times):.4f}"
    call = peer(op, name, arguments)
    theirs = f"{1e3 * statistics.median(_clock('gpu', call, quick)):.4f}" if call else ""
    return model, float32, theirs


def measured_ceiling(quick: bool) -> Gpu:
    """What this GPU reaches: a copy within its memory, and large products, ours or PyTorch's."""
    copied, size = (QUICK_COPIED, QUICK_SIZE) if quick else (COPIED, SIZE)
    rates = {}
    for dtype in (np.dtype(np.float32), BFLOAT16):
        arrays = [upload(np.ones((size, size), dtype), "gpu") for _ in range(3)]
        y, x, w = arrays
        forward = load_op("matmul", "gpu").forward
        calls = [functools.partial(forward, y, None, x, w, None, None, False)]
        calls += [product(size, dtype)] if torch() else []
        fastest = min(statistics.median(_clock("gpu", call, quick)) for call in calls)
        rates[dtype] = 2e-12 * size**3 / fastest
    bandwidth = 1e-9 * copy_rate(copied, *_time(quick))
    return Gpu("measured", bandwidth, *rates.values(), "a copy, and products of ones")


def bench_or_why_not(op: str, *arguments: Any) -> Iterator[dict | str]:
    """`bench`, and a message for what it raises: the time on a GPU may not come again."""
    try:
        yield from bench(op, *arguments)
    except Exception as error:
        yield f"{op}: {type(error).__name__}: {' '.join(str(error).split())}"


def faults_of(op: str, name: str, backend: str, timed: tuple) -> Iterator[str]:
    """What is wrong with the first case that is wrong; nothing if all are right."""
    implementation = getattr(load_op(op, backend), name)
    guards = (GUARD_WORDS, ALIGNED_GUARD_WORDS) if backend == "gpu" else (GUARD_WORDS,)
    for case in (*cases_of(load_spec(op), name, backend), *timed):
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
    return _clock(backend, lambda: implementation(*positional), quick)


def _clock(backend: str, call: Callable[[], Any], quick: bool) -> list[float]:
    return (measure_gpu if backend == "gpu" else measure)(call, *_time(quick))


def _time(quick: bool) -> tuple[float, int]:
    """Seconds to measure for, and calls at least."""
    return (0.05, 3) if quick else (0.5, 10)


def table_line(cells: Iterable[str]) -> str:
    op, backend, *numbers, case = cells
    return f"{op:24}{backend:8}" + "".join(f"{number:>11}" for number in numbers) + f"  {case}"


def write_csv(path: str, columns: Iterable[str], rows: list[dict]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows written to {path}", file=sys.stderr)


def machine(backends: Iterable[str]) -> dict[str, str]:
    """Where and with what the figures were taken."""
    import numba

    about = {
        "processor": processor_name(),
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


def tiles(path: str | None) -> int:
    """The table of `--tiles`."""
    reason = problem("gpu")
    about = {} if reason else machine(["gpu"])
    print(f"{reason}: by the time model" if reason
          else "; ".join(f"{key} {value}" for key, value in about.items()), file=sys.stderr)
    print(*COLUMNS_OF_TILES, sep=",")
    rows = []
    for row in rows_of_tiles(about.get("gpu", "")):
        rows.append(row | about)
        print(*row.values(), sep=",", flush=True)
    if path:
        write_csv(path, (*COLUMNS_OF_TILES, *(key for key in about if key != "gpu")), rows)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description="Check ops against their float64 oracle, then time them.",
        allow_abbrev=False,
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"any of {', '.join(OPS)}")
    parser.add_argument("--all", action="store_true", help="every op")
    parser.add_argument("--backend", choices=BACKENDS, help="only this one; default: all there are")
    parser.add_argument("--quick", action="store_true",
                        help="the smallest size of each precision, a few calls")
    parser.add_argument("--csv", metavar="FILE", help="also write the rows, with the machine, here")
    parser.add_argument("--tiles", action="store_true",
                        help="instead: every tile of the tensor-core products; without a GPU by "
                        "the time model")
    parser.add_argument("--update-readme", metavar="FILE",
                        help="instead: put the rows that --csv wrote on a GPU into README.md")
    options = parser.parse_args(argv)
    if options.update_readme:
        try:
            update(options.update_readme)
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    if options.tiles:
        return tiles(options.csv)
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
    try:  # before minutes of work
        file = open(options.csv or os.devnull, "w", encoding="utf-8", newline="")  # noqa: SIM115
    except OSError as error:
        parser.error(f"--csv {options.csv} cannot be written: {error.strerror}")
    rows, wrong, ceiling = 0, False, None
    if "gpu" in backends:
        ceiling = measured_ceiling(options.quick)
        about |= {"copy GB/s": f"{ceiling.bandwidth:.4g}", "fp32 TFLOP/s": f"{ceiling.float32:.4g}",
                  "bf16 TFLOP/s": f"{ceiling.bfloat16:.4g}"}
    print("; ".join(f"{key} {value}" for key, value in about.items()), file=sys.stderr)
    print(table_line(COLUMNS))
    with file:
        writer = csv.DictWriter(file, (*COLUMNS, *about))
        writer.writeheader()
        for op in OPS if options.all else options.ops:
            for row in bench_or_why_not(op, backends, options.quick, about.get("gpu", ""), ceiling):
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
