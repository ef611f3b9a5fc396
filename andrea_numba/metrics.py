"""Numbers that are printed: averages, durations, FLOPs, memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from .config import ModelConfig


@dataclass
class Average:
    """Exponential moving average without the pull of its start at zero."""

    decay: float = 0.95
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> float:
        """Take one value; returns the average so far."""
        self.total = self.decay * self.total + (1.0 - self.decay) * value
        self.weight = self.decay * self.weight + (1.0 - self.decay)
        return self.value

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


def flops_per_token(model: ModelConfig, length: int) -> float:
    """Multiply-adds, times two, of training on one token in a sequence of `length`.

    Matrices: 2 forward + 4 backward per element, the output head included and the embedding
    lookups not. Causal attention: two products of length·d/2 multiply-adds forward, and twice
    that backward (the recomputed scores are not counted).
    """
    d = model.d_model
    matrices = 12 * d * d * model.n_layer + d * model.padded_vocab_size
    attention = 2 * length * d / 2 * model.n_layer
    return 6.0 * (matrices + attention)


def duration(seconds: float) -> str:
    """3.2 s, 1m05s, 2h03m, 4d02h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s"


def byte_size(count: float) -> str:
    """1.5 GiB, 12.0 MiB, 3.1 KiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:,.2f} {unit}" if unit == "GiB" else f"{count / size:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"


def resident_memory() -> int:
    """Bytes of physical memory this process holds now; 0 where the system does not say."""
    return _proc_kib("/proc/self/status", "VmRSS")


def available_memory() -> int:
    """Bytes of physical memory that can be had now; 0 where the system does not say."""
    return _proc_kib("/proc/meminfo", "MemAvailable")


def _proc_kib(path: str, key: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def peak_memory() -> int:
    """Most bytes of physical memory this process ever held; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
