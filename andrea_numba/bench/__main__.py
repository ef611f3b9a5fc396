"""Measure the speed on this machine: training, its ops, generation, beside PyTorch's where that is
installed, the profile of a step, and what a user waits for at the start.

Without a preset everything is measured on the CPU, in about 8 minutes on two cores. Ours and
PyTorch's are in processes of their own and take turns; a row is the median of the turns with their
20th and 80th percentile, and the ratio the median over pairs of turns: PyTorch's time over ours.
With presets only their training steps are timed, ours alone, on a GPU if there is one. Rows go to
stdout as CSV, what else is to be said to stderr.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence

from .. import args
from ..environment import prepare_threads
from ..errors import UserError
from ..program import run_program, say
from . import compare, report, steps
from .process import Worker

PROGRAM = "bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_program(PROGRAM, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = args.Parser(prog="python -m andrea_numba.bench", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET",
                        help="only training steps of these: " + ", ".join(steps.SHAPES))
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = all cores")
    parser.add_argument("--batch-size", type=int, default=0, help="sequences, of presets; 0 = "
                        + ", ".join(f"{n} for {name}" for name, (n, _) in steps.SHAPES.items()))
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto",
                        help="of the operands of products, of presets (default: bf16 on a GPU)")
    parser.add_argument("--only", choices=compare.GROUPS, action="append",
                        help="only this group of figures; may be given several times")
    parser.add_argument("--quick", action="store_true",
                        help="models of one block, few turns, no torch.compile: does it all work?")
    parser.add_argument("--csv", metavar="FILE", help="write the rows, with the machine, here too")
    parser.add_argument("--update-readme", metavar="FILE",
                        help="instead: put what --csv wrote into README.md, and draw its plot")
    given = parser.parse(argv)
    unknown = [name for name in given.presets if name not in steps.SHAPES]
    if unknown:
        raise UserError(f"no measurement {unknown[0]}; there are {', '.join(steps.SHAPES)}")
    if given.batch_size < 0 or given.threads < 0:
        raise UserError("--batch-size and --threads: must be at least 1, or 0")
    if given.update_readme:
        report.update(given.update_readme)
        return 0
    if given.presets:
        return _presets(given)
    return _compare(given.only or compare.GROUPS, given.threads, given.quick, given.csv)


def _presets(given) -> int:
    prepare_threads(given.threads)
    from kernels.bench import machine

    from ..device import choose

    chosen = choose("auto", given.precision)
    say("; ".join(f"{key} {value}" for key, value in machine(["cpu"]).items())
        + f"; {chosen.line}")
    steps.write(given.presets, given.batch_size, chosen)
    return 0


def _compare(groups: Sequence[str], threads: int, quick: bool, path: str | None) -> int:
    about = _about(threads)
    threads = int(about["threads"])
    say("; ".join(f"{key} {value}" for key, value in about.items()))
    with contextlib.ExitStack() as stack:
        writers = [csv.DictWriter(sys.stdout, compare.COLUMNS)]
        if path:
            file = stack.enter_context(open(path, "w", encoding="utf-8", newline=""))
            writers.append(csv.DictWriter(file, (*compare.COLUMNS, *about), restval=""))
        for writer in writers:
            writer.writeheader()
        for row in (row for group in groups for row in compare.rows(group, threads, quick)):
            cells = {key: f"{value:.4g}" if isinstance(value, float) else value
                     for key, value in row.items()}
            writers[0].writerow(cells)
            sys.stdout.flush()
            for writer in writers[1:]:
                writer.writerow(cells | about)
                file.flush()  # what was measured stays when the run is stopped
    return 0


def _about(threads: int) -> dict[str, str]:
    """Where and with what the figures are taken."""
    with Worker("andrea_numba.bench.ours", threads) as ours:
        about = ours.ask("machine")
    if importlib.util.find_spec("torch"):
        return about | {"torch": importlib.metadata.version("torch")}
    say("PyTorch is not installed (pip install '.[torch]'): ours alone")
    return about


if __name__ == "__main__":
    sys.exit(main())
