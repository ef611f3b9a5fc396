"""Where a run speaks: lines or a progress bar on stderr, and one JSON object an event in a file.

Events: run.start, run.loss, run.eval, run.sample, run.checkpoint, run.end; each has `event`,
`run_id`, `step` and `ts` (seconds since 1970). What is not finite is null; run.loss of an update
that was left out has `skipped`.
"""

from __future__ import annotations

import contextlib
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
        if self._bar is None:
            say(text)
            return
        with contextlib.suppress(OSError):  # a terminal that was closed
            self._bar.write(text, file=sys.stderr)

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
    """Appends events to a JSONL file, each at once.

    What a full disk does not take is written later, and said once: training goes on.
    """

    def __init__(self, path: Path, run_id: str, last_step: int | None = None):
        """`last_step`: on resume, later events of the interrupted run are dropped first."""
        self._run_id = run_id
        if last_step is not None and path.exists():
            _truncate(path, run_id, last_step)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def write(self, event: str, step: int, **values: Any) -> None:
        record = {"event": event, "run_id": self._run_id, "step": step, "ts": time.time()}
        record |= {name: _json_safe(value) for name, value in values.items()}
        late = bool(self._unwritten)
        self._unwritten += json.dumps(record).encode() + b"\n"
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten):]
        except OSError as error:
            if not late:
                say(f"warning: {self._file.name}: {error.strerror}; what is missing in it is "
                    "written as soon as that is possible")

    def close(self) -> None:
        self._file.close()


def _truncate(path: Path, run_id: str, last_step: int) -> None:
    """Drop the events of a run after `last_step`, and a last line that was cut short by a crash;
    every other line stays as it is. The file is replaced as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with path.open("rb") as old, temporary.open("wb") as new:
            for line in old:
                record = _record(line)
                of_run = record is not None and record["run_id"] == run_id
                if line.endswith(b"\n") and not (of_run and record["step"] > last_step):
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _json_safe(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _record(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None for a line that is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    ours = (isinstance(record, dict) and record.keys() >= {"event", "run_id", "step"}
            and type(record["step"]) is int)
    return record if ours else None


def read_events(path: Path, event: str) -> list[dict[str, Any]]:
    """All whole records of one kind from a log file."""
    with path.open("rb") as lines:  # bytes: a sample's text may hold other separators
        records = [_record(line) for line in lines]
    return [record for record in records if record and record["event"] == event]
