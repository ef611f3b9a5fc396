"""Training steps of presets on random text, by this project alone, on a CPU or a GPU.

Steps are timed one by one after two that are not counted; the median is what to quote, and
`model_ms` is what the time model predicts for a GPU that it knows. `interleaved` is the time of a
matrix product followed by a small parallel loop, as a multiple of the two alone: above about 1.2
the thread pools fight.
"""

from __future__ import annotations

import csv
import statistics
import sys
import tempfile
from collections.abc import Sequence

from .. import args
from ..config import PRESETS, TrainConfig
from .process import timed

SHAPES = {"nano": (4, 100), "andrea-12m": (1, 5), "andrea-120m": (1, 5)}  # batch size, timed steps
CALLS = 200  # of the product and the loop, the first quarter of them not counted
FIELDS = ("measurement", "median_ms", "fastest_ms", "slowest_ms", "tokens_per_second",
          "peak_mib", "planned_mib", "model_ms")


def write(presets: Sequence[str], batch_size: int, chosen) -> None:
    """A CSV row on stdout for each of the presets, whose batch size is its own for 0."""
    table = csv.DictWriter(sys.stdout, FIELDS)
    table.writeheader()
    table.writerow({"measurement": "interleaved", "median_ms": f"{interleaved():.2f} x"})
    for name in presets:
        config = TrainConfig()
        args.apply(config, PRESETS[name], name)
        config.run.batch_size = batch_size or SHAPES[name][0]
        with chosen.memory.queue():
            table.writerow({"measurement": name, **measure(name, config, chosen)})
        sys.stdout.flush()


def measure(name: str, config: TrainConfig, chosen) -> dict[str, str]:
    """Milliseconds a step, tokens a second, peak and planned memory."""
    from ..metrics import peak_memory

    with tempfile.TemporaryDirectory() as folder:
        trainer, planned = random_trainer(config, chosen, folder)
        for _ in range(2):
            trainer.step()
        seconds = [timed(trainer.step) for _ in range(SHAPES[name][1])]
    median = statistics.median(seconds)
    return {"median_ms": f"{1000 * median:.1f}", "fastest_ms": f"{1000 * min(seconds):.1f}",
            "slowest_ms": f"{1000 * max(seconds):.1f}",
            "tokens_per_second": f"{trainer.tokens_per_step / median:.0f}",
            "peak_mib": f"{peak_memory() / 2**20:.0f}", "planned_mib": f"{planned / 2**20:.0f}",
            "model_ms": _modelled(config, chosen)}


def random_trainer(config: TrainConfig, chosen, folder: str):
    """A trainer on random letters, whose ids lie in `folder`, and the bytes that it planned."""
    import numpy as np

    from ..data import Document, prepare
    from ..metrics import resident_memory
    from ..plan import memory
    from ..start import load_kernels
    from ..trainer import Trainer

    letters = np.random.default_rng(0).integers(97, 123, 40 * config.model.context)
    text = Document.from_text("random letters", bytes(letters.astype(np.uint8)).decode())
    dataset = prepare([text], "byte", 0.1, config.model.context, cache_dir=folder)
    config.model.vocab_size = config.model.vocab_size or dataset.tokenizer.vocab_size
    load_kernels(chosen, config.model, config.run.batch_size)
    planned = sum(memory(config, resident_memory(), chosen.memory).values())
    return Trainer(config, chosen.ops, dataset, memory=chosen.memory), planned


def _modelled(config: TrainConfig, chosen) -> str:
    """The time model's milliseconds a step; empty on a CPU, and on a GPU that it does not know."""
    if chosen.name != "cuda":
        return ""
    from kernels.common.cuda import device_name

    from ..time_model import seconds_of_a_step

    seconds = seconds_of_a_step(config.model, config.run.batch_size, chosen.memory.precision,
                                device_name())
    return "" if seconds is None else f"{1000 * seconds:.1f}"


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

    def both():
        multiply()
        loop()

    def median(action) -> float:
        return statistics.median([timed(action) for _ in range(CALLS)][CALLS // 4:])

    return median(both) / (median(multiply) + median(loop))
