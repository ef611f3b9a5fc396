"""Models of all formats: opened as a checkpoint, and exported. FORMATS.md describes them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from . import checkpoint, huggingface, huggingface_tokenizer, legacy
from .checkpoint import Checkpoint
from .checkpoint_files import METADATA, flush, read_json, write_file
from .config import TrainConfig
from .errors import UserError
from .parameters import ParameterTable
from .tokenizers import tokenizer_from_dict


def open_model(path: str, say: Callable[[str], None]) -> Checkpoint:
    """The model at `path`: a run or checkpoint of ours ("" is the newest run), a GPT-2 folder of
    `transformers`, or a legacy ANDREA file. The last two may name no tokenizer: it is None then.

    `say` gets notices. Raises UserError for everything else, and for what is damaged.
    """
    given = Path(path)
    if os.path.isfile(path):
        return _open_legacy(given)
    if path and huggingface.is_folder(given) and not os.path.exists(given / METADATA):
        return huggingface.load(given)
    return checkpoint.newest(path, say)


def with_context(model: Checkpoint, context: int) -> Checkpoint:
    """The same model with a window of `context` tokens, at most as many as it has now."""
    if context > model.model.context:
        raise UserError(f"--context {context} is more than the {model.model.context} of "
                        f"{model.path}: it has learnt nothing about positions beyond; give less")
    config = dataclasses.replace(model.config)
    config.model = dataclasses.replace(model.model, context=context)
    table = ParameterTable(config.model)
    weights = table.zeros()
    longer = ParameterTable(model.model).unpadded(model.weights)
    for name, view in table.unpadded(weights).items():
        view[...] = longer[name][:len(view)]
    return dataclasses.replace(model, config=config, weights=weights)


def export(model: Checkpoint, path: str) -> list[str]:
    """Write the model for others: a legacy ANDREA file if `path` ends in .bin, otherwise a folder
    that `transformers` loads as GPT-2. Returns notices for the user.

    Raises UserError when there is something at `path`, when it cannot be written, and when the
    format cannot hold the model; nothing is left behind then.
    """
    target = Path(os.path.abspath(path))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--export {target} exists; give another name")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == legacy.SUFFIX:
            return _export_legacy(model, target)
        contents = huggingface.contents(model.model, model.weights, model.tokenizer)
        _write_folder(target, contents)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from None
    if model.tokenizer is None:
        return ["the model names no tokenizer: none is written"]
    if "tokenizer.json" not in contents:
        return ["transformers has no tokenizer that splits text as this one does: it is in "
                f"{huggingface_tokenizer.OURS} alone"]
    return []


def _write_folder(target: Path, contents: Mapping[str, Iterable]) -> None:
    """Write the files `contents`, name to pieces of bytes, as a folder that appears whole."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        for name, pieces in contents.items():
            write_file(temporary / name, pieces)
        flush(temporary)
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()  # it was empty
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _export_legacy(model: Checkpoint, target: Path) -> list[str]:
    if not (model.path / METADATA).is_file():
        raise UserError(f"{model.path} has no AdamW moments, which a legacy file holds; only a "
                        "checkpoint of andrea-train has them")
    arrays = [model.weights, *checkpoint.read_moments(model.path, ParameterTable(model.model))]
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        write_file(temporary, legacy.encode(model.model, model.step, arrays))
        os.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    _tokenizer_beside(target).write_text(json.dumps(model.tokenizer.to_dict()), encoding="utf-8")
    return [f"a legacy file holds no tokenizer: it is in {_tokenizer_beside(target)}"]


def _tokenizer_beside(file: Path) -> Path:
    return file.with_suffix(".tokenizer.json")


def _open_legacy(file: Path) -> Checkpoint:
    step, model, [weights] = legacy.read(file)
    beside = _tokenizer_beside(file)
    tokenizer = tokenizer_from_dict(read_json(beside)) if beside.exists() else None
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise UserError(f"{beside}: the tokenizer has {tokenizer.vocab_size} ids, the model knows "
                        f"{model.vocab_size}; they do not belong together")
    return Checkpoint(file, step, TrainConfig(model=model), tokenizer, weights)
