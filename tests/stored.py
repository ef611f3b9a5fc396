"""Checkpoints made without training: their arrays and their state follow from run and step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

from andrea_numba import checkpoint, checkpoint_files
from andrea_numba.config import ModelConfig, TrainConfig
from andrea_numba.parameters import ParameterTable
from andrea_numba.tokenizers import build_tokenizer

SMALL = ModelConfig(d_model=8, n_head=2, n_layer=1, context=8, vocab_size=257)
TOKENIZER = build_tokenizer("byte", [], 1)


class Stored:
    """Saves and checks checkpoints of one model."""

    def __init__(self, model: ModelConfig = SMALL, keep: int = 1):
        self.config = TrainConfig(model=dataclasses.replace(model))  # a test may change it
        self.config.run.keep = keep
        self.table = ParameterTable(model)
        # Weights and both moments; the padding of the flat arrays is not stored.
        self._base = [self.table.zeros() for _ in range(3)]
        for which, flat in enumerate(self._base):
            for index, tensor in enumerate(self.table.unpadded(flat).values()):
                tensor.reshape(-1)[...] = np.arange(tensor.size) % 1000 + which + 10 * index

    def arrays(self, step: int) -> list[np.ndarray]:
        """Weights and moments of a step, each flat [table.size]."""
        return [np.where(flat != 0, flat + np.float32(step), flat) for flat in self._base]

    def save(self, run: Path, step: int, best: bool = False) -> Path:
        return checkpoint.save(run, step, self.config, TOKENIZER, self.table, *self.arrays(step),
                               {"step": step}, best)

    def check(self, loaded: checkpoint.Checkpoint, step: int | None = None) -> int:
        """Assert that everything in `loaded` is of one step, and of `step` if given."""
        moments = checkpoint.read_moments(loaded.path, self.table)
        expected = self.arrays(loaded.step)
        for found, right in zip([loaded.weights, *moments], expected, strict=True):
            assert found.tobytes() == right.tobytes(), f"{loaded.path}: another step's arrays"
        assert loaded.state == {"step": loaded.step} and loaded.config == self.config
        assert step is None or loaded.step == step
        return loaded.step


def sign(folder: Path) -> None:
    """Make the manifest agree with files that a test has changed."""
    entries = {}
    for name in checkpoint_files.MEMBERS:
        with (folder / name).open("rb") as file:
            entries[name] = {"bytes": (folder / name).stat().st_size,
                             "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    (folder / checkpoint_files.MANIFEST).write_text(json.dumps({"files": entries}))
