"""Checkpoints: a folder that holds everything needed to go on or to generate.

    RUN/checkpoints/step-00000500/
        model.safetensors        weights by name, vocabulary padding removed
        optimizer.safetensors    both AdamW moments, names prefixed m. and v.
        checkpoint.json          format version, step, config, tokenizer, loader position, …

The folder is written under a temporary name beside its place, flushed to disk and renamed, so a
folder without the prefix `.` is complete. Nothing is pickled; a file is read only after its
names, dtypes and shapes were compared with the config, so a foreign file costs one line.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from . import args, tokenizers
from .config import ModelConfig, TrainConfig, check_train
from .errors import UserError
from .parameters import ParameterTable

FORMAT = "andrea-numba checkpoint"
FORMAT_VERSION = 1
METADATA = "checkpoint.json"
_OURS = re.compile(r"step-\d{8,}|\.step-\d{8,}\.\d+")  # complete, and left by a crash
MAX_METADATA_BYTES = 64 << 20  # a character vocabulary of all of Unicode is far below this


@dataclass
class Checkpoint:
    """A loaded checkpoint. `weights` is flat float32 [table.size]."""

    path: Path
    step: int
    config: TrainConfig
    tokenizer: tokenizers.Tokenizer
    weights: np.ndarray
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> ModelConfig:
        return self.config.model


def save(run: Path, step: int, config: TrainConfig, tokenizer, table: ParameterTable,
         weights: np.ndarray, m: np.ndarray, v: np.ndarray, state: dict[str, Any]) -> Path:
    """Write RUN/checkpoints/step-… and remove older ones once it is complete; returns its path.

    `state` is JSON: what training needs beyond arrays (loader position, averages, fingerprint).
    """
    parent = run / "checkpoints"
    parent.mkdir(parents=True, exist_ok=True)
    final = parent / f"step-{step:08d}"
    temporary = parent / f".step-{step:08d}.{os.getpid()}"
    metadata = {"format": FORMAT, "version": FORMAT_VERSION, "step": step,
                "config": args.to_dict(config), "tokenizer": tokenizer.to_dict(), "state": state}
    moments = {f"m.{name}": array for name, array in table.unpadded(m).items()}
    moments |= {f"v.{name}": array for name, array in table.unpadded(v).items()}
    temporary.mkdir()
    try:
        (temporary / METADATA).write_text(json.dumps(metadata, indent=1),
                                          encoding="utf-8")
        for name, tensors in (("model", table.unpadded(weights)), ("optimizer", moments)):
            save_file(tensors, temporary / f"{name}.safetensors")
            # The library makes files for their owner alone; these are as readable as any other.
            shutil.copymode(temporary / METADATA, temporary / f"{name}.safetensors")
        for file in (*temporary.iterdir(), temporary):
            _flush(file)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write a checkpoint to {parent}: {reason}") from None
    _flush(parent)
    for old in parent.iterdir():
        if old != final and _OURS.fullmatch(old.name):
            shutil.rmtree(old, ignore_errors=True)
    return final


def _flush(path: Path) -> None:
    """Ask the system to put a file's bytes, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    return sorted(p.parent for p in run.glob(f"checkpoints/step-*/{METADATA}"))


def find(path: str) -> Path:
    """The checkpoint folder meant by `path`: itself, a run's newest one, or "" for the newest of
    all runs below runs/. UserError when there is none."""
    if path:
        given = Path(path)
        if (given / METADATA).is_file():
            return given
        if not given.exists():
            raise UserError(f"{given.absolute()} does not exist; give a run or checkpoint folder")
        found = _complete(given) if given.is_dir() else []
        if not found:
            raise UserError(f"{given.absolute()} is not a checkpoint: it has no {METADATA}, "
                            "nor a folder checkpoints/ with one in it")
        return found[-1]
    newest = [found[-1] for run in Path("runs").glob("*") if (found := _complete(run))]
    if not newest:
        raise UserError(f"no checkpoint below {Path('runs').absolute()}; train one with "
                        "andrea-train, or give its folder")
    return max(newest, key=lambda folder: (folder / METADATA).stat().st_mtime)


def load(path: Path) -> Checkpoint:
    """Read config, tokenizer and weights from a checkpoint folder."""
    metadata = _read_metadata(path / METADATA)
    config = TrainConfig()
    try:
        step, state = metadata["step"], metadata["state"]
        args.apply(config, metadata["config"], str(path / METADATA))
        check_train(config)
        tokenizer = tokenizers.tokenizer_from_dict(metadata["tokenizer"])
        if type(step) is not int or step < 0 or not isinstance(state, dict):
            raise TypeError("step or state has the wrong type")
        if config.model.vocab_size < tokenizer.vocab_size:
            raise ValueError(f"the model knows {config.model.vocab_size} ids, the tokenizer has "
                             f"{tokenizer.vocab_size}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path / METADATA} is damaged: {error!r}") from None
    table = ParameterTable(config.model)
    weights = read_tensors(path / "model.safetensors", table)
    return Checkpoint(path, step, config, tokenizer, weights, state)


def run_folder(checkpoint: Checkpoint) -> Path:
    """The run that a checkpoint belongs to; UserError when it lies outside of one, or when what
    training needs beside the arrays is missing or damaged."""
    if checkpoint.path.parent.name != "checkpoints":
        raise UserError(f"{checkpoint.path} is a checkpoint without its run; --resume needs the "
                        "run's folder (with checkpoints/ in it)")
    state = checkpoint.state
    average = state.get("average")
    whole = (isinstance(state.get("loader"), dict) and isinstance(average, dict)
             and average.keys() == {"decay", "total", "weight"}
             and all(type(v) is float and math.isfinite(v) for v in average.values())
             and all(isinstance(state.get(name), str) for name in ("fingerprint", "run_id")))
    if not whole:
        raise UserError(f"{checkpoint.path / METADATA} is damaged: its training state is not whole")
    return checkpoint.path.parent.parent


def _read_metadata(file: Path) -> dict[str, Any]:
    if file.exists() and not file.is_file():
        raise UserError(f"{file} is not a regular file")
    try:
        size = file.stat().st_size
        if size > MAX_METADATA_BYTES:
            raise UserError(f"{file} is not a checkpoint: {size} bytes of metadata")
        metadata = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{file} is not a checkpoint: it is not JSON") from None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise UserError(f"{file} is not an {FORMAT}")
    version = metadata.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise UserError(f"{file} has format version {str(version)[:20]}; this program reads "
                        f"version {FORMAT_VERSION}")
    return metadata


def read_moments(path: Path, table: ParameterTable) -> tuple[np.ndarray, np.ndarray]:
    """Both AdamW moments, each flat [table.size], from a checkpoint folder."""
    file = path / "optimizer.safetensors"
    return read_tensors(file, table, "m.", copies=2), read_tensors(file, table, "v.", copies=2)


def read_tensors(file: Path, table: ParameterTable, prefix: str = "",
                 copies: int = 1) -> np.ndarray:
    """A flat array [table.size] from the tensors `prefix`+name of a safetensors file.

    `copies` is how many such sets the file holds. Its length is compared with what the config
    promises before anything is allocated.
    """
    _check_length(file, 4 * table.count * copies)
    flat = table.zeros()
    views = table.unpadded(flat)
    try:
        with safe_open(file, framework="np", backend="pread") as tensors:
            names = {name for name in tensors.keys() if name.startswith(prefix)}  # noqa: SIM118
            for name in sorted(names ^ {prefix + name for name in views}):
                problem = "unknown" if name in names else "missing"
                raise UserError(f"{file}: tensor {name} is {problem}")
            for name, view in views.items():
                part = tensors.get_slice(prefix + name)
                if part.get_dtype() != "F32" or tuple(part.get_shape()) != view.shape:
                    raise UserError(f"{file}: tensor {name} is {part.get_dtype()} "
                                    f"{part.get_shape()}; expected F32 {list(view.shape)}")
                view[...] = tensors.get_tensor(prefix + name)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UserError(f"{file} is not a checkpoint file: {error}") from None
    return flat


def _check_length(file: Path, data_bytes: int) -> None:
    """Refuse a safetensors file (8 bytes header length, header, data) of another length."""
    if file.exists() and not file.is_file():
        raise UserError(f"{file} is not a regular file")
    try:
        found = file.stat().st_size
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    if header > found:
        raise UserError(f"{file} is not a checkpoint file ({found} bytes, no safetensors header)")
    expected = 8 + header + data_bytes
    if found != expected:
        raise UserError(f"{file} is not complete, or of another model: expected {expected} bytes, "
                        f"found {found}")
