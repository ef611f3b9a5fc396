"""Checkpoints that were changed at random, or made to harm: refused in one line, in little memory.

`python -m tests.fuzz_checkpoints --headers 10000` prints the figures; a short form is a test.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from andrea_numba import bounded_json, checkpoint, checkpoint_files
from andrea_numba.errors import UserError
from tests.stored import Stored, sign

MAX_GROWTH = 200 << 20  # bytes of resident memory
VALUES = [None, True, False, 0, 1, -1, 2, 256, 2**31, 2**63, 10**60, 1e308, 5e-324, -0.5, 1.0, "",
          "x", "../x", "F32", "F64", "a\0b", "\ud800", "😀" * 50, "x" * 100_000, [], {}, [[]],
          [0] * 1000, {"x": {}}, {"": 0}, [1, "x"], {"k" * 100_000: 1}]
SNIPPETS = [b"[" * 1000, b"{" * 9, b'{"a":' * 50, b"]", b"}", b",", b":", b'"', b"\\", b"\0",
            b"\xff", b"\xef\xbb\xbf", b"1e999999", b"9" * 5000, b"NaN", b"-Infinity", b"null",
            b"-", b"0" * 70, b'"\\ud800"', b'"\\u12', b" " * 5000]


def bombs(room: int, marks: int = bounded_json.MAX_MARKS) -> Iterator[bytes]:
    """JSON, or nearly so, of about `room` bytes or less that would take much memory or time; some
    with about as many `marks` as may be."""
    yield b"[" * room
    yield b"[" + b"[]," * (room // 3 - 1) + b"0]"
    yield b"[" + b"1.5," * (room // 4 - 1) + b"0]"
    yield b"{" + b'"":0,' * (room // 5 - 1) + b'"":0}'
    yield b'"\\' * (room // 2)
    yield b'["' + b"\\u00e9" * (room // 6 - 1) + b'"]'
    yield b'["' + b"a" * (room - 10) + "😀".encode() + b'"]'
    yield b'{"' + b"k" * (room - 10) + b'":0}'
    yield b"9" * room
    yield b" " * room
    yield b"[" + b"[]," * (marks // 3 - 1) + b"0]"
    yield b"{" + b",".join(b'"%d":{}' % i for i in range(bounded_json.MAX_KEYS)) + b"}"
    yield b"[" + b'"0123456789",' * (marks // 2 - 9) + b"0]"
    strings = marks // 2 - 9
    wide = b'"%b",' % ("😀" + "a" * (room // strings - 8)).encode()
    yield b"[" + wide * strings + b"0]"


class Fuzz:
    """Changes one file of a saved checkpoint at a time and reads it."""

    def __init__(self, folder: Path, seed: int = 0):
        self.rng = Random(seed)
        self.refused = self.read = 0
        self.folder = Stored().save(folder, 1)
        self._files = {path: path.read_bytes() for path in self.folder.iterdir()}
        self._try()  # what a first reading takes is no growth
        self._start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @property
    def growth(self) -> int:
        """Bytes by which the peak of resident memory has risen (kilobytes are Linux's unit)."""
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._start) << 10

    def json_of(self, name: str) -> bytes:
        """The file `name`, or the header of it."""
        raw = self._files[self.folder / name]
        return raw[8:8 + int.from_bytes(raw[:8], "little")] if "safetensors" in name else raw

    def give(self, name: str, text: bytes, length: int | None = None) -> None:
        """Read the checkpoint with `text` in the place of that JSON."""
        path = self.folder / name
        if "safetensors" in name:
            length = len(text) if length is None else length
            text = length.to_bytes(8, "little") + text + self._files[path][-64:]
        path.write_bytes(text)
        if name != checkpoint_files.MANIFEST:
            sign(self.folder)
        self._try()
        for changed, before in self._files.items():
            changed.write_bytes(before)

    def _try(self) -> None:
        try:
            checkpoint.load(self.folder)
            self.read += 1
        except UserError as error:
            assert "\n" not in str(error), error
            self.refused += 1

    def one(self) -> None:
        """One random change."""
        name = self.rng.choice(sorted(path.name for path in self._files))
        change = self.rng.choice([_change_bytes, _change_value])
        text = self.json_of(name)
        for _ in range(self.rng.choice([1, 1, 1, 4])):
            text = change(self.rng, text)
        length = self.rng.choice([None] * 9 + [0, 1, 7, 2**31, 2**60, 2**64 - 1])
        self.give(name, text, length)

    def bombs(self) -> None:
        """Files as long as JSON may be, and settings that hold such things."""
        for bomb in bombs(bounded_json.MAX_BYTES):
            for path in self._files:
                self.give(path.name, bomb)
        metadata = json.loads(self.json_of(checkpoint_files.METADATA))
        for place in ("config", "tokenizer", "state", "step"):
            before, after = json.dumps({**metadata, place: "HERE"}).encode().split(b'"HERE"')
            for bomb in bombs(bounded_json.MAX_BYTES - 9000):
                for inner in (bomb, b'{"run":%b}' % bomb, b'{"data":{"data":[%b]}}' % bomb):
                    self.give(checkpoint_files.METADATA, before + inner + after)


def _change_bytes(rng: Random, text: bytes) -> bytes:
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.choice([0, 0, 1, 1, 2, 10, 1000]))
    new = rng.choice([b"", text[start:end] * 2, rng.randbytes(1), rng.choice(SNIPPETS)])
    return text[:start] + new + text[end:]


def _change_value(rng: Random, text: bytes) -> bytes:
    """Put another value, or none, or one with another name, somewhere into the JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    root = [value]
    parent, key = root, 0
    while isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.8:
        parent = parent[key]
        key = rng.choice(sorted(parent) if isinstance(parent, dict) else range(len(parent)))
    action: Callable[[], Any] = rng.choice([
        lambda: parent.__setitem__(key, copy.deepcopy(rng.choice(VALUES))),
        lambda: parent.pop(key),
        lambda: parent.update({rng.choice(["", "x", "../x", "wte"]): parent.pop(key)})
        if isinstance(parent, dict) else parent.append(parent[key])])
    action()
    return json.dumps(root[0] if root else None).encode()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_checkpoints", description=__doc__)
    parser.add_argument("--headers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder), given.seed)
        started = time.perf_counter()
        for _ in range(given.headers):
            fuzz.one()
        fuzz.bombs()
        assert fuzz.growth < MAX_GROWTH, f"{fuzz.growth >> 20} MiB"
        print(f"{fuzz.refused} refused in one line, {fuzz.read} read, "
              f"{time.perf_counter() - started:.0f} s, resident memory grew by "
              f"{fuzz.growth >> 20} MiB")


if __name__ == "__main__":
    main()
