"""The files of checkpoints: what lies where in a run, how it is written, and whether it is whole.

    RUN/latest, RUN/best                 links to the newest and the best checkpoint
    RUN/checkpoints/step-00000500/
        checkpoint.json                  format version, step, settings, tokenizer, state
        model.safetensors
        optimizer.safetensors
        manifest.json                    length and sha256 of the other three; written last

A checkpoint is written below a hidden name, flushed to the disk and renamed. A second one of a step
gets the name step-00000500.1 and so on: nothing is removed before its successor is in place.
Which one is newer follows from the names alone, never from a clock. NumPy is not imported here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from . import bounded_json
from .errors import UserError

FORMAT = "andrea-numba checkpoint"
FORMAT_VERSION = 2
METADATA, MANIFEST = "checkpoint.json", "manifest.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
MEMBERS = {METADATA, MODEL, OPTIMIZER}
_NAME = re.compile(r"step-([0-9]{8,})(?:\.([0-9]+))?")
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # the last: Windows
_PIECE = 1 << 20  # bytes hashed and written at a time


class SaveFailed(UserError):
    """A checkpoint could not be written; the older ones are as they were."""


class NewerFormat(UserError):
    """A checkpoint that is not damaged, but of a later version of this software."""


def _age(folder: Path) -> tuple[int, int]:
    """Step and number of a checkpoint folder: the larger, the newer."""
    step, number = _NAME.fullmatch(folder.name).groups(default="0")
    return int(step), int(number)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first, whole or not."""
    found = [p for p in run.glob("checkpoints/step-*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=_age, reverse=True)


def of_step(run: Path, step: int) -> list[Path]:
    """The checkpoint folders of one step, newest first."""
    return [folder for folder in checkpoints(run) if _age(folder)[0] == step]


def meant(path: str) -> list[Path]:
    """The checkpoint folders meant by `path`, newest first and at least one: itself, those of a
    run, or for "" those of the newest of all runs below runs/. UserError when there is none."""
    if path:
        given = Path(path)
        if (given / METADATA).is_file():
            return [given.resolve() if given.is_symlink() else given]
        if not given.exists():
            raise UserError(f"{given.absolute()} does not exist; give a run or checkpoint folder")
        found = checkpoints(given)
        if not found:
            raise UserError(f"{given.absolute()} is not a checkpoint: it has no {METADATA}, "
                            "nor a folder checkpoints/ with one in it")
        return found
    runs = [found for run in Path("runs").glob("*") if (found := checkpoints(run))]
    if not runs:
        raise UserError(f"no checkpoint below {Path('runs').absolute()}; train one with "
                        "andrea-train, or give its folder")
    return max(runs, key=lambda found: found[0].stat().st_mtime)


def find(path: str) -> Path:
    """The newest of the checkpoint folders meant by `path`; see `meant`."""
    return meant(path)[0]


def read_config(path: str) -> dict[str, Any] | None:
    """The settings, by section, of the newest checkpoint meant by `path` whose checkpoint.json is
    whole; None when there is none. The arrays are not looked at."""
    with contextlib.suppress(UserError):
        for folder in meant(path):
            with contextlib.suppress(UserError):
                metadata = read_metadata(folder)
                check_digests(folder, read_manifest(folder), {METADATA})
                if isinstance(metadata.get("config"), dict):
                    return metadata["config"]
    return None


def nearest_existing(folder: Path) -> Path:
    """`folder`, or the first folder above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


# Reading

@contextlib.contextmanager
def open_regular(file: Path) -> Iterator[BinaryIO]:
    """A file open for reading; UserError for a link, a folder or a pipe, and when the system
    cannot open it or read from it."""
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise UserError(f"{file} is not a regular file")
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint; UserError for anything else."""
    with open_regular(file) as stream:
        raw = stream.read(bounded_json.MAX_BYTES + 1)
    try:
        value = bounded_json.loads(raw)
    except ValueError as error:
        raise UserError(f"{file} is not JSON that a checkpoint holds: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} is damaged: expected a JSON object")
    return value


def read_metadata(folder: Path) -> dict[str, Any]:
    """checkpoint.json of a checkpoint of this format version; NewerFormat for later ones."""
    file = folder / METADATA
    metadata = read_json(file)
    if metadata.get("format") != FORMAT:
        raise UserError(f"{file} is not an {FORMAT}")
    version = metadata.get("version")
    told = f"{file} has format version {version!r:.20}; this program reads version {FORMAT_VERSION}"
    if type(version) is int and version > FORMAT_VERSION:
        raise NewerFormat(f"{told}: it needs a newer andrea-numba")
    if type(version) is not int or version != FORMAT_VERSION:
        raise UserError(told)
    return metadata


def read_manifest(folder: Path) -> dict[str, str]:
    """Name to sha256 of every file of a checkpoint; UserError unless all have their length."""
    file = folder / MANIFEST
    entries = read_json(file).get("files")
    if not isinstance(entries, dict) or entries.keys() != MEMBERS:
        raise UserError(f"{file} is damaged: expected the files {', '.join(sorted(MEMBERS))}")
    digests = {}
    for name, entry in entries.items():
        said = entry if isinstance(entry, dict) else {}
        digests[name], expected = said.get("sha256"), said.get("bytes")
        with open_regular(folder / name) as stream:
            found = os.fstat(stream.fileno()).st_size
        if found != expected:
            raise UserError(f"{folder / name} is not complete, or of another save: expected "
                            f"{expected!r:.20} bytes, found {found}")
    return digests


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except UserError:
        return False
    return True


def check_digests(folder: Path, digests: Mapping[str, str], names: Iterable[str]) -> None:
    """Read the files `names`; UserError for one that is not what the manifest says."""
    for name in sorted(names):
        with open_regular(folder / name) as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != digests[name]:
            raise UserError(f"{folder / name} is damaged, or of another save: its sha256 is not "
                            f"the one in {MANIFEST}")


# Writing: OSError is the caller's to report

def write_checkpoint(run: Path, step: int, contents: Mapping[str, Iterable]) -> Path:
    """Write the files `contents` (name to pieces of bytes) as the newest checkpoint of `step`."""
    parent = run / "checkpoints"
    before = of_step(run, step)
    final = parent / (f"step-{step:08d}" + (f".{_age(before[0])[1] + 1}" if before else ""))
    temporary = parent / f".{final.name}"
    temporary.mkdir()
    try:
        entries = {name: write_file(temporary / name, pieces) for name, pieces in contents.items()}
        manifest = json.dumps({"files": entries}, indent=1).encode()
        write_file(temporary / MANIFEST, [manifest])
        flush(temporary)
        os.rename(temporary, final)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush(parent)
    return final


def write_file(file: Path, pieces: Iterable) -> dict[str, Any]:
    """Write a new file and put it on the disk; its length and sha256 as a manifest has them."""
    size, digest = 0, hashlib.sha256()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(file, flags, 0o666)
    try:
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                written = os.write(descriptor, rest[:_PIECE])
                digest.update(rest[:written])
                size += written
                rest = rest[written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": size, "sha256": digest.hexdigest()}


def flush(folder: Path) -> None:
    """Put the entries of a folder on the disk."""
    if os.name == "nt":  # cannot open folders, nor needs to
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(run: Path) -> None:
    """Make RUN/checkpoints, or clear it of what a crash has left there."""
    parent = run / "checkpoints"
    if not parent.exists():
        parent.mkdir(parents=True)
        flush(run)
        flush(run.parent)
    for left in parent.glob(".step-*"):
        if _NAME.fullmatch(left.name[1:]):
            shutil.rmtree(left, ignore_errors=True)


def point(run: Path, name: str, folder: Path) -> None:
    """Make RUN/name a relative link to a checkpoint; without links, a file with the same text."""
    target, temporary = f"checkpoints/{folder.name}", run / f".{name}"
    temporary.unlink(missing_ok=True)
    try:
        os.symlink(target, temporary)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        write_file(temporary, [target.encode()])
    os.replace(temporary, run / name)
    flush(run)


def pointed(run: Path, name: str) -> Path | None:
    """The checkpoint that `point` made RUN/name stand for; None when there is none."""
    link = run / name
    try:
        if link.is_symlink():
            target = os.readlink(link)
        else:
            with open_regular(link) as stream:
                target = stream.read(1000).decode()
    except (OSError, UserError, UnicodeDecodeError):
        return None
    folder = run / "checkpoints" / Path(target).name
    return folder if _NAME.fullmatch(folder.name) and folder.is_dir() else None


def mark(run: Path, folder: Path, best: bool) -> None:
    """Make `folder` RUN/latest, and RUN/best if it is, or replaces the best one of its step."""
    before = pointed(run, "best")
    if best or (before and _age(before)[0] == _age(folder)[0]):
        point(run, "best", folder)
    point(run, "latest", folder)


def rotate(run: Path, newest: Path, keep: int) -> None:
    """Remove checkpoints but for `newest`, the best one, and so many that `keep` remain beside.

    Those of later steps go too: the run has left that future by resuming at an earlier step.
    """
    step = _age(newest)[0]
    earlier = [f for f in checkpoints(run) if _age(f)[0] < step and _is_complete(f)]
    kept = {newest, *earlier[:keep - 1]}
    best = pointed(run, "best")
    if best and _age(best)[0] < step:
        kept.add(best)
    with contextlib.suppress(OSError):  # what stays is tried again by the next save
        for folder in set(checkpoints(run)) - kept:
            hidden = folder.with_name(f".{folder.name}")
            os.rename(folder, hidden)  # gone at once, never half there
            shutil.rmtree(hidden, ignore_errors=True)
        if best and best not in kept:
            (run / "best").unlink()
