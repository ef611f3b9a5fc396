"""The state of a training run and one step of it; `run.py` is the loop around it."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernels.matmul.cpu_stored import FEW

from . import checkpoint, model
from .buffers import Buffers, plan
from .checkpoint import Checkpoint
from .config import ModelConfig, OptimizerConfig, TrainConfig
from .data import Dataset, Loader
from .decoder import Decoder
from .errors import UserError
from .evaluate import Evaluator, Score
from .initialize import initialize
from .memory import HOST
from .metrics import Average
from .optimizer import Optimizer, as_operands
from .parameters import ParameterTable
from .schedule import learning_rate
from .watch import Best, Repetition, Skips, Spikes, as_state, first_not_finite, restored

Batch = tuple[np.ndarray, np.ndarray]  # ids and targets, each int32 [B, T], on the host
RECENT = 4  # steps whose batches are kept: a GPU is at most two behind
WATCHED = {"average": Average, "spikes": Spikes, "repetition": Repetition, "skips": Skips,
           "best": Best}  # attributes of a trainer that are part of its state


class Diverged(Exception):
    """Something that training needs is not finite."""


@dataclass(frozen=True)
class StepResult:
    """What one update did: mean loss in nats per token, gradient norm before clipping."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False  # something was not finite: the update changed nothing

    def __str__(self) -> str:
        return (f"step {self.step}: loss {self.loss:g}, gradient norm {self.grad_norm:g}, "
                f"learning rate {self.lr:.3g}")


class Trainer:
    """Weights, gradients, moments, buffers and data position of one run.

    `step_count` is the number of updates asked for, `last` the newest one whose figures are known:
    a GPU may be a few updates behind. `news` are results that a user should hear of, each with
    what to say; who says it empties the list. Everything that grows with the model or the batch
    is allocated here, before the first step.
    """

    def __init__(self, config: TrainConfig, ops, dataset: Dataset,
                 resumed: Checkpoint | None = None, memory=HOST,
                 weights: np.ndarray | None = None):
        """`weights`, flat [table.size], take the place of random initial ones."""
        run = config.run
        self.config, self.ops, self.dataset, self.memory = config, ops, dataset, memory
        self.table = ParameterTable(config.model)
        if resumed is not None:
            weights = resumed.weights
        if weights is None:
            weights = self.table.zeros()
            initialize(self.table, weights, generator(run.seed, "init"))
        self.weights = memory.put(weights)
        self.operands = as_operands(memory, self.weights)
        self.grads = memory.zeros(self.table.size)
        self.p = self.table.views(self.weights, self.operands)
        self.g = self.table.views(self.grads)
        self.buffers = Buffers(config.model, run.batch_size, config.model.context, training=True,
                               memory=memory)
        self.optimizer = Optimizer(ops, self.table, config.optimizer, memory)
        self.loader = Loader(dataset.train, run.batch_size, config.model.context, run.seed)
        self.average, self.spikes, self.repetition = Average(), Spikes(), Repetition()
        self.skips, self.best = Skips(), None
        self.last: StepResult | None = None
        self.news: list[tuple[StepResult, str]] = []
        self.seconds = 0.0  # spent in steps
        self._arrived: list[StepResult] = []
        self._recent = deque(maxlen=RECENT)
        self._norm = memory.zeros(1)  # of what `check_finite` looks at
        self._transfers = memory.transfers(run.batch_size * config.model.context)
        self._graphs = memory.graphs()
        self._decoder = Decoder(config.model, self.p, ops, buffers=self.buffers, memory=memory)
        self._one_batch: list[Batch] | None = None
        if resumed is not None:
            self.optimizer.m, self.optimizer.v = map(
                memory.put, checkpoint.read_moments(resumed.path, self.table))
            self.optimizer.step = resumed.step
            self._load_state(resumed)

    @property
    def step_count(self) -> int:
        return self.optimizer.step

    @property
    def tokens_per_step(self) -> int:
        run = self.config.run
        return run.batch_size * run.grad_accum * self.config.model.context

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the arrays; `resumed` takes it back."""
        return {"loader": self.loader.state(), "fingerprint": self.dataset.fingerprint,
                "seconds": self.seconds,
                **{name: as_state(getattr(self, name)) for name in WATCHED}}

    def _load_state(self, resumed: Checkpoint) -> None:
        state = resumed.state
        try:
            for name, kind in WATCHED.items():
                if name != "best" or state[name] is not None:
                    setattr(self, name, restored(kind, state[name]))
            self.seconds = float(state["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{resumed.path}: its training state is damaged: {error!r}") from None
        if not self.config.run.overfit_one_batch:
            self.loader.load_state(state["loader"])

    def save(self, run: Path, run_id: str, best: bool = False) -> Path:
        """Write a checkpoint of the current step into the folder of a run; returns its path.

        `best`: it becomes the run's best one. Raises SaveFailed.
        """
        self.wait()  # the average is part of the state
        weights, m, v = map(self.memory.get, (self.weights, self.optimizer.m, self.optimizer.v))
        return checkpoint.save(run, self.step_count, self.config, self.dataset.tokenizer,
                               self.table, weights, m, v, {**self.state(), "run_id": run_id}, best)

    def gradients(self, batches: Sequence[Batch]) -> Score:
        """Fill `grads` with the gradient of the mean loss over all targets of `batches`.

        However the sequences are split into batches, mean and gradient are over all their
        targets. The mean loss is the score's, once the losses have arrived. One that is not finite
        makes the optimizer's norm so, and the next update changes nothing.
        """
        self.memory.clear(self.grads)
        if self.config.run.on_divergence == "skip":
            self.memory.clear(self.optimizer.norm)  # else no later update changes anything either
        score = Score(tokens=sum(int(np.count_nonzero(targets >= 0)) for _, targets in batches))
        for batch in batches:
            ids, targets = self._transfers.upload(*batch)
            a = self.buffers.views(*ids.shape)
            work = functools.partial(self._pass, a, ids, targets.reshape(-1), 1.0 / score.tokens)
            self._graphs.replay(("forward and backward", score.tokens), (ids, targets), work)
            self._transfers.download(a.losses, score.add)
        return score

    def _pass(self, a, ids, targets, scale: float) -> None:
        model.forward_backward(self.ops, self.p, self.g, a, ids, targets,
                               self.config.model.vocab_size, scale)
        self.optimizer.require_finite(a.losses)

    def advance(self) -> None:
        """Ask for one optimizer update; its figures are there at once on the CPU, and by `wait`.

        Raises Diverged as soon as a loss or gradient norm is known not to be finite. That update
        changed no weight or moment then, nor did any that a GPU has made since. Where such updates
        may be skipped, that is in `news` instead, and the next one is as if nothing had been.
        """
        started = time.perf_counter()
        lr = learning_rate(self.step_count, self.config.run.steps, self.config.optimizer)
        batches = self._next_batches()
        score = self.gradients(batches)
        self.optimizer.update(self.weights, self.operands, self.grads, lr)
        step = self.step_count
        self._recent.append((step, batches))
        self._transfers.download(
            self.optimizer.norm,
            lambda norm: self._record(StepResult(step, score.loss, float(norm[0]), lr)))
        self.seconds += time.perf_counter() - started
        self._judge()

    def wait(self) -> StepResult | None:
        """The figures of the newest update; raises Diverged like `advance`."""
        if self.last is None or self.last.step < self.step_count:
            started = time.perf_counter()
            self._transfers.finish()
            self.seconds += time.perf_counter() - started
            self._judge()
        return self.last

    def step(self) -> StepResult:
        """One update, finished."""
        self.advance()
        return self.wait()

    def _record(self, result: StepResult) -> None:
        self._arrived.append(result)

    def _judge(self) -> None:
        """Take in the results that have arrived, in their order; raises Diverged."""
        while self._arrived:
            result = self._arrived.pop(0)
            if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
                self._accept(result)
            else:
                result = dataclasses.replace(result, skipped=True)
                self._skip(result)
            self.last = result

    def _accept(self, result: StepResult) -> None:
        self.skips.in_a_row = 0
        self.average.add(result.loss)
        spike = self.spikes.add(result.loss)
        if spike is not None:
            mean, z = spike
            self.news.append((result, f"warning: the loss jumped at step {result.step}: "
                              f"{result.loss:.4f}, {z:.1f} deviations above its mean {mean:.4f}"))

    def _skip(self, result: StepResult) -> None:
        run, skips = self.config.run, self.skips
        where = f"{result}; first not finite: {self._first_not_finite(result.step)}"
        if run.on_divergence == "stop":
            raise Diverged(where)
        skips.in_a_row += 1
        skips.total += 1
        if skips.in_a_row > run.max_skips:
            raise Diverged(f"{where}; --max-skips {run.max_skips} in a row were skipped before")
        self.news.append((result, f"warning: no update at {where} ({skips.in_a_row} skipped in a "
                          f"row, {skips.total} in all)"))

    def _first_not_finite(self, step: int) -> str:
        """Name of the first tensor, in the order of the forward pass, that holds NaN or infinity.

        What the newest step has left is searched; then, as a GPU may be ahead of the one that
        failed, what that one leaves when it is computed again.
        """
        found = first_not_finite(self._tensors())
        for batch in () if found else dict(self._recent)[step]:
            self.gradients([batch])
            found = found or first_not_finite(self._tensors())
        return found or "nothing when it was computed again"

    def _tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Weights, activations and gradients by name, each in the order of the forward pass."""
        run, shape = self.config.run, self.config.model
        last = ["ln_f_gamma", "ln_f_beta", "w_head"]  # after all blocks
        names = [*(name for name in self.table.shapes if name not in last), *last]
        names = [name for name in names if name in self.table.tensors]
        for name in names:
            yield f"weight {name}", self.memory.get(self.table.view(self.weights, name))
        a = self.buffers.views(run.batch_size, shape.context)
        for buffer in plan(shape, run.batch_size, shape.context, True, self.memory.precision):
            if buffer.name == "losses":  # gradients have taken the place of the logits before them
                model.head(self.ops, self.p, a.logits, a.ln_f)
                yield "activation logits", self.memory.get(a.logits)
            if buffer.group == "activations":
                *block, name = buffer.name.split(".")
                array = getattr(a.blocks[int(block[1])] if block else a, name)
                yield f"activation {buffer.name}", self.memory.get(array)
        for name in names:
            yield f"gradient {name}", self.memory.get(self.table.view(self.grads, name))

    def check_finite(self) -> None:
        """Raise Diverged when a weight or a moment is not finite."""
        self.wait()  # here the time counts as spent in steps
        for name, array in (("weight", self.weights), ("first moment", self.optimizer.m),
                            ("second moment", self.optimizer.v)):
            self.ops.grad_norm.forward(self._norm, array, None)
            if not math.isfinite(self.memory.get(self._norm)[0]):
                raise Diverged(f"step {self.step_count}: a {name} is not finite")

    def _next_batches(self) -> list[Batch]:
        if self._one_batch is not None:
            return self._one_batch
        batches = [self.loader.next() for _ in range(self.config.run.grad_accum)]
        if self.config.run.overfit_one_batch:
            self._one_batch = batches
        return batches

    def evaluator(self, progress: Callable[[int], None] = lambda tokens: None) -> Evaluator:
        """Scores the validation text with the current weights and the training buffers."""
        self.wait()
        return Evaluator(self.config.model, self.ops, self.p, self.buffers, self._transfers,
                         self.config.run.batch_size, self.dataset.val, progress)

    def decoder(self) -> Decoder:
        """Generates with the current weights; shares the training buffers."""
        self.wait()
        return self._decoder


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """An independent random stream per purpose: what one draws never moves another."""
    key = int.from_bytes(purpose.encode(), "big")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, key, *counters])))


def warm_up(ops, config: ModelConfig, memory=HOST, batch: int = 1, training: bool = True,
            decoding: bool = True, stored: str = "") -> None:
    """Make one step of a random model, decode one token, or both, so that every kernel in use is
    compiled, and its scratch memory allocated for this size. `stored` is as a `Decoder` takes it.
    """
    rng = generator(0, "warm-up")
    table = ParameterTable(config)
    weights = memory.put(np.float32(0.1) * rng.standard_normal(table.size, dtype=np.float32))
    operands = as_operands(memory, weights)
    p = table.views(weights, operands)
    buffers = Buffers(config, batch, config.context, training, memory=memory)
    ids = rng.integers(0, config.vocab_size, (batch, config.context), dtype=np.int32)
    if training:
        grads = memory.empty(table.size)
        memory.clear(grads)
        a = buffers.views(*ids.shape)
        device_ids, targets = memory.transfers(ids.size).upload(ids, ids.reshape(-1))
        model.losses(ops, p, a, device_ids, targets, config.vocab_size)
        model.forward_backward(ops, p, table.views(grads), a, device_ids, targets,
                               config.vocab_size, 1.0 / ids.size)
        optimizer = Optimizer(ops, table, OptimizerConfig(), memory)
        optimizer.require_finite(a.losses)
        optimizer.update(weights, operands, grads, lr=0.1)
    if decoding:
        decoder = Decoder(config, p, ops, buffers=buffers, memory=memory, stored=stored)
        decoder.prefill(ids[0, :max(1, config.context - 1)])
        if decoder.length < config.context:
            decoder.step(0)
    memory.wait()


def tiny(config: ModelConfig) -> ModelConfig:
    """A model with the same switches that takes no time, where compiled code fits all sizes.

    Its prompt is long enough that stored matrices are multiplied as with any long one.
    """
    return dataclasses.replace(config, d_model=4, n_head=2, n_layer=1, context=FEW + 2,
                               vocab_size=5)
