"""Kernels compiled on two cores at the first start, half of them in a second process.

Compiled code goes from one process to the other by the cache on the disk. All that the second
process says is dropped: what fails there fails again, and is told, where the kernels are used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

from .config import ModelConfig
from .device import Device, choose
from .trainer import tiny, warm_up

OPS = ("attention", "adamw")  # those of the second process


def compile_beside(device: Device, model: ModelConfig, training: bool, stored: str) -> None:
    """Fill the cache with what `warm_up` would compile; in vain where that cannot be written."""
    with second_process(device.memory.precision, training, stored) as other:
        warm_up(_some(device.ops, lambda name: name not in OPS), tiny(model), device.memory,
                training=training, decoding=not training, stored=stored)
        other.wait()


def second_process(precision: str, training: bool, stored: str = "",
                   **environment: str) -> subprocess.Popen:
    """It ends when its input is closed, as at the end of this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "andrea_numba.compile_beside", precision, "training" * training,
         stored],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_NUM_THREADS": "1",
             **environment},
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _some(ops: SimpleNamespace, wanted: Callable[[str], bool]) -> SimpleNamespace:
    """The table of kernels where those of other ops do nothing."""
    nothing = SimpleNamespace(forward=_nothing, backward=_nothing, update=_nothing,
                              append=_nothing, decode=_nothing)
    return SimpleNamespace(**{name: op if wanted(name) else nothing
                              for name, op in vars(ops).items()})


def _nothing(*arguments) -> None:
    pass


def _end_with_the_first() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    precision, training, stored = sys.argv[1:]
    device = choose("cpu", precision)
    warm_up(_some(device.ops, lambda name: name in OPS), tiny(ModelConfig()), device.memory,
            training=bool(training), decoding=not training, stored=stored)
