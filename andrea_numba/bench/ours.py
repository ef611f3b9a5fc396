"""The measurements by this project, in a process that compare.py asks (process.py)."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from ..environment import prepare_threads
from .process import Call, serve

PROMPT = 128  # tokens in the cache when the first timed token is decoded
DECODED = 128  # positions that are then timed in turn
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}  # of a stored weight


def train(model: dict, batch: int, precision: str) -> tuple[Call, dict]:
    """One training step, from the batch to the updated weights."""
    trainer = _trainer(model, batch, precision)
    return trainer.step, {"tokens": trainer.tokens_per_step}


def _trainer(model: dict, batch: int, precision: str):
    from ..config import ModelConfig, RunConfig, TrainConfig
    from ..device import choose
    from .steps import random_trainer

    config = TrainConfig(model=ModelConfig(**model), run=RunConfig(batch_size=batch))
    with tempfile.TemporaryDirectory() as folder:  # its file stays open
        return random_trainer(config, choose("cpu", precision), folder)[0]


def op(op: str, name: str, case: dict) -> tuple[Call, dict]:
    """One function of an op, on arrays that begin with a cache line, as in training."""
    import numpy as np

    from kernels.common.host_array import aligned_zeros
    from kernels.common.verify import as_stored, build_arguments
    from kernels.registry import load_op, load_spec

    function = load_spec(op).FUNCTIONS[name]
    arguments = as_stored(function, case, build_arguments(op, name, case))
    for key, array in arguments.items():
        if isinstance(array, np.ndarray):
            arguments[key] = aligned_zeros(array.size, array.dtype).reshape(array.shape)
            arguments[key][...] = array
    if "dlogits" in arguments:  # as in training
        arguments["dlogits"] = arguments["logits"]
    implementation, values = getattr(load_op(op, "cpu"), name), tuple(arguments.values())
    return lambda: implementation(*values), {}


def decode(model: dict, weights: str, samples: int = 1) -> tuple[Call, dict]:
    """One token of each sample: its logits from the key-value cache, and the likeliest of them."""
    import numpy as np

    decoder, size = _decoder(model, weights, samples)
    decoder.prefill_rows(np.tile(_random_ids(model, PROMPT), (samples, 1)))
    tokens = np.zeros(samples, np.int32)

    def call():
        nonlocal tokens
        if decoder.length == PROMPT + DECODED:
            decoder.length = PROMPT
        tokens = decoder.step_rows(tokens).argmax(axis=1)

    return call, {"tokens": samples, "bytes": size}


def prefill(model: dict, length: int) -> tuple[Call, dict]:
    """A prompt of `length` tokens, up to the logits of the next one."""
    decoder, _ = _decoder(model, "fp32")
    ids = _random_ids(model, length)
    return lambda: decoder.prefill(ids), {"tokens": length}


def _decoder(model: dict, weights: str, samples: int = 1):
    """A decoder of random weights, and the bytes of those that it reads for a token."""
    from ..config import ModelConfig
    from ..decoder import Decoder
    from ..device import choose
    from ..initialize import initialize
    from ..parameters import ParameterTable
    from ..start import load_kernels
    from ..trainer import generator

    if weights not in BYTES:
        raise ValueError(f"there are no {weights} weights, only {', '.join(BYTES)}")
    config, device = ModelConfig(**model), choose("cpu", "fp32")
    load_kernels(device, config, batch=1, training=False, stored=weights)
    table = ParameterTable(config)
    flat = table.zeros()
    initialize(table, flat, generator(0, "init"))
    decoder = Decoder(config, table.views(flat), device.ops, memory=device.memory,
                      stored=weights, batch=samples)
    read = table.n_decay - config.context * config.d_model  # all matrices but the positions
    return decoder, read * BYTES[weights]


def _random_ids(model: dict, length: int):
    import numpy as np

    return np.random.default_rng(0).integers(0, model["vocab_size"], length, dtype=np.int32)


def peak() -> int:
    """Bytes."""
    from ..metrics import peak_memory

    return peak_memory()


def stream(kind: str) -> float:
    from .ceilings import stream

    return stream(kind)


def profile(model: dict, batch: int, precision: str, steps: int) -> list[dict[str, Any]]:
    from .ceilings import Recorder, profile, rates

    trainer = _trainer(model, batch, precision)
    recorder = Recorder(trainer.ops, rates(precision))
    trainer.ops = trainer.optimizer.ops = recorder.ops
    return profile(recorder, trainer.step, steps)


def machine() -> dict[str, str]:
    from kernels.bench import machine
    from kernels.common.cpu_features import RUNG

    return machine(["cpu"]) | {"rung": RUNG}


if __name__ == "__main__":
    prepare_threads(int(sys.argv[1]))
    serve({f.__name__: f for f in (train, op, decode, prefill)},
          {f.__name__: f for f in (peak, stream, profile, machine)})
