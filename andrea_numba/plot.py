"""Curves of a run's log as a PNG; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from .log import read_events

HINT = "--plot needs matplotlib: pip install 'andrea-numba[plot]'"


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def write_curves(log: Path, image: Path) -> None:
    """Draw loss (training and validation), gradient norm and learning rate against the step.

    Raises OSError, leaving an older image as it was.
    """
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    losses, evaluations = read_events(log, "run.loss"), read_events(log, "run.eval")
    figure = Figure(figsize=(8, 9), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    steps = [r["step"] for r in losses]
    top.plot(steps, [r["loss"] for r in losses], linewidth=0.8, label="training")
    top.plot([r["step"] for r in evaluations], [r["loss"] for r in evaluations], "o-",
             markersize=3, label="validation")
    top.set_ylabel("loss (nats per token)")
    top.legend()
    middle.plot(steps, [r["grad_norm"] for r in losses], linewidth=0.8)
    middle.set_ylabel("gradient norm")
    middle.set_yscale("log")
    bottom.plot(steps, [r["lr"] for r in losses], linewidth=0.8)
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("step")
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    temporary = image.with_name(f".{image.name}")
    try:
        figure.savefig(temporary, dpi=120, format="png")
        os.replace(temporary, image)
    finally:
        temporary.unlink(missing_ok=True)
