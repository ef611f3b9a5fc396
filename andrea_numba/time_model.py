"""What a training step should take on GPUs: `python -m andrea_numba.time_model [PRESET]`.

The step's ops are those that the model and the optimizer call, with the shapes they call them with;
`kernels.time_model` says how long each should take, and what that assumes. A model, no measurement.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kernels.common.gpus import CHIPS, LAUNCH, ceilings
from kernels.registry import OPS, load_op, load_spec
from kernels.time_model import predict

from . import args, model
from .buffers import PRECISIONS, Buffers
from .config import PRESETS, ModelConfig, OptimizerConfig, TrainConfig
from .errors import UserError
from .memory import HostMemory
from .metrics import flops_per_token
from .optimizer import Optimizer
from .parameters import ParameterTable

CLEAR = "clear gradients"


class NoMemory(HostMemory):
    """Arrays that have shapes, and all their elements in one place."""

    def __init__(self, precision: str):
        self.precision = precision

    def empty(self, size: int, dtype=np.float32) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), (size,))

    zeros = empty


@dataclass
class Group:
    """All calls of one function in a step."""

    seconds: float = 0.0
    apart: float = 0.0  # if no resource worked beside another
    launches: int = 0
    bounds: Counter = field(default_factory=Counter)  # seconds by the resource that decides


def calls_of_a_step(config: ModelConfig, batch: int,
                    precision: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(op, function, arguments by name) of forward, backward and update, in order."""
    calls = []

    def noted(op, name):
        parameters = inspect.signature(getattr(load_op(op, "oracle"), name)).parameters
        return lambda *values: calls.append((op, name, dict(zip(parameters, values, strict=True))))

    ops = SimpleNamespace(**{
        op: SimpleNamespace(**{name: noted(op, name) for name in load_spec(op).FUNCTIONS})
        for op in OPS})
    memory, table = NoMemory(precision), ParameterTable(config)
    weights, grads = memory.zeros(table.size), memory.zeros(table.size)
    operands = memory.zeros(table.size, PRECISIONS["bf16"]) if precision == "bf16" else None
    buffers = Buffers(config, batch, config.context, training=True, memory=memory)
    ids = memory.zeros(batch * config.context, np.int32)
    model.forward_backward(ops, table.views(weights, operands), table.views(grads),
                           buffers.views(batch, config.context),
                           ids.reshape(batch, config.context), ids, config.vocab_size, 1.0)
    Optimizer(ops, table, OptimizerConfig(), memory).update(weights, operands, grads, lr=1e-3)
    return calls


def step(config: ModelConfig, batch: int, precision: str, gpu: str) -> dict[str, Group]:
    """The groups of a step on one GPU, the longest first."""
    groups: dict[str, Group] = {}
    known: dict[str, list] = {}
    for op, name, arguments in calls_of_a_step(config, batch, precision):
        signature = f"{op}.{name}" + " ".join(_described(value) for value in arguments.values())
        if signature not in known:  # the same in every block
            known[signature] = predict(op, name, arguments, gpu)
        group = groups.setdefault(f"{op}.{name}", Group())
        for launch in known[signature]:
            group.seconds += launch.seconds
            group.apart += launch.apart
            group.launches += 1
            group.bounds[launch.bound] += launch.seconds
    clear = 4 * ParameterTable(config).size / (1e9 * ceilings(gpu).bandwidth)
    groups[CLEAR] = Group(clear, clear, 1, Counter(memory=clear))
    return dict(sorted(groups.items(), key=lambda item: -item[1].seconds))


def seconds_of_a_step(config: ModelConfig, batch: int, precision: str, name: str) -> float | None:
    """The predicted time on the GPU that the driver calls `name`; None if it is not in CHIPS."""
    known = ceilings(name)
    if known is None or known.name not in CHIPS:
        return None
    return sum(group.seconds for group in step(config, batch, precision, known.name).values())


def _described(value: Any) -> str:
    return f"{value.dtype}{value.shape}" if hasattr(value, "shape") else str(value)


def report(config: ModelConfig, batch: int, precision: str, gpu: str) -> str:
    """A table of the groups under a line with the step's time and speed."""
    groups = step(config, batch, precision, gpu)
    seconds, apart, launches = (sum(getattr(group, what) for group in groups.values())
                                for what in ("seconds", "apart", "launches"))
    tokens = batch * config.context
    known = ceilings(gpu)
    peak = known.bfloat16 if precision == "bf16" else known.float32
    rate = 1e-12 * flops_per_token(config, config.context) * tokens / seconds
    lines = [
        f"{gpu}, {precision}: {1e3 * seconds:.1f} ms a step of {batch} x {config.context} tokens, "
        f"{tokens / seconds:,.0f} tokens/s, {rate:.1f} TFLOP/s, {rate / peak:.0%} of the "
        f"{peak:g} TFLOP/s of {precision}",
        f"  {1e3 * apart:.1f} ms, {tokens / apart:,.0f} tokens/s if no resource worked beside "
        f"another; {launches} launches, {1e3 * launches * LAUNCH:.1f} ms of the host without a "
        "graph"]
    for name, group in groups.items():
        bounds = ", ".join(f"{bound} {share / group.seconds:.0%}"
                           for bound, share in group.bounds.most_common())
        lines.append(f"  {name:24}{1e3 * group.seconds:9.2f} ms {group.seconds / seconds:5.0%}  "
                     f"{group.launches:4} launches  bound by {bounds}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = args.Parser(prog="python -m andrea_numba.time_model", description=__doc__)
    parser.add_argument("preset", nargs="?", metavar="PRESET", default="andrea-120m",
                        help=", ".join(PRESETS) + " (default: andrea-120m)")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences (default: 16)")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), help="only this one")
    parser.add_argument("--gpu", choices=tuple(CHIPS), help="only this one")
    try:
        given = parser.parse(argv)
        if given.preset not in PRESETS:
            raise UserError(f"no preset {given.preset}; there are {', '.join(PRESETS)}")
        if given.batch_size < 1:
            raise UserError("--batch-size: must be at least 1")
    except UserError as error:
        print(f"time_model: error: {error}", file=sys.stderr)
        return 2
    config = TrainConfig()
    args.apply(config, PRESETS[given.preset], given.preset)
    config.model.vocab_size = config.model.vocab_size or 256
    print("a model, not a measurement; kernels/time_model.py says what it assumes and leaves out, "
          "kernels/common/gpus.py where its constants come from", file=sys.stderr)
    for gpu in [given.gpu] if given.gpu else CHIPS:
        for precision in [given.precision] if given.precision else PRECISIONS:
            print(report(config.model, given.batch_size, precision, gpu), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
