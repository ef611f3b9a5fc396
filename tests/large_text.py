"""How much memory a large text takes: `python -m tests.large_text [MEGABYTES]` (default 2000).

Trains 20 steps of a tiny model on text of that size, in every form that text comes in, and prints
the largest resident size of each process. Needs about three times the size on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kernels.common.cache import cache_folder

ROOT = Path(__file__).resolve().parent.parent
LINE = b"the cat sat on the mat\n"
LIMIT = 300 << 20
MODEL = ["--d-model", "16", "--n-head", "2", "--n-layer", "1", "--context", "32", "--batch-size",
         "4", "--steps", "20", "--warmup", "0", "--sample-tokens", "0", "--device", "cpu",
         "--threads", "1", "--val-fraction", "0.0001"]


def _repeated(piece: bytes, size: int) -> Iterator[bytes]:
    block = piece * max(1, (1 << 20) // len(piece))
    for _ in range(-(-size // len(block))):
        yield block


def _long_lines(size: int) -> Iterator[bytes]:
    """JSON lines of 8 million characters, of the kind that takes most memory."""
    line = json.dumps({"text": "\N{CAT FACE}\ncat" * 1_350_000}, ensure_ascii=False) + "\n"
    return _repeated(line.encode(), size)


FORMS: dict[str, tuple[str, Callable[[int], Iterator[bytes]], tuple[str, ...]]] = {
    "text, byte": ("t.txt", lambda size: _repeated(LINE, size), ()),
    "text, char": ("t.txt", lambda size: _repeated(LINE, size), ("--tokenizer", "char")),
    "one line of text": ("t.txt", lambda size: _repeated("\N{CAT FACE}".encode(), size), ()),
    "short JSON lines": ("t.jsonl", lambda size: _repeated(
        json.dumps({"text": LINE.decode() * 20}).encode() + b"\n", size), ()),
    "long JSON lines": ("t.jsonl", _long_lines, ()),
}


def peak(form: str, size: int, folder: Path) -> int:
    """Largest resident size, in bytes, of a short training on `size` bytes of text, with kernels
    that are compiled. What is written into `folder` is not needed afterwards."""
    name, pieces, options = FORMS[form]
    with open(folder / name, "wb") as file:
        file.writelines(pieces(size))
    # Token ids go below the folder; compiled kernels are those of the other runs.
    own = folder / "cache" / "andrea-numba"
    own.mkdir(parents=True)
    (own / "jit").symlink_to(cache_folder().parent)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "bin" / "andrea-train"), name, "--out", "run", *MODEL,
         *options], cwd=folder, env={**os.environ, "ANDREA_CACHE_DIR": str(own.parent)},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    size = int(sys.argv[1] if len(sys.argv) > 1 else 2000) * 10**6
    with tempfile.TemporaryDirectory() as first:
        peak("text, byte", 10**6, Path(first))  # compiles the kernels
    worst = 0
    for form in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            found = peak(form, size, Path(folder))
        print(f"{form}: {size:,} bytes, {found / 2**20:.0f} MiB resident", flush=True)
        worst = max(worst, found)
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
