"""What is measured beside PyTorch, and how: both have warmed up, take turns, and each turn of the
one has a neighbour in time of the other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import args
from ..config import PRESETS, ModelConfig, TrainConfig
from ..program import say
from . import start
from .process import Failed, Worker

COLUMNS = ("figure", "unit", "ours", "ours_p20", "ours_p80", "peer", "theirs", "theirs_p20",
           "theirs_p80", "ratio", "tokens_per_second", "of_ceiling", "note")
GROUPS = ("train", "ops", "generate", "profile", "start", "sweep")
SWEEP = {"context": (128, 256, 512, 1024, 2048), "batch": (1, 2, 4, 8, 16),
         "width": (128, 256, 384, 768, 1536)}
EAGER: dict[str, dict[str, Any]] = {"eager": {}}
# For PyTorch: glibc is to keep freed memory. A step had 15,800 page faults, with this 2,200, and
# took a tenth less time of the processor (2 blocks of andrea-120m in fp32).
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
               "MALLOC_TOP_PAD_": str(1 << 26)}
AS_INSTALLED = "eager, as installed"  # without these settings
TURN = 0.1  # seconds of calls in a row, at least
ROUNDS, FEW_ROUNDS = (5, 25), (3, 3)  # turns of each process, at least and at most
SECONDS = 6.0  # for one figure, if that leaves the least number of rounds
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@dataclass(frozen=True)
class Figure:
    """Calls that ours.py and peer.py make, and PyTorch's ways to do the same, by their names.

    `peers` holds what is given to peer.py beside, or in the place of, what is given to ours.
    `stream` names the loop of ceilings.py that is timed beside them; `memory` asks for the peak.
    """

    name: str
    make: str
    given: Mapping[str, Any]
    peers: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: EAGER)
    stream: str = ""
    memory: bool = False


def shape(preset: str, quick: bool) -> dict[str, Any]:
    """The model of a preset with the byte tokenizer; one narrow block of it if `quick`."""
    config = TrainConfig()
    args.apply(config, PRESETS[preset], preset)
    model = asdict(config.model)
    model["vocab_size"] = model["vocab_size"] or 257
    return model | {"n_layer": 1} if quick else model


def figures(group: str, quick: bool) -> Iterator[Figure]:
    """The figures of a group that two processes measure."""
    nano, large = shape("nano", quick), shape("andrea-120m", quick)
    if group == "train":
        small = nano | {"d_model": 384, "n_head": 6, "n_layer": nano["n_layer"] * 3 // 2,
                        "context": 256}
        both = EAGER | ({"compiled": {"compiled": True}} if COMPILER and not quick else {})
        for name, model, batch, peers in (("nano", nano, 4, both), ("384/6/6", small, 8, both),
                                          ("andrea-120m", large, 1, EAGER)):
            for precision in ("fp32", "bf16"):
                given = {"model": model, "batch": batch, "precision": precision}
                yield Figure(f"training step, {name}, {precision}", "train", given, peers,
                             memory=True)
    if group == "ops":
        heads = {"B": 1, "T": 1024, "H": 12, "D": 64, "d": 768, "rows": 1024}
        both = EAGER | {AS_INSTALLED: {}}
        for name in ("forward", "backward"):
            yield Figure(f"attention {name}", "op",
                         {"op": "attention", "name": name, "case": heads}, both)
        yield Figure("softmax, cross-entropy and their gradient", "op",
                     {"op": "cross_entropy", "name": "backward",
                      "case": {"N": 1024, "V": 8576, "Vp": 8576}}, both)
    if group == "generate":
        full = {"fp32 weights": {"weights": "fp32"}}
        for weights in ("fp32", "bf16", "int8"):
            yield Figure(f"a token, {weights} weights", "decode",
                         {"model": large, "weights": weights},
                         {f"{weights} weights": {}} | full, stream="read")
            yield Figure(f"a token of each of 8 samples, {weights} weights", "decode",
                         {"model": large, "weights": weights, "samples": 8},
                         {f"{weights} weights": {}})
        yield Figure("a prompt of 1,000 tokens", "prefill", {"model": large, "length": 1000})
    if group == "sweep":
        base = ModelConfig(d_model=384, n_head=6, n_layer=1 if quick else 2, context=256,
                           vocab_size=2305)
        for axis, values in SWEEP.items():
            for value in values[:2] if quick else values:
                model, batch = asdict(base), 4
                if axis == "batch":
                    batch = value
                elif axis == "context":
                    model["context"] = value
                else:
                    model |= {"d_model": value, "n_head": value // 64}
                yield Figure(f"sweep, {axis} {value}", "train",
                             {"model": model, "batch": batch, "precision": "fp32"})


def rows(group: str, threads: int, quick: bool) -> Iterator[dict[str, Any]]:
    """The rows of a group, in the unit of each; what cannot be measured is said and left out."""
    if group == "start":
        yield from start.rows(threads, quick)
    elif group == "profile":
        yield from profile_rows(threads, quick)
    elif group == "sweep":  # its many points share two processes, and need fewer turns
        with processes(EAGER, threads) as workers:
            for figure in figures(group, quick):
                yield from measure(figure, *workers, FEW_ROUNDS)
    else:
        for figure in figures(group, quick):
            with processes(figure.peers, threads) as workers:
                yield from measure(figure, *workers, FEW_ROUNDS if quick else ROUNDS)


@contextlib.contextmanager
def processes(peers: Mapping[str, Any], threads: int) -> Iterator[tuple[Worker, dict]]:
    """Our process, and one for each way of PyTorch, if that is installed."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Worker("andrea_numba.bench.ours", threads))
        yield ours, {
            name: stack.enter_context(Worker("andrea_numba.bench.peer", threads,
                                             {} if name == AS_INSTALLED else KEEP_MEMORY))
            for name in (peers if importlib.util.find_spec("torch") else ())}


def measure(figure: Figure, ours: Worker, peers: Mapping[str, Worker],
            rounds: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """A row for each way of PyTorch, or one without it; and one each of the peak memory."""
    try:
        about = ours.make(figure.make, figure.given)
        turns = {"": Turn(ours)}
    except Failed as error:
        say(f"{figure.name}: {error}")
        return
    for name, worker in peers.items():
        try:
            worker.make(figure.make, {**figure.given, **figure.peers[name]})
            turns[name] = Turn(worker)
        except Failed as error:
            say(f"{figure.name}, PyTorch {name}: {error}")
    speeds = take_turns(turns, figure.stream, rounds)
    mine = turns.pop("").seconds
    row = {"figure": figure.name, "unit": "ms", **summary("ours", mine, 1e3)}
    if "tokens" in about:
        row["tokens_per_second"] = about["tokens"] / statistics.median(mine)
    if speeds:
        shares = [about["bytes"] / second / speed
                  for second, speed in zip(mine, speeds, strict=True)]
        row["of_ceiling"] = statistics.median(shares)
        row["note"] = f"{1e-9 * statistics.median(speeds):.1f} GB/s by {figure.stream}"
    for name, turn in turns.items():
        ratios = [theirs / second for theirs, second in zip(turn.seconds, mine, strict=True)]
        yield {**row, "peer": name, **summary("theirs", turn.seconds, 1e3),
               "ratio": statistics.median(ratios)}
    if not turns:
        yield row
    if figure.memory:
        yield from memory_rows(figure.name, ours, {n: peers[n] for n in turns})


def memory_rows(name: str, ours: Worker, peers: Mapping[str, Worker]) -> Iterator[dict[str, Any]]:
    """Most that each process ever held, its libraries included, but not those of a compiler."""
    mine = ours.ask("peak") / 2**20
    row = {"figure": f"peak memory, {name}", "unit": "MiB", "ours": mine}
    for peer, worker in peers.items():
        theirs = worker.ask("peak") / 2**20
        yield {**row, "peer": peer, "theirs": theirs, "ratio": theirs / mine}
    if not peers:
        yield row


class Turn:
    """A process that is ready, how many calls it makes in a turn, and their median each time."""

    def __init__(self, worker: Worker):
        self.worker, self.seconds = worker, []
        first, second = worker.time(1)[0], worker.time(1)[0]
        self.calls = max(1, round(TURN / min(first, second)))

    def take(self) -> None:
        if self.calls > 1:
            self.worker.time(1)  # others' data is in the caches, and the threads sleep
        self.seconds.append(statistics.median(self.worker.time(self.calls)))


def take_turns(turns: Mapping[str, Turn], stream: str, rounds: tuple[int, int]) -> list[float]:
    """Let all measure in rounds, every other one in reverse; bytes a second of each stream."""
    least, most = rounds
    speeds, end = [], time.monotonic() + SECONDS
    for index in range(most):
        if index >= least and time.monotonic() > end:
            break
        for name in list(turns)[:: -1 if index % 2 else 1]:
            turns[name].take()
            if stream and not name:  # in the same second as ours
                speeds.append(turns[name].worker.ask("stream", kind=stream))
    return speeds


def profile_rows(threads: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Where the time of a step of andrea-120m goes."""
    model = shape("andrea-120m", quick)
    with Worker("andrea_numba.bench.ours", threads) as ours:
        for precision in ("fp32", "bf16"):
            try:
                found = ours.ask("profile", model=model, batch=1, precision=precision,
                                 steps=1 if quick else 3)
            except Failed as error:
                say(f"profile, {precision}: {error}")
                continue
            whole = sum(part["seconds"] for part in found)
            for part in found:
                row = {"figure": f"profile, {precision}: {part['op']}", "unit": "ms",
                       "ours": 1e3 * part["seconds"],
                       "note": f"{part['seconds'] / whole:.1%} of the step"}
                if part["limit"]:
                    row["of_ceiling"] = part["least"] / part["seconds"]
                    row["note"] += f", bound by {part['limit']}"
                yield row


def summary(name: str, seconds: list[float], scale: float) -> dict[str, float]:
    """Median, and 20th and 80th percentile."""
    low, *_, high = statistics.quantiles(seconds, n=5)
    return {name: scale * statistics.median(seconds), f"{name}_p20": scale * low,
            f"{name}_p80": scale * high}
