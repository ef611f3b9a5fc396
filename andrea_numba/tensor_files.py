"""Safetensors files of float32 tensors: 8 bytes length of the header, the header in JSON, the data.

They are written here, so that what is written can be hashed on the way, and read by the library
`safetensors` after the header was compared with the one that is written for the same model: a
header that claims anything else is refused before it can cost memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from . import bounded_json
from .checkpoint_files import open_regular
from .errors import UserError
from .parameters import ParameterTable

_ENTRY = 160  # bytes that a tensor takes in a header at most, beside its name


def encode(tensors: Mapping[str, np.ndarray]) -> Iterator:
    """The bytes of a file with these tensors, in pieces; those of the data are views of them."""
    text = json.dumps(_header({name: tensor.shape for name, tensor in tensors.items()})).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield np.ascontiguousarray(tensor, "<f4")


def _header(shapes: Mapping[str, Sequence[int]]) -> dict[str, dict]:
    """What a file with tensors of these shapes says of them, one behind the other."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    return header


def check(file: Path, table: ParameterTable, prefixes: Sequence[str] = ("",)) -> None:
    """UserError unless `file` has, by its header and its length, exactly the tensors of the table,
    once for every prefix of their names."""
    of_no_size = np.broadcast_to(np.float32(0), table.size)
    shapes = {prefix + name: tensor.shape for prefix in prefixes
              for name, tensor in table.unpadded(of_no_size).items()}
    with open_regular(file) as stream:
        found = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        limit = sum(len(name) + _ENTRY for name in shapes)
        if length > min(found - 8, limit):
            raise UserError(f"{file} is not a checkpoint file, or not of this model: a header of "
                            f"{length} bytes is more than the {min(found, limit)} there can be")
        raw = stream.read(length)
    try:
        header = bounded_json.loads(raw)
    except ValueError as error:
        raise UserError(f"{file} is not a checkpoint file: its header is not JSON: "
                        f"{error}") from None
    if not isinstance(header, dict):
        raise UserError(f"{file} is not a checkpoint file: its header is not a JSON object")
    expected = _header(shapes)
    for name in sorted(header.keys() ^ expected.keys()):
        problem = "unknown" if name in header else "missing"
        raise UserError(f"{file}: tensor {name:.100} is {problem}")
    for name, entry in expected.items():
        if header[name] != entry:
            raise UserError(f"{file}: tensor {name} is {header[name]!s:.200}; expected {entry}")
    whole = 8 + length + entry["data_offsets"][1]
    if found != whole:
        raise UserError(f"{file} is not complete: expected {whole} bytes, found {found}")


def read(file: Path, table: ParameterTable, prefixes: Sequence[str] = ("",)) -> list[np.ndarray]:
    """A flat float32 array [table.size] for every prefix, from a file that passes `check`."""
    check(file, table, prefixes)
    arrays = [table.zeros() for _ in prefixes]
    try:
        with safe_open(file, framework="np", backend="pread") as tensors:
            for prefix, flat in zip(prefixes, arrays, strict=True):
                for name, view in table.unpadded(flat).items():
                    view[...] = tensors.get_tensor(prefix + name)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UserError(f"{file} is not a checkpoint file: {error}") from None
    return arrays
