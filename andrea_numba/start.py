"""What happens between the choice of a device and the first step: compile, check, allocate."""

from __future__ import annotations

import dataclasses
import time

from . import self_check
from .compile_beside import compile_beside
from .config import ModelConfig
from .device import Device, compile_notice, explained, gpu
from .errors import WrongKernel
from .memory import HostMemory
from .program import say
from .trainer import tiny, warm_up


def load_kernels(device: Device, model: ModelConfig, batch: int, training: bool = True,
                 stored: str = "") -> float:
    """Compile, or read from the cache, every kernel in use; seconds it took. `stored` is as a
    `Decoder` takes it.

    On a CPU the first step of training does not wait for the kernels that decode: the first sample
    compiles them. On a GPU, code and scratch memory depend on the size of the model, so one block
    of the real one is tried; the first time, with every kernel compared with its oracle.
    """
    started = time.perf_counter()
    if isinstance(device.memory, HostMemory):
        if compile_notice():
            compile_beside(device, model, training, stored)
        warm_up(device.ops, tiny(model), device.memory, training=training, decoding=not training,
                stored=stored)
    else:
        with explained():
            _check(device, model, training)
            warm_up(device.ops, dataclasses.replace(model, n_layer=1), device.memory, batch,
                    training)
    return time.perf_counter() - started


def _check(device: Device, model: ModelConfig, training: bool) -> None:
    record, of_training = (self_check.Record(model, device.memory.precision, kind)
                           for kind in (training, True))
    if record.exists() or of_training.exists():  # training's check decodes too
        return
    say("first use of this model on this GPU: compiling the kernels and comparing each with the "
        "CPU, about a minute")
    small = dataclasses.replace(model, n_layer=1, context=min(model.context, self_check.TOKENS))
    ops = self_check.checked(device.ops, device.memory)
    try:
        warm_up(ops, small, device.memory, 2, training)
    except WrongKernel as error:
        raise WrongKernel(f"a kernel is wrong on this GPU ({gpu().line}): {error}; "
                          "use --device cpu, and report this line") from None
    record.write()
