"""The state of a training run and one step of it; `run.py` is the loop around it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import checkpoint, model
from .buffers import Buffers
from .checkpoint import Checkpoint
from .config import ModelConfig, OptimizerConfig, TrainConfig
from .data import Dataset, Loader
from .decoder import Decoder
from .evaluate import Evaluator
from .initialize import initialize
from .metrics import Average
from .optimizer import Optimizer
from .parameters import ParameterTable
from .schedule import learning_rate

Batch = tuple[np.ndarray, np.ndarray]  # ids and targets, each int32 [B, T]


class Diverged(Exception):
    """Something that training needs is not finite."""


@dataclass(frozen=True)
class StepResult:
    """What one update did: mean loss in nats per token, gradient norm before clipping."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float


class Trainer:
    """Weights, gradients, moments, buffers and data position of one run.

    `step_count` is the number of updates made. Everything that grows with the model or the
    batch is allocated here, before the first step.
    """

    def __init__(self, config: TrainConfig, ops, dataset: Dataset,
                 resumed: Checkpoint | None = None):
        run = config.run
        self.config, self.ops, self.dataset = config, ops, dataset
        self.table = ParameterTable(config.model)
        if resumed is None:
            self.weights = self.table.zeros()
            initialize(self.table, self.weights, generator(run.seed, "init"))
        else:
            self.weights = resumed.weights
        self.grads = self.table.zeros()
        self.p = self.table.views(self.weights)
        self.g = self.table.views(self.grads)
        self.buffers = Buffers(config.model, run.batch_size, config.model.context, training=True)
        self.optimizer = Optimizer(ops, self.table, config.optimizer)
        self.loader = Loader(dataset.train, run.batch_size, config.model.context, run.seed)
        self.average = Average()
        self._one_batch: list[Batch] | None = None
        if resumed is not None:
            self.optimizer.m, self.optimizer.v = checkpoint.read_moments(resumed.path, self.table)
            self.optimizer.step = resumed.step
            if not run.overfit_one_batch:
                self.loader.load_state(resumed.state["loader"])
            self.average = Average(**resumed.state["average"])

    @property
    def step_count(self) -> int:
        return self.optimizer.step

    @property
    def tokens_per_step(self) -> int:
        run = self.config.run
        return run.batch_size * run.grad_accum * self.config.model.context

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the arrays; `resumed` takes it back."""
        return {"loader": self.loader.state(), "average": dataclasses.asdict(self.average),
                "fingerprint": self.dataset.fingerprint}

    def save(self, run: Path, run_id: str) -> Path:
        """Write a checkpoint of the current step into the folder of a run; returns its path."""
        return checkpoint.save(run, self.step_count, self.config, self.dataset.tokenizer,
                               self.table, self.weights, self.optimizer.m, self.optimizer.v,
                               {**self.state(), "run_id": run_id})

    def gradients(self, batches: Sequence[Batch]) -> float:
        """Fill `grads` with the gradient of the mean loss over all targets of `batches`.

        However the sequences are split into batches, mean and gradient are over all their
        targets. Returns the mean loss.
        """
        self.grads.fill(0.0)
        tokens = sum(int(np.count_nonzero(targets >= 0)) for _, targets in batches)
        nats = 0.0
        for ids, targets in batches:
            a = self.buffers.views(*ids.shape)
            model.forward_backward(self.ops, self.p, self.g, a, ids, targets.reshape(-1),
                                   self.config.model.vocab_size, 1.0 / tokens)
            nats += float(a.losses.sum(dtype=np.float64))
        return nats / tokens

    def step(self) -> StepResult:
        """One optimizer update. Raises Diverged, weights and moments untouched, when loss or
        gradient norm is not finite."""
        started = time.perf_counter()
        lr = learning_rate(self.step_count, self.config.run.steps, self.config.optimizer)
        loss = self.gradients(self._next_batches())
        grad_norm = self.optimizer.gradient_norm(self.grads)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise Diverged(f"step {self.step_count + 1}: loss {loss:g}, gradient norm "
                           f"{grad_norm:g}, learning rate {lr:.3g}")
        self.optimizer.update(self.weights, self.grads, lr, grad_norm)
        self.average.add(loss)
        return StepResult(self.step_count, loss, grad_norm, lr, time.perf_counter() - started)

    def check_finite(self) -> None:
        """Raise Diverged when a weight or a moment is not finite."""
        for name, array in (("weight", self.weights), ("first moment", self.optimizer.m),
                            ("second moment", self.optimizer.v)):
            if not math.isfinite(self.optimizer.gradient_norm(array)):
                raise Diverged(f"step {self.step_count}: a {name} is not finite")

    def _next_batches(self) -> list[Batch]:
        if self._one_batch is not None:
            return self._one_batch
        batches = [self.loader.next() for _ in range(self.config.run.grad_accum)]
        if self.config.run.overfit_one_batch:
            self._one_batch = batches
        return batches

    def evaluator(self) -> Evaluator:
        """Scores the validation text with the current weights and the training buffers."""
        return Evaluator(self.config.model, self.ops, self.p, self.buffers,
                         self.config.run.batch_size, self.dataset.val)

    def decoder(self) -> Decoder:
        """Generates with the current weights; shares the training buffers."""
        return Decoder(self.config.model, self.weights, self.ops, buffers=self.buffers)


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """An independent random stream per purpose: what one draws never moves another."""
    key = int.from_bytes(purpose.encode(), "big")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, key, *counters])))


def warm_up(ops, config: ModelConfig) -> None:
    """Make one tiny step and one decoded token, so that every kernel in use is compiled."""
    tiny = dataclasses.replace(config, d_model=4, n_head=2, n_layer=1, context=4, vocab_size=5)
    table = ParameterTable(tiny)
    weights, grads = table.zeros(), table.zeros()
    p, g = table.views(weights), table.views(grads)
    buffers = Buffers(tiny, 1, 4, training=True)
    ids = np.zeros((1, 4), np.int32)
    a = buffers.views(1, 4)
    model.forward_backward(ops, p, g, a, ids, ids.reshape(-1), tiny.vocab_size, 1.0)
    model.losses(ops, p, a, ids, ids.reshape(-1), tiny.vocab_size)
    optimizer = Optimizer(ops, table, OptimizerConfig())
    optimizer.update(weights, grads, 0.0, optimizer.gradient_norm(grads))
    decoder = Decoder(tiny, weights, ops, buffers=buffers)
    decoder.prefill(ids[0, :2])
    decoder.step(0)
