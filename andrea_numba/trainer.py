"""The state of a training run and one step of it; `run.py` is the loop around it."""

from __future__ import annotations

import dataclasses
import functools
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
from .evaluate import Evaluator, Score
from .initialize import initialize
from .memory import HOST
from .metrics import Average
from .optimizer import Optimizer, as_operands
from .parameters import ParameterTable
from .schedule import learning_rate

Batch = tuple[np.ndarray, np.ndarray]  # ids and targets, each int32 [B, T], on the host


class Diverged(Exception):
    """Something that training needs is not finite."""


@dataclass(frozen=True)
class StepResult:
    """What one update did: mean loss in nats per token, gradient norm before clipping."""

    step: int
    loss: float
    grad_norm: float
    lr: float


class Trainer:
    """Weights, gradients, moments, buffers and data position of one run.

    `step_count` is the number of updates asked for, `last` the newest one whose figures are known:
    a GPU may be a few updates behind. Everything that grows with the model or the batch is
    allocated here, before the first step.
    """

    def __init__(self, config: TrainConfig, ops, dataset: Dataset,
                 resumed: Checkpoint | None = None, memory=HOST):
        run = config.run
        self.config, self.ops, self.dataset, self.memory = config, ops, dataset, memory
        self.table = ParameterTable(config.model)
        if resumed is None:
            weights = self.table.zeros()
            initialize(self.table, weights, generator(run.seed, "init"))
        else:
            weights = resumed.weights
        self.weights = memory.put(weights)
        self.operands = as_operands(memory, self.weights)
        self.grads = memory.zeros(self.table.size)
        self.p = self.table.views(self.weights, self.operands)
        self.g = self.table.views(self.grads)
        self.buffers = Buffers(config.model, run.batch_size, config.model.context, training=True,
                               memory=memory)
        self.optimizer = Optimizer(ops, self.table, config.optimizer, memory)
        self.loader = Loader(dataset.train, run.batch_size, config.model.context, run.seed)
        self.average = Average()
        self.last: StepResult | None = None
        self.seconds = 0.0  # spent in steps
        self._transfers = memory.transfers(run.batch_size * config.model.context)
        self._graphs = memory.graphs()
        self._decoder = Decoder(config.model, self.p, ops, buffers=self.buffers, memory=memory)
        self._one_batch: list[Batch] | None = None
        if resumed is not None:
            self.optimizer.m, self.optimizer.v = map(
                memory.put, checkpoint.read_moments(resumed.path, self.table))
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
        self.wait()  # the average is part of the state
        weights, m, v = map(self.memory.get, (self.weights, self.optimizer.m, self.optimizer.v))
        return checkpoint.save(run, self.step_count, self.config, self.dataset.tokenizer,
                               self.table, weights, m, v, {**self.state(), "run_id": run_id})

    def gradients(self, batches: Sequence[Batch]) -> Score:
        """Fill `grads` with the gradient of the mean loss over all targets of `batches`.

        However the sequences are split into batches, mean and gradient are over all their
        targets. The mean loss is the score's, once the losses have arrived.
        """
        self.memory.clear(self.grads)
        score = Score(tokens=sum(int(np.count_nonzero(targets >= 0)) for _, targets in batches))
        for batch in batches:
            ids, targets = self._transfers.upload(*batch)
            a = self.buffers.views(*ids.shape)
            work = functools.partial(
                model.forward_backward, self.ops, self.p, self.g, a, ids, targets.reshape(-1),
                self.config.model.vocab_size, 1.0 / score.tokens)
            self._graphs.replay(("forward and backward", score.tokens), (ids, targets), work)
            self._transfers.download(a.losses, score.add)
        return score

    def advance(self) -> None:
        """Ask for one optimizer update; its figures are there at once on the CPU, and by `wait`.

        Raises Diverged as soon as a loss or gradient norm is known not to be finite. That update
        changed no weight or moment then, nor did any that a GPU has made since.
        """
        started = time.perf_counter()
        lr = learning_rate(self.step_count, self.config.run.steps, self.config.optimizer)
        score = self.gradients(self._next_batches())
        self.optimizer.update(self.weights, self.operands, self.grads, lr)
        step = self.step_count
        self._transfers.download(
            self.optimizer.norm,
            lambda norm: self._record(StepResult(step, score.loss, float(norm[0]), lr)))
        self.seconds += time.perf_counter() - started

    def wait(self) -> StepResult | None:
        """The figures of the newest update; raises Diverged like `advance`."""
        started = time.perf_counter()
        self._transfers.finish()
        self.seconds += time.perf_counter() - started
        return self.last

    def step(self) -> StepResult:
        """One update, finished."""
        self.advance()
        return self.wait()

    def _record(self, result: StepResult) -> None:
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise Diverged(f"step {result.step}: loss {result.loss:g}, gradient norm "
                           f"{result.grad_norm:g}, learning rate {result.lr:.3g}")
        self.average.add(result.loss)
        self.last = result

    def check_finite(self) -> None:
        """Raise Diverged when a weight or a moment is not finite."""
        self.wait()  # here the time counts as spent in steps
        for name, array in (("weight", self.weights), ("first moment", self.optimizer.m),
                            ("second moment", self.optimizer.v)):
            norm = self.memory.zeros(1)
            self.ops.grad_norm.forward(norm, array, None)
            if not math.isfinite(self.memory.get(norm)[0]):
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
        self.wait()
        return Evaluator(self.config.model, self.ops, self.p, self.buffers, self._transfers,
                         self.config.run.batch_size, self.dataset.val)

    def decoder(self) -> Decoder:
        """Generates with the current weights; shares the training buffers."""
        self.wait()
        return self._decoder


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """An independent random stream per purpose: what one draws never moves another."""
    key = int.from_bytes(purpose.encode(), "big")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, key, *counters])))


def warm_up(ops, config: ModelConfig, memory=HOST, batch: int = 1, training: bool = True) -> None:
    """Make one step of a random model and decode one token (only that without `training`), so
    that every kernel in use is compiled, and its scratch memory allocated for this size."""
    rng = generator(0, "warm-up")
    table = ParameterTable(config)
    weights = memory.put(np.float32(0.1) * rng.standard_normal(table.size, dtype=np.float32))
    operands = as_operands(memory, weights)
    p = table.views(weights, operands)
    buffers = Buffers(config, batch, config.context, training, memory=memory)
    ids = rng.integers(0, config.vocab_size, (batch, config.context), dtype=np.int32)
    if training:
        grads = memory.zeros(table.size)
        a = buffers.views(*ids.shape)
        device_ids, targets = memory.transfers(ids.size).upload(ids, ids.reshape(-1))
        model.losses(ops, p, a, device_ids, targets, config.vocab_size)
        model.forward_backward(ops, p, table.views(grads), a, device_ids, targets,
                               config.vocab_size, 1.0 / ids.size)
        optimizer = Optimizer(ops, table, OptimizerConfig(), memory)
        optimizer.update(weights, operands, grads, lr=0.1)
    decoder = Decoder(config, p, ops, buffers=buffers, memory=memory)
    decoder.prefill(ids[0, :max(1, config.context - 1)])
    if decoder.length < config.context:
        decoder.step(0)
    memory.wait()


def tiny(config: ModelConfig) -> ModelConfig:
    """A model with the same switches that takes no time, where compiled code fits all sizes."""
    return dataclasses.replace(config, d_model=4, n_head=2, n_layer=1, context=4, vocab_size=5)
