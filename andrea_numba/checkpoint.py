"""Checkpoints: a folder that holds everything needed to go on or to generate.

`checkpoint_files` says what lies where; the format and what is guaranteed are described in RUNS.md.
Nothing is pickled; a file is read only after its names, dtypes and shapes were compared with the
config, so a foreign file costs one line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import args, bounded_json, tensor_files, tokenizers
from . import checkpoint_files as files
from .checkpoint_files import SaveFailed, find
from .config import ModelConfig, TrainConfig, check_train
from .errors import UserError
from .metrics import byte_size
from .parameters import ParameterTable

__all__ = ["Checkpoint", "SaveFailed", "check_space", "check_tokenizer", "find", "load",
           "mark_best", "newest", "read_moments", "run_folder", "save"]

MOMENTS = ("m.", "v.")  # what precedes the names in the optimizer's file
_BESIDE_TENSORS = 1 << 20  # bytes of a checkpoint, ample for all but giant vocabularies


@dataclass
class Checkpoint:
    """A loaded checkpoint. `weights` is flat float32 [table.size]; `tokenizer` is None only for a
    model of another format that names none."""

    path: Path
    step: int
    config: TrainConfig
    tokenizer: tokenizers.Tokenizer | None
    weights: np.ndarray
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> ModelConfig:
        return self.config.model


def save(run: Path, step: int, config: TrainConfig, tokenizer, table: ParameterTable,
         weights: np.ndarray, m: np.ndarray, v: np.ndarray, state: dict[str, Any],
         best: bool = False) -> Path:
    """Write a checkpoint of `step`, then remove the ones it replaces; returns its folder.

    `weights`, `m` and `v` are flat float32 [table.size]. `state` is JSON without values that are
    not finite: what training needs beyond arrays (loader position, averages, fingerprint). With
    `best` this checkpoint becomes the best one; that and the `config.run.keep` newest are kept.
    Raises SaveFailed; the checkpoints that were there are whole then.
    """
    metadata = _metadata(step, config, tokenizer, state)
    moments = {prefix + name: tensor for prefix, flat in zip(MOMENTS, (m, v), strict=True)
               for name, tensor in table.unpadded(flat).items()}
    contents = {files.METADATA: [metadata],
                files.MODEL: tensor_files.encode(table.unpadded(weights)),
                files.OPTIMIZER: tensor_files.encode(moments)}
    try:
        files.make_folders(run)
        check_space(run, table)
        folder = files.write_checkpoint(run, step, contents)
        files.mark(run, folder, best)
    except OSError as error:
        raise SaveFailed(f"cannot write a checkpoint to {run / 'checkpoints'}: "
                         f"{error.strerror or error}") from None
    files.rotate(run, folder, config.run.keep)
    return folder


def _metadata(step: int, config: TrainConfig, tokenizer, state: dict[str, Any]) -> bytes:
    """checkpoint.json; ValueError for what could not be read back."""
    metadata = json.dumps({"format": files.FORMAT, "version": files.FORMAT_VERSION, "step": step,
                           "config": args.to_dict(config), "tokenizer": tokenizer.to_dict(),
                           "state": state}, indent=1, ensure_ascii=False)
    # What UTF-8 cannot hold, as in a file's name, becomes an escape of JSON.
    raw = metadata.encode("utf-8", "backslashreplace")
    bounded_json.loads(raw)
    return raw


def check_tokenizer(config: TrainConfig, tokenizer) -> None:
    """UserError for a tokenizer too large for a checkpoint."""
    try:
        _metadata(0, config, tokenizer, {})
    except ValueError as error:
        raise UserError(f"the {tokenizer.name} tokenizer of {tokenizer.vocab_size:,} ids does not "
                        f"fit into a checkpoint: {error}; take one with fewer ids") from None


def mark_best(run: Path, step: int) -> None:
    """Make the checkpoint of `step` the best one; SaveFailed when that cannot be written."""
    found = files.of_step(run, step)
    if not found:
        raise SaveFailed(f"{run} has no checkpoint of step {step} to mark as the best")
    try:
        files.point(run, "best", found[0])
    except OSError as error:
        raise SaveFailed(f"cannot mark the best checkpoint in {run}: "
                         f"{error.strerror or error}") from None


def check_space(folder: Path, table: ParameterTable) -> None:
    """SaveFailed when the disk of `folder`, which need not exist, has no room for one more
    checkpoint beside those that are there."""
    needed = 4 * 3 * table.count + _BESIDE_TENSORS
    existing = files.nearest_existing(folder).absolute()
    try:
        free = shutil.disk_usage(existing).free
    except OSError as error:
        raise SaveFailed(f"cannot look for free space in {existing}: {error.strerror}") from None
    if free < needed:
        raise SaveFailed(f"{existing} has {byte_size(free)} free, a checkpoint beside the older "
                         f"ones takes {byte_size(needed)}; make room, or choose another folder")


def newest(path: str, say: Callable[[str], None]) -> Checkpoint:
    """The newest whole checkpoint meant by `path` (as in `find`).

    Of a run, damaged and incomplete ones are passed over, each with a line to `say`. UserError
    when none is whole, or when one is of a later version of this software.
    """
    failed: dict[Path, UserError] = {}
    # Looked for again each time: a run that goes on meanwhile replaces its checkpoints.
    while rest := [folder for folder in files.meant(path) if folder not in failed]:
        try:
            loaded = load(rest[0])
        except files.NewerFormat:
            raise
        except UserError as error:
            failed[rest[0]] = error
            continue
        for folder, error in failed.items():
            if folder.exists():
                say(f"warning: a checkpoint is passed over: {error}")
        return loaded
    first, *others = failed.values()
    raise UserError(f"{first}{'; the older checkpoints are not whole either' * bool(others)}")


def load(path: Path) -> Checkpoint:
    """Read config, tokenizer and weights from a checkpoint folder, all of whose files are whole;
    UserError, in one line, for anything else."""
    file = path / files.METADATA
    metadata = files.read_metadata(path)
    digests = files.read_manifest(path)
    files.check_digests(path, digests, {files.METADATA})
    config = TrainConfig()
    try:
        step, state = metadata["step"], metadata["state"]
        args.apply(config, metadata["config"], str(file))
        check_train(config)
        tokenizer = tokenizers.tokenizer_from_dict(metadata["tokenizer"])
        if type(step) is not int or step < 0 or not isinstance(state, dict):
            raise TypeError("step or state has the wrong type")
        if config.model.vocab_size < tokenizer.vocab_size:
            raise ValueError(f"the model knows {config.model.vocab_size} ids, the tokenizer has "
                             f"{tokenizer.vocab_size}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {error!r}") from None
    table = ParameterTable(config.model)
    tensor_files.check(path / files.OPTIMIZER, table, MOMENTS)
    tensor_files.check(path / files.MODEL, table)
    files.check_digests(path, digests, {files.MODEL, files.OPTIMIZER})
    [weights] = tensor_files.read(path / files.MODEL, table)
    return Checkpoint(path, step, config, tokenizer, weights, state)


def run_folder(checkpoint: Checkpoint) -> Path:
    """The run that a checkpoint belongs to; UserError when it lies outside of one, or when what
    training needs beside the arrays is missing or damaged."""
    if checkpoint.path.parent.name != "checkpoints":
        raise UserError(f"{checkpoint.path} is a checkpoint without its run; --resume needs the "
                        "run's folder (with checkpoints/ in it)")
    state = checkpoint.state
    if not (isinstance(state.get("loader"), dict)
            and all(isinstance(state.get(name), str) for name in ("fingerprint", "run_id"))):
        raise UserError(f"{checkpoint.path / files.METADATA} is damaged: its training state is "
                        "not whole")
    return checkpoint.path.parent.parent


def read_moments(path: Path, table: ParameterTable) -> list[np.ndarray]:
    """Both AdamW moments, each flat [table.size], from a checkpoint folder that was loaded."""
    return tensor_files.read(path / files.OPTIMIZER, table, MOMENTS)
