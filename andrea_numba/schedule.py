"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math

from .config import OptimizerConfig

WSD_DECAY_FRACTION = 0.2  # last part of a warm-up, stable, decay run


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Rate of update `step` (0 … steps-1): min(1, (step+1)/warmup) × decay(progress).

    The first update has a rate above zero, the last warm-up step has the peak, no later step is
    below the floor `min_lr`, and the last step is at it (constant: at the peak). Progress runs
    from 0 at the end of the warm-up to 1 at the last step; it is defined for every combination,
    also a warm-up longer than the run. A run of a single step without warm-up is at the peak.
    """
    decay_steps = steps - 1 - config.warmup
    progress = (step - config.warmup) / decay_steps if decay_steps > 0 else 0.0
    if step == steps - 1 and step >= max(config.warmup, 1):
        progress = 1.0
    progress = min(max(progress, 0.0), 1.0)
    warmup = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    height = _SHAPES[config.schedule](progress)  # 1 at the peak, 0 at the floor
    return warmup * (config.min_lr + (config.lr - config.min_lr) * height)


_SHAPES = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
    "wsd": lambda progress: min(1.0, (1.0 - progress) / WSD_DECAY_FRACTION),
}
