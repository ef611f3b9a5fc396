"""Runs of the training loop inside the test's process, on the CPU."""

import signal
from pathlib import Path

from helpers import TEXT, dataset, tiny_config

from andrea_numba import checkpoint
from andrea_numba.corpora import Corpus
from andrea_numba.log import read_events
from andrea_numba.run import Run
from andrea_numba.trainer import Trainer
from kernels.registry import op_table

PASSING = {"ts", "run_id", "tokens_per_second"}  # differ between two runs of the same bits


def open_run(folder: Path, resumed=None, text: str = TEXT, **changes) -> Run:
    """A run in `folder`, new or resumed; `changes` are settings by name."""
    config = resumed.config if resumed else tiny_config(**changes)
    data = dataset(config, folder.with_name(f"{folder.name}.cache"), text)
    trainer = Trainer(config, op_table("cpu"), data, resumed)
    return Run(trainer, Corpus("t", data), folder, resumed)


def resume(folder: Path, **changes) -> Run:
    """The run in `folder` from its newest checkpoint."""
    resumed = checkpoint.newest(str(folder), print)
    for name, value in changes.items():
        part = next(p for p in vars(resumed.config).values() if hasattr(p, name))
        setattr(part, name, value)
    return open_run(folder, resumed)


def after_step(run: Run, step: int, action) -> None:
    """Let `run` call `action` when it has made this step, before anything else."""
    advance = run.trainer.advance

    def advance_and_act():
        advance()
        if run.trainer.step_count == step:
            action()

    run.trainer.advance = advance_and_act


def stop_at(run: Run, step: int, number: int = signal.SIGTERM) -> None:
    """Let a signal arrive while `run` makes this step."""
    after_step(run, step, lambda: signal.raise_signal(number))


def logged(folder: Path) -> list[dict]:
    """What a run has logged of itself, without what may differ between equal runs."""
    return [{name: value for name, value in record.items() if name not in PASSING}
            for event in ("run.loss", "run.eval", "run.sample")
            for record in read_events(folder / "log.jsonl", event)]


def state(run: Run) -> tuple:
    """All that a run ends with, in bits."""
    trainer = run.trainer
    watched = {name: value for name, value in trainer.state().items() if name != "seconds"}
    return (trainer.weights.tobytes(), trainer.optimizer.m.tobytes(),
            trainer.optimizer.v.tobytes(), trainer.step_count, watched)
