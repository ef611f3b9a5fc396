"""Speed of training on this machine: `python -m andrea_numba.bench [PRESET ...]`.

stdout is one CSV row a measurement. Steps are timed one by one after two that are not counted;
the median is what to quote, and `model_ms` is what the time model predicts for a GPU that it knows.
`interleaved` is the time of a matrix product followed by a small parallel loop, as a multiple of
the two alone: above about 1.2 the thread pools fight.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

from . import args
from .config import PRESETS, TrainConfig
from .environment import prepare_threads
from .errors import UserError

SHAPES = {"nano": (4, 100), "andrea-12m": (1, 5), "andrea-120m": (1, 5)}  # batch size, timed steps
FIELDS = ("measurement", "median_ms", "fastest_ms", "slowest_ms", "tokens_per_second",
          "peak_mib", "planned_mib", "model_ms")


def main(argv: Sequence[str] | None = None) -> int:
    parser = args.Parser(prog="python -m andrea_numba.bench", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET", default=["nano", "andrea-120m"],
                        help="what to train: " + ", ".join(SHAPES) + " (default: nano andrea-120m)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = all cores")
    parser.add_argument("--batch-size", type=int, default=0, help="sequences; 0 = "
                        + ", ".join(f"{batch} for {name}" for name, (batch, _) in SHAPES.items()))
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto",
                        help="of the operands of products (default: bf16 on a GPU)")
    try:
        given = parser.parse(argv)
        unknown = [name for name in given.presets if name not in SHAPES]
        if unknown:
            raise UserError(f"no measurement {unknown[0]}; there are {', '.join(SHAPES)}")
        if given.batch_size < 0:
            raise UserError("--batch-size: must be at least 1")
    except UserError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    prepare_threads(given.threads)
    import numba

    from kernels.common.timing import processor_name

    from .device import choose

    try:
        chosen = choose("auto", given.precision)
    except UserError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    versions = " ".join(f"{p} {importlib.metadata.version(p)}" for p in ("numpy", "numba"))
    print(f"{processor_name()}, {os.cpu_count()} cores, {numba.get_num_threads()} threads, "
          f"Python {platform.python_version()}, {versions}; {chosen.line}", file=sys.stderr)
    table = csv.DictWriter(sys.stdout, FIELDS)
    table.writeheader()
    table.writerow({"measurement": "interleaved", "median_ms": f"{interleaved():.2f} x"})
    for name in given.presets:
        config = TrainConfig()
        args.apply(config, PRESETS[name], name)
        config.run.batch_size = given.batch_size or SHAPES[name][0]
        with chosen.memory.queue():
            table.writerow({"measurement": name, **measure(name, config, chosen)})
        sys.stdout.flush()
    return 0


def measure(name: str, config: TrainConfig, chosen) -> dict[str, str]:
    """Train on random text; milliseconds a step, tokens a second, peak and planned memory."""
    import numpy as np

    from .data import Document, prepare
    from .metrics import peak_memory, resident_memory
    from .plan import memory
    from .start import load_kernels
    from .trainer import Trainer

    steps = SHAPES[name][1]
    letters = np.random.default_rng(0).integers(97, 123, 40 * config.model.context)
    text = Document.from_text("random letters", bytes(letters.astype(np.uint8)).decode())
    with tempfile.TemporaryDirectory() as folder:
        dataset = prepare([text], "byte", 0.1, config.model.context, cache_dir=folder)
        config.model.vocab_size = config.model.vocab_size or dataset.tokenizer.vocab_size
        load_kernels(chosen, config.model, config.run.batch_size)
        planned = sum(memory(config, resident_memory(), chosen.memory).values())
        trainer = Trainer(config, chosen.ops, dataset, memory=chosen.memory)
        for _ in range(2):
            trainer.step()
        seconds = [_timed(trainer.step) for _ in range(steps)]
    median = statistics.median(seconds)
    return {"median_ms": f"{1000 * median:.1f}", "fastest_ms": f"{1000 * min(seconds):.1f}",
            "slowest_ms": f"{1000 * max(seconds):.1f}",
            "tokens_per_second": f"{trainer.tokens_per_step / median:.0f}",
            "peak_mib": f"{peak_memory() / 2**20:.0f}", "planned_mib": f"{planned / 2**20:.0f}",
            "model_ms": _modelled(config, chosen)}


def _modelled(config: TrainConfig, chosen) -> str:
    """The time model's milliseconds a step; empty on a CPU, and on a GPU that it does not know."""
    if chosen.name != "cuda":
        return ""
    from kernels.common.cuda import device_name

    from .time_model import seconds_of_a_step

    seconds = seconds_of_a_step(config.model, config.run.batch_size, chosen.memory.precision,
                                device_name())
    return "" if seconds is None else f"{1000 * seconds:.1f}"


def _timed(action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def interleaved() -> float:
    """Time of product and loop in turn over the sum of their times alone (medians)."""
    import numpy as np

    from kernels.gelu import cpu as gelu
    a = np.ones((512, 512), np.float32)
    product, y = np.empty_like(a), np.empty_like(a)

    def multiply():
        np.matmul(a, a, out=product)

    def loop():
        gelu.forward(y, a)

    def median(*actions) -> float:
        seconds = []
        for _ in range(200):
            started = time.perf_counter()
            for action in actions:
                action()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[50:])

    return median(multiply, loop) / (median(multiply) + median(loop))


if __name__ == "__main__":
    sys.exit(main())
