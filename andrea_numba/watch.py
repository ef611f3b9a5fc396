"""What is watched beside the loss: jumps of it, its best value, updates left out, and samples that
repeat themselves while it falls. All of it is plain numbers, so that a checkpoint can hold it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

import numpy as np

WINDOW = 100  # losses that a new one is compared with
ENOUGH = 50  # of them, before anything is said
Z_SPIKE, Z_OVER = 6.0, 2.0  # where a spike begins, and where it is over
LEAST_DEVIATION = 0.01  # nats: a loss that hardly moves has no spikes of a thousandth

GRAM = 4  # tokens whose repetition counts
REFERENCES = 16  # passages of the training text that samples are compared with
COLLAPSED = 0.5  # of the most repetitive passage's diversity
LOW_IN_A_ROW = 2  # one sample may be unlucky
YOUNG = 0.1  # part of a run in which a model may still babble

State = TypeVar("State")


@dataclass
class Best:
    """The lowest validation loss so far, among scores of the same number of tokens."""

    step: int
    loss: float
    tokens: int


@dataclass
class Skips:
    """Updates that were left out because something was not finite."""

    in_a_row: int = 0
    total: int = 0


@dataclass
class Spikes:
    """Losses far above those before: z = (loss - mean) / deviation over the last 100 steps.

    The deviation is at least 0.01 nats. A spike begins at z = 6, is told once, and is over when z
    is below 2 again. A falling loss has negative z, whatever its slope.
    """

    losses: list[float] = field(default_factory=list)
    high: bool = False

    def add(self, loss: float) -> tuple[float, float] | None:
        """Take the loss of a step; (mean, z) where a spike begins."""
        begins = None
        if len(self.losses) >= ENOUGH:
            mean = math.fsum(self.losses) / len(self.losses)
            variance = math.fsum((x - mean) ** 2 for x in self.losses) / len(self.losses)
            z = (loss - mean) / max(math.sqrt(variance), LEAST_DEVIATION)
            if z >= Z_SPIKE and not self.high:
                begins = mean, z
            self.high = z >= (Z_OVER if self.high else Z_SPIKE)
        self.losses = [*self.losses[1 - WINDOW:], loss]
        return begins


@dataclass
class Repetition:
    """Whether samples have collapsed into repetition, which a falling loss does not show.

    A sample is low when its diversity is below half of that of the most repetitive of 16 passages
    of the training text, each as long as a sample; so text that repeats itself by nature is no
    collapse. Two low samples in a row are one, once there was a better sample, or a tenth of the
    run is over: a young model writes "the the the".
    """

    was_good: bool = False
    low: int = 0  # samples in a row

    def add(self, diversity: float, reference: float, progress: float) -> bool:
        """Take a sample's diversity at this part of the run; whether a collapse begins here."""
        if diversity >= COLLAPSED * reference:
            self.was_good, self.low = True, 0
        elif self.was_good or progress >= YOUNG:
            self.low += 1
        return self.low == LOW_IN_A_ROW


def diversity(ids: Sequence[int]) -> float:
    """Distinct runs of 4 tokens over all of them, above 0 and at most 1; 1 for less than 4."""
    grams = [tuple(ids[i:i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def least_diversity(tokens, length: int) -> float:
    """Of 16 passages of `length` tokens, evenly spread over `tokens` (or all of a shorter text)."""
    last = max(0, len(tokens) - length)
    starts = sorted({last * i // (REFERENCES - 1) for i in range(REFERENCES)})
    return min(diversity(tokens[start:start + length].tolist()) for start in starts)


def restored(kind: type[State], values: Any) -> State:
    """A dataclass of this module, or the like, from its `asdict`; ValueError for anything else."""
    hints = get_type_hints(kind)
    if not isinstance(values, dict) or values.keys() != hints.keys():
        raise ValueError(f"{kind.__name__} is {values!r:.100}")
    for name, hint in hints.items():
        value = values[name]
        parts, wanted = (value, float) if hint == list[float] else ([value], hint)
        if not isinstance(parts, list) or any(
                type(part) is not wanted or not math.isfinite(part) for part in parts):
            raise ValueError(f"{kind.__name__}.{name} is {value!r:.100}")
    return kind(**values)


def first_not_finite(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
    """The name of the first array with a value that is not finite; empty when there is none."""
    for name, array in tensors:
        if not np.isfinite(array.astype(np.float32, copy=False)).all():
            return name
    return ""


def as_state(watched: Any) -> dict[str, Any] | None:
    """What `restored` takes back; None for nothing."""
    return None if watched is None else dataclasses.asdict(watched)
