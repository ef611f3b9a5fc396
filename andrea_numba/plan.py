"""What a run will need, before it needs it: parameters, bytes, FLOPs and time."""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Iterable

import numpy as np

from . import model
from .buffers import PRECISIONS, Buffer, Buffers, arenas, plan
from .config import ModelConfig, OptimizerConfig, TrainConfig
from .errors import UserError
from .memory import HOST, HostMemory
from .metrics import byte_size, duration, flops_per_token
from .optimizer import RATES, Optimizer, as_operands
from .parameters import ParameterTable

PROBE_ROWS = 1024  # tokens in a probe step; more would say no more about the speed


def _bytes(buffers: Iterable[Buffer]) -> int:
    return sum(size * dtype.itemsize for dtype, size in arenas(buffers).items())


def memory(config: TrainConfig, baseline: int, place=HOST) -> dict[str, int]:
    """Bytes by group of everything a run allocates; `baseline` is what the process holds before.

    Of a GPU that is also its runtime, the compiled kernels and, once they were tried, the scratch
    memory of the ops.
    """
    table = ParameterTable(config.model)
    groups = {"weights": 4 * table.size, "gradients": 4 * table.size,
              "AdamW moments": 8 * table.size}
    operand = PRECISIONS[place.precision]
    if place.precision == "bf16":
        groups["weights in bfloat16"] = operand.itemsize * table.size
    buffers = plan(config.model, config.run.batch_size, config.model.context, True,
                   place.precision)
    kept = [buffer for buffer in buffers if buffer.group == "activations"]
    groups["activations"] = _bytes(kept)
    groups["logits, then gradients of activations"] = _bytes(buffers) - _bytes(kept)
    cache = 2 * config.model.n_layer * config.model.context * config.model.d_model
    groups["key-value cache of samples"] = operand.itemsize * cache
    if not isinstance(place, HostMemory):
        context = config.model.context
        groups["token ids on their way"] = (place.transfer_bytes(config.run.batch_size * context)
                                            + place.transfer_bytes(context)
                                            + place.transfer_bytes(RATES))
    scratch = "" if isinstance(place, HostMemory) else ", scratch"
    groups[f"in use before (runtime, compiled kernels{scratch})"] = baseline
    return groups


def check_fits(config: TrainConfig, place=HOST) -> None:
    """Raise UserError when the plan exceeds the free memory, naming the batch that would fit.

    On a GPU the answer is final once kernels were tried at their size: the baseline then holds all
    that is not planned.
    """
    def needs(batch_size: int) -> int:
        run = dataclasses.replace(config.run, batch_size=batch_size)
        return sum(memory(dataclasses.replace(config, run=run), 0, place).values())

    batch_size, free = config.run.batch_size, place.free_bytes()
    needed = needs(batch_size)
    if not free or needed <= free:
        return
    fits = bisect.bisect_right(range(1, batch_size), free, key=needs)
    remedy = (f"--batch-size {fits} would fit (--grad-accum makes up for a smaller batch)"
              if fits >= 1 else "lower --context, --n-layer, --d-model or --vocab-size")
    raise UserError(f"this run needs {byte_size(needed)} of {place.kind} and {byte_size(free)} "
                    f"are free; {remedy}")


def report(config: TrainConfig, ops, place=HOST) -> str:
    """The plan as text: parameters counted both ways, bytes, FLOPs, and time from a short probe."""
    m, run = config.model, config.run
    table = ParameterTable(m)
    baseline = place.held_bytes()
    tokens = run.batch_size * run.grad_accum * m.context
    flops = flops_per_token(m, m.context) * tokens
    step_seconds = probe(config, ops, place)
    counted = (f" ({table.count_untied:,} when the tied table is counted once per use)"
               if m.tied else "")
    groups = memory(config, baseline, place)
    lines = [
        f"model        {m.n_layer} blocks, d_model {m.d_model}, {m.n_head} heads of {m.head_dim}, "
        f"context {m.context}, vocabulary {m.vocab_size} (padded to {m.padded_vocab_size})",
        f"parameters   {table.count:,} unique{counted}",
        place.kind,
        *(f"  {byte_size(size):>12}  {group}" for group, size in groups.items()),
        f"  {byte_size(sum(groups.values())):>12}  peak",
        f"step         {tokens:,} tokens, {flops / 1e9:,.1f} GFLOP",
        f"time         about {duration(step_seconds)} a step, "
        f"{tokens / step_seconds:,.0f} tokens/s, {duration(step_seconds * run.steps)} for "
        f"{run.steps:,} steps (from a short probe)",
    ]
    return "\n".join(lines)


def probe(config: TrainConfig, ops, place=HOST) -> float:
    """Estimated seconds of one step, from real steps of the same model with one and two blocks."""
    m, run = config.model, config.run
    sequences = min(run.batch_size, max(1, PROBE_ROWS // m.context))
    one = _time_step(dataclasses.replace(m, n_layer=1), sequences, ops, place)
    two = _time_step(dataclasses.replace(m, n_layer=2), sequences, ops, place)
    passes, update = (a + (m.n_layer - 1) * max(b - a, 0.0)
                      for a, b in zip(one, two, strict=True))
    return passes * run.batch_size * run.grad_accum / sequences + update


def _time_step(m: ModelConfig, sequences: int, ops, place) -> tuple[float, float]:
    """Seconds of forward and backward over some sequences, and of clearing and updating."""
    table = ParameterTable(m)
    weights, grads = place.zeros(table.size), place.zeros(table.size)
    operands = as_operands(place, weights)
    p, g = table.views(weights, operands), table.views(grads)
    optimizer = Optimizer(ops, table, OptimizerConfig(), place)
    a = Buffers(m, sequences, m.context, True, memory=place).views(sequences, m.context)
    ids = place.put(np.zeros((sequences, m.context), np.int32))
    passes, updates = [], []
    for _ in range(3):  # the first touches the memory; the fastest counts
        place.wait()
        started = time.perf_counter()
        model.forward_backward(ops, p, g, a, ids, ids.reshape(-1), m.vocab_size, 1.0 / ids.size)
        place.wait()
        passes.append(time.perf_counter() - started)
        optimizer.update(weights, operands, grads, 0.0)
        place.clear(grads)
        place.wait()
        updates.append(time.perf_counter() - started - passes[-1])
    return min(passes), min(updates)
