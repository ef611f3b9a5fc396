"""Switches of the virtual GPU, and the way to change them for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

ARCHITECTURES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
CHOICES = {
    "cc": ARCHITECTURES,
    "approx": ("nominal", "hostile"),
    "schedule": ("lowest", "highest", "random"),
}
SMALLEST = {"seed": 0, "chunk": 1, "memory": 1 << 20}


@dataclass
class Options:
    """How the device behaves and what it checks."""

    cc: tuple[int, int] = (9, 0)  # compute capability; fixed once the device exists
    race: bool = True  # report races in shared memory
    global_race: bool = False  # report races in global memory within one launch
    approx: str = "nominal"  # "hostile": .approx results are off by their documented error bound
    schedule: str = "lowest"  # which basic block runs next when a warp has diverged
    seed: int = 0  # of schedule="random"
    chunk: int = 32768  # lanes simulated together
    count: bool = False  # count shared-memory bank conflicts and global-memory sectors
    lazy_streams: bool = False  # run queued work as late as stream and event order allow
    execute: bool = True  # False: launches and copies return at once, for timing the host
    leak_check: bool = False  # list the allocations that are never freed, at exit
    memory: int = 4 << 30  # bytes of device memory

    def update(self, changes: dict) -> None:
        """Set options by name; ValueError for an unknown name or a value that is no choice."""
        known = {field.name for field in fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise ValueError(f"unknown option {name!r} (known: {', '.join(sorted(known))})")
            if name in CHOICES:
                if value not in CHOICES[name]:
                    raise ValueError(f"option {name}={value!r} is none of {CHOICES[name]}")
            elif type(value) is not type(getattr(self, name)):
                kind = type(getattr(self, name)).__name__
                raise ValueError(f"option {name}={value!r} is not of type {kind}")
            elif value < SMALLEST.get(name, value):
                raise ValueError(f"option {name}={value!r} is less than {SMALLEST[name]}")
        for name, value in changes.items():
            setattr(self, name, value)


current = Options()


@contextlib.contextmanager
def options(**changes) -> Iterator[Options]:
    """Change options of the virtual GPU inside a `with` block; `cc` and `memory` stay."""
    fixed = {"cc", "memory"} & changes.keys()
    if fixed:
        raise ValueError(f"option {fixed.pop()!r} cannot change while the device exists")
    saved = asdict(current)
    current.update(changes)
    try:
        yield current
    finally:
        current.update(saved)
