"""Where a run speaks: lines or a progress bar on stderr, and one JSON object an event in a file.

Events: run.start, run.loss, run.eval, run.sample, run.checkpoint, run.end; each has `event`,
`run_id`, `step` and `ts` (seconds since 1970).
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .program import say


class Console:
    """Talk on stderr: plain lines, and on a terminal a progress bar below them."""

    def __init__(self, steps: int = 0, initial: int = 0):
        self._bar = None
        if steps and sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=initial, unit="step", file=sys.stderr,
                             dynamic_ncols=True, leave=False)

    def line(self, text: str) -> None:
        """One line, or several."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            say(text)

    def step(self, text: str = "") -> None:
        """After every step: move the bar, and leave a line if there is one."""
        if self._bar is not None:
            self._bar.update()
        if text:
            self.line(text)

    def close(self) -> None:
        """Take the bar away; lines can still be written."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class EventLog:
    """Appends events to a JSONL file, each flushed at once."""

    def __init__(self, path: Path, run_id: str, last_step: int | None = None):
        """`last_step`: on resume, later events of the interrupted run are dropped first."""
        self._run_id = run_id
        if last_step is not None and path.exists():
            kept = [line for line in _lines(path) if _step_of(line) <= last_step]
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: str, step: int, **values: Any) -> None:
        record = {"event": event, "run_id": self._run_id, "step": step, "ts": time.time()}
        record |= {name: _json_safe(value) for name, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _json_safe(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    """The step of one event line; infinite for a line cut short by a crash."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if type(step) is int else math.inf


def read_events(path: Path, event: str) -> list[dict[str, Any]]:
    """All whole records of one kind from a log file."""
    records = (json.loads(line) for line in _lines(path) if _step_of(line) < math.inf)
    return [record for record in records if record["event"] == event]


def _lines(path: Path) -> list[str]:
    """Split at line feeds alone: a sample's text may hold other separators."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")
