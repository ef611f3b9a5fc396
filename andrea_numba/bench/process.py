"""Processes that have loaded and warmed up, and of which one at a time computes.

Two libraries in one process would fight for its threads, so each measurement lives in a process of
its own, here `python -m MODULE THREADS`, which is asked by lines of JSON and answers likewise:

    {"do": "make", "name": ..., "given": {...}}    prepare; what there is to say of a call
    {"do": "time", "calls": n}                     seconds of each of n calls
    {"do": "ask", "name": ..., "given": {...}}     the result of one function
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]


class Failed(Exception):
    """A worker's error, in one line."""


class Worker:
    """A process of its own that measures when it is asked to; a context manager ends it."""

    def __init__(self, module: str, threads: int, environment: Mapping[str, str] | None = None):
        """`environment` is added to ours, for this process."""
        self.module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(threads)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, **(environment or {})})

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def make(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare calls of `name`; what the worker says of one: tokens, bytes. Raises Failed."""
        return self._request(do="make", name=name, given=dict(given))

    def time(self, calls: int) -> list[float]:
        """Seconds of each of some calls in a row. Raises Failed."""
        return self._request(do="time", calls=calls)

    def ask(self, name: str, **given: Any) -> Any:
        """What the worker's function `name` gives. Raises Failed."""
        return self._request(do="ask", name=name, given=given)

    def _request(self, **request: Any) -> Any:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:  # it is gone
            line = ""
        if not line:
            raise Failed(f"{self.module} ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["result"]


def serve(makers: Mapping[str, Callable[..., tuple[Call, dict]]],
          functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer the requests on stdin until it ends; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    call: Call = _nothing
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "make":
                call = _nothing  # free the memory of the last one before
                gc.collect()
                call, result = makers[request["name"]](**request["given"])
            elif request["do"] == "time":
                result = [timed(call) for _ in range(request["calls"])]
            else:
                result = functions[request["name"]](**request["given"])
            answer = {"result": result}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def timed(action: Call) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _nothing() -> None:
    pass
