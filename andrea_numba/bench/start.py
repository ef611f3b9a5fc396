"""What a user waits for at the start: help, the first step, the first token of a text."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..program import say
from .process import Failed

PROGRAMS = Path(__file__).resolve().parents[1]
REPEATS, QUICK_REPEATS = 5, 2
TRAIN = ("cli_train", "letters.txt", "--steps", "1", "--device", "cpu", "--sample-tokens", "0")
GENERATE = ("cli_generate", "run", "--prompt", "", "--max-tokens", "8", "--device", "cpu")


def rows(threads: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Seconds from the start of a process to what is waited for; no PyTorch beside."""
    from .compare import summary

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "letters.txt").write_text("abcdefgh " * 1000, encoding="utf-8")
        cache = {} if quick else {"ANDREA_CACHE_DIR": str(Path(folder, "cache"))}

        def seconds(arguments: tuple, until: Callable[[Any], bool], stream: str) -> float:
            return wait(arguments, threads, folder, cache, until, stream)

        def step(run: str) -> float:
            return seconds((*TRAIN, "--out", run), lambda line: line.startswith(b"step 1/"),
                           "stderr")

        def first_token() -> float:
            return seconds(GENERATE, bool, "stdout")

        def help_shown() -> float:
            return seconds(("cli_train", "--help"), bool, "stdout")

        repeats = range(QUICK_REPEATS if quick else REPEATS)
        try:
            if not quick:
                yield {"figure": "first training step of nano, nothing compiled", "unit": "s",
                       "ours": step("cold")}
            step("run")
            first_token()  # compiles what only it needs
            for name, action in (
                    ("first training step of nano", lambda i: step(f"warm{i}")),
                    ("first token from a checkpoint of nano", lambda i: first_token()),
                    ("andrea-train --help", lambda i: help_shown())):
                times = [action(i) for i in repeats]
                yield {"figure": name, "unit": "s", **summary("ours", times, 1.0)}
        except Failed as error:
            say(f"start: {error}")


def wait(arguments: tuple, threads: int, folder: str, environment: dict[str, str],
         until: Callable[[bytes], bool], stream: str) -> float:
    """Seconds from the start of a program to the first line of `stream` that is waited for.

    Raises Failed for a program that ends without it.
    """
    module, *rest = arguments
    if "--help" not in rest:
        rest += ["--threads", str(threads)]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", f"{PROGRAMS.name}.{module}", *rest], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROGRAMS.parent), **environment},
        **{name: subprocess.PIPE if name == stream else subprocess.DEVNULL
           for name in ("stdin", "stdout", "stderr")})
    output = getattr(process, stream)
    with process:
        lines = iter(lambda: output.read1(1 << 16), b"") if stream == "stdout" else output
        found = any(map(until, lines))
        elapsed = time.perf_counter() - started
        output.read()  # it may finish what it does
    if not found:
        raise Failed(f"{module} ended with exit code {process.returncode}")
    return elapsed
