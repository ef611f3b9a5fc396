"""What saving survives: every call of the system that fails, kill -9 at any moment, a full disk.

`python -m tests.faults --kills 200` prints the figures; short forms are tests.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from andrea_numba import checkpoint
from andrea_numba.config import ModelConfig
from tests.stored import Stored

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "symlink",
         "close")
ROOT = Path(__file__).resolve().parents[1]
# Half a megabyte, so that a kill often comes between two pieces of a file.
MODEL = ModelConfig(d_model=64, n_head=2, n_layer=1, context=16, vocab_size=257)


class Faults:
    """Counts the calls of `os` that change files, and makes the one at `failing` fail, from 1 on;
    with `lasting` every one from there. Nothing is flushed to the disk: no power fails here."""

    def __init__(self, failing: int = 0, code: int = 0, lasting: bool = False):
        self.failing, self.code, self.lasting, self.count = failing, code, lasting, 0

    def __enter__(self) -> Faults:
        self._before = {name: getattr(os, name) for name in CALLS}
        for name, call in self._before.items():
            setattr(os, name, self._counted(name, call if name != "fsync" else lambda _: None))
        return self

    def __exit__(self, *exception) -> None:
        for name, call in self._before.items():
            setattr(os, name, call)

    def _counted(self, name: str, call):
        def counted(*arguments, **options):
            self.count += 1
            if self.count == self.failing or (self.lasting and self.count > self.failing > 0):
                if name == "close":  # what is open is closed all the same
                    call(*arguments, **options)
                raise OSError(self.code, os.strerror(self.code))
            return call(*arguments, **options)
        return counted


def newest_step(stored: Stored, run: Path) -> int:
    """The step of the newest whole checkpoint; asserts that its content is of that step alone."""
    return stored.check(checkpoint.newest(str(run), lambda text: None))


def best_step(stored: Stored, run: Path) -> int:
    return stored.check(checkpoint.newest(str(run / "best"), lambda text: None))


def inject(folder: Path, code: int, best: bool, lasting: bool) -> int:
    """Fail each call of one save in turn; asserts what must hold afterwards. Returns how many."""
    stored, before = Stored(keep=2), folder / "before"
    with Faults():
        for step in (1, 2, 3):
            stored.save(before, step, best=step == 1)
        for failing in range(1, 1000):
            run = folder / str(failing)
            shutil.copytree(before, run, symlinks=True)
            with Faults(failing, code, lasting) as faults:
                try:
                    stored.save(run, 4, best)
                    saved = True
                except checkpoint.SaveFailed as error:
                    assert "\n" not in str(error) and os.strerror(code) in str(error)
                    saved = False
            if faults.count < failing:
                return failing - 1
            assert newest_step(stored, run) in ((4,) if saved else (3, 4))
            assert best_step(stored, run) in ((4,) if saved and best else (1, 4))
            assert (run / "checkpoints/step-00000003").is_dir()
            _save_again(stored, run, best)
    raise AssertionError("a save never ended")


def _save_again(stored: Stored, run: Path, best: bool) -> None:
    """As a run that tries again, and goes on; asserts that nothing else is left."""
    stored.save(run, 4, best)
    stored.save(run, 5)
    assert newest_step(stored, run) == 5 and best_step(stored, run) == (4 if best else 1)
    left = sorted(p.name.partition(".")[0] for p in (run / "checkpoints").iterdir())
    assert left == [f"step-0000000{n}" for n in ((4, 5) if best else (1, 4, 5))]
    assert sorted(p.name for p in run.iterdir()) == ["best", "checkpoints", "latest"]


def write_for_ever(run: Path) -> None:
    """The child of `kill`: save on from the newest step, every third one as the best, and say
    each step when it is saved. As a resumed run, it marks a best one whose saving was cut short."""
    stored, step = Stored(MODEL, keep=2), 0
    if checkpoint.files.checkpoints(run):
        step = newest_step(stored, run)
        if step % 3 == 0:
            checkpoint.mark_best(run, step)
    while True:
        step += 1
        stored.save(run, step, best=step % 3 == 0)
        print(step, flush=True)


def kill(run: Path, kills: int, seed: int = 0) -> int:
    """kill -9 a saving process so many times; asserts after each that nothing said to be saved is
    lost. Returns the last step."""
    rng, stored, known, pause = random.Random(seed), Stored(MODEL, keep=2), 0, 0.01
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-m", "tests.faults", "--write", str(run)],
                                   cwd=ROOT, stdout=subprocess.PIPE, text=True)
        said = [int(process.stdout.readline())]  # nothing is said before the first is saved
        started = time.perf_counter()
        said.append(int(process.stdout.readline()))
        pause = max(pause / 2, time.perf_counter() - started)  # about what one save takes
        time.sleep(2 * pause * rng.random())
        process.kill()
        said += [int(line) for line in process.stdout if line.endswith("\n")]
        process.wait()
        process.stdout.close()
        assert said == list(range(said[0], said[-1] + 1)) and said[0] > known - 1
        known = said[-1]
        found = newest_step(stored, run)
        assert known <= found <= known + 1, f"{known} was saved, {found} is found"
        if (run / "best").exists():
            best = best_step(stored, run)
            assert best in (known // 3 * 3, found // 3 * 3)
        # Two newest, the best, one more that was to be removed, and one half written.
        assert len(list((run / "checkpoints").iterdir())) <= 5
    return known


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """An empty file system of so many bytes; OSError where it may not be mounted."""
    mount = folder / "disk"
    mount.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount],
                              capture_output=True, text=True)
    except FileNotFoundError:
        raise OSError(errno.ENOENT, "there is no program mount") from None
    if done.returncode:
        raise OSError(errno.EPERM, done.stderr.strip())
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


def fill(disk: Path, stored: Stored, checked: bool) -> int:
    """Save until the disk is full and then some more; returns how many saves failed.

    `checked` is whether free space is looked at before; without, the system itself says no, in
    the middle of a file.
    """
    run, failed = disk / "run", 0
    check_space = checkpoint.check_space
    if not checked:
        checkpoint.check_space = lambda *_: None
    try:
        for step in range(1, 20):
            stored.config.run.keep = 20  # more than fit
            try:
                stored.save(run, step)
                known = step
            except checkpoint.SaveFailed as error:
                assert "\n" not in str(error)
                failed += 1
            assert newest_step(stored, run) == known
        stored.config.run.keep = 1
        for old in checkpoint.files.checkpoints(run)[1:]:
            for file in old.iterdir():
                file.unlink()
        stored.save(run, 20)
        assert newest_step(stored, run) == 20
    finally:
        checkpoint.check_space = check_space
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write_for_ever(given.write)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for code in (errno.ENOSPC, errno.EIO):
            for best in (False, True):
                for lasting in (False, True):
                    place = folder / f"{code}-{best}-{lasting}"
                    count = inject(place, code, best, lasting)
                    print(f"{count} calls of a save made to fail with {errno.errorcode[code]}"
                          f"{' from there on' * lasting}{', a best one' * best}: none lost, "
                          "unreadable or wrong", flush=True)
        try:
            with small_disk(folder, "4m") as disk:
                for checked in (False, True):
                    failed = fill(disk / str(checked), Stored(MODEL), checked)
                    print(f"{failed} saves on a full disk{', checked before' * checked}: none "
                          "lost, unreadable or wrong", flush=True)
        except OSError as error:
            print(f"no full disk: {error.strerror}", flush=True)
        started = time.perf_counter()
        steps = kill(folder / "killed", given.kills)
        print(f"{given.kills} kills in {steps} saves, {time.perf_counter() - started:.0f} s: none "
              "lost, unreadable or wrong")


if __name__ == "__main__":
    main()
