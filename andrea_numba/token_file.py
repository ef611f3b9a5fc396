"""Token files: ids on disk, read through a memory map. The format is described in data/README.md.

    offset 0   8 bytes  magic "ANDREATK"
           8   uint32   format version, 1
          12   uint32   bytes per id: 2 up to a vocabulary of 65,536, else 4
          16   uint64   vocabulary size
          24   uint64   number of ids
          32   uint64   number of UTF-8 bytes of the text behind them
          40   uint64   number of characters of that text
          48   uint64   length of the metadata, a JSON object in UTF-8
          56   uint64   offset of the first id, a multiple of 64
          64   the metadata, then zeros up to the first id, then the ids; all little-endian

Among the metadata is `crc32`, of the bytes of all ids, as 8 hex digits.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .errors import UserError

MAGIC = b"ANDREATK"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQQQQQ")
_ALIGNMENT = 64
_MAX_METADATA = 1 << 26
_MAX_VOCABULARY = 1 << 31  # ids are int32 in the model
_READ_IDS = 1 << 20
# Pages of a map count as this process's memory until they are given back. Files up to this size
# are left to themselves; larger ones give their pages back after every read.
_KEPT_BYTES = 1 << 26


def id_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16 where every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class Tokens:
    """Some ids of a token file: `len`, slices and integer-array indexing, as of a 1-D array.

    A part is again a `Tokens` if made by `part`, and an array if made by indexing. Reading never
    makes the process's resident memory grow with the file.
    """

    def __init__(self, array: np.ndarray, mapping: mmap.mmap | None = None):
        self._array = array
        self._mapping = mapping

    @property
    def dtype(self) -> np.dtype:
        return self._array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key):
        read = self._array[key]
        if isinstance(key, slice):
            read = read.copy()  # a view would bring the pages back after they were given up
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
        return read

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self._array, dtype=dtype)

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(self._array[start:stop], self._mapping)

    def chunks(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), _READ_IDS):
            yield self[start:start + _READ_IDS]


class TokenFile:
    """An open token file: `tokens`, and what its header says.

    `n_bytes` and `n_characters` measure the text behind the ids; `metadata` is any JSON object,
    of which `{"tokenizer": ...}` is understood by `data.load_token_file`.
    """

    def __init__(self, path: Path, vocab_size: int, n_tokens: int, n_bytes: int,
                 n_characters: int, metadata: dict[str, Any], data_offset: int):
        self.path = path
        self.vocab_size = vocab_size
        self.n_tokens = n_tokens
        self.n_bytes = n_bytes
        self.n_characters = n_characters
        self.metadata = metadata
        self.dtype = id_dtype(vocab_size)
        self._data_offset = data_offset
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        array = np.frombuffer(mapping, self.dtype, n_tokens, data_offset)
        gives_back = array.nbytes > _KEPT_BYTES and hasattr(mmap, "MADV_DONTNEED")
        self.tokens = Tokens(array, mapping if gives_back else None)

    def offset_of(self, index: int) -> int:
        """The place in the file, in bytes, of the id at `index`."""
        return self._data_offset + int(index) * self.dtype.itemsize

    @classmethod
    def open(cls, path: str | Path) -> TokenFile:
        """Check header, length and every id (once, in chunks) and map the file.

        Raises UserError, in one line, for a file that is missing, foreign, of another version,
        shorter or longer than its header says, or holds ids outside its vocabulary or other ids
        than were written.
        """
        path = Path(path)
        try:
            with open(path, "rb") as file:
                header = _read_header(path, file)
                _check_ids(path, file, header, header["metadata"].pop("crc32", None))
            return cls(path, **header)
        except OSError as error:
            raise UserError(f"cannot read token file {path.absolute()}: "
                            f"{error.strerror}") from None

    @classmethod
    def write(cls, path: str | Path, chunks: Iterable[np.ndarray], vocab_size: int,
              n_bytes: int, n_characters: int, metadata: dict[str, Any] | None = None) -> None:
        """Write ids, given as chunks, under a temporary name and rename when complete.

        Raises ValueError for an id outside the vocabulary, OSError as the system does.
        """
        path = Path(path)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "xb") as file:
                writer = TokenWriter(file, vocab_size, n_bytes, n_characters, metadata)
                for ids in chunks:
                    writer.append(ids)
                writer.complete()
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


class TokenWriter:
    """Puts ids into an open binary file, which is a token file when `complete` has been called.

    `n_tokens` ids of the checksum `crc32` have been written.
    """

    def __init__(self, file: BinaryIO, vocab_size: int, n_bytes: int, n_characters: int,
                 metadata: dict[str, Any] | None = None):
        self._file, self._vocab_size, self._dtype = file, vocab_size, id_dtype(vocab_size)
        self._n_bytes, self._n_characters, self._metadata = n_bytes, n_characters, metadata
        self._metadata_length = len(_with_checksum(metadata, 0))  # whatever the checksum
        self._offset = -(-(_HEADER.size + self._metadata_length) // _ALIGNMENT) * _ALIGNMENT
        self.n_tokens = self.crc32 = 0
        file.seek(self._offset)

    def keep(self, n_tokens: int, crc32: int) -> bool:
        """Go on behind the first `n_tokens` ids that the file holds, what follows being dropped;
        False, and nothing done, if it does not hold so many of that checksum."""
        self._file.seek(self._offset)
        left, found = n_tokens * self._dtype.itemsize, 0
        while raw := self._file.read(min(left, _READ_IDS)):
            found = zlib.crc32(raw, found)
            left -= len(raw)
        if left or found != crc32:
            return False
        self._file.truncate(self._offset + n_tokens * self._dtype.itemsize)
        self._file.seek(0, os.SEEK_END)
        self.n_tokens, self.crc32 = n_tokens, crc32
        return True

    def append(self, ids: np.ndarray) -> None:
        """Write more ids; ValueError for one outside the vocabulary."""
        ids = np.asarray(ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab_size):
            raise ValueError(f"ids from {ids.min()} to {ids.max()} in a vocabulary of "
                             f"{self._vocab_size}")
        raw = ids.astype(self._dtype).tobytes()
        self.crc32 = zlib.crc32(raw, self.crc32)
        self._file.write(raw)
        self.n_tokens += ids.size

    def complete(self) -> None:
        """Write what stands before the ids."""
        self._file.seek(0)
        self._file.write(_HEADER.pack(MAGIC, VERSION, self._dtype.itemsize, self._vocab_size,
                                      self.n_tokens, self._n_bytes, self._n_characters,
                                      self._metadata_length, self._offset))
        self._file.write(_with_checksum(self._metadata, self.crc32))
        self._file.write(bytes(self._offset - self._file.tell()))


def is_token_file(path: str | Path) -> bool:
    """Whether the file begins as token files do; False for anything that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _read_header(path: Path, file) -> dict[str, Any]:
    raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size or raw[:len(MAGIC)] != MAGIC:
        raise UserError(f"{path} is not a token file: it does not begin with {MAGIC.decode()} and "
                        "a header; make one with data/prepare.py, or give the text itself")
    (_, version, width, vocab_size, n_tokens, n_bytes, n_characters, metadata_length,
     data_offset) = _HEADER.unpack(raw)
    if version != VERSION:
        raise UserError(f"token file {path} has format version {version}, this program reads "
                        f"version {VERSION}; make it again with data/prepare.py")
    if not 0 < vocab_size <= _MAX_VOCABULARY or width != id_dtype(vocab_size).itemsize:
        raise UserError(f"token file {path} is damaged: a vocabulary of {vocab_size} in {width} "
                        "bytes per id; make it again with data/prepare.py")
    if metadata_length > min(_MAX_METADATA, data_offset - _HEADER.size) \
            or data_offset % _ALIGNMENT:
        raise UserError(f"token file {path} is damaged: {metadata_length} bytes of metadata "
                        f"before offset {data_offset}; make it again with data/prepare.py")
    expected, size = data_offset + n_tokens * width, os.fstat(file.fileno()).st_size
    if size != expected:
        raise UserError(f"token file {path} is {'cut short' if size < expected else 'too long'}: "
                        f"{size} bytes, its header promises {expected} ({n_tokens} ids of {width} "
                        "bytes); make it again with data/prepare.py")
    if n_tokens == 0:
        raise UserError(f"token file {path} holds no tokens")
    try:
        metadata = json.loads(file.read(metadata_length))
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise UserError(f"token file {path} is damaged: its metadata are not a JSON object; make "
                        "it again with data/prepare.py")
    return {"vocab_size": vocab_size, "n_tokens": n_tokens, "n_bytes": n_bytes,
            "n_characters": n_characters, "metadata": metadata, "data_offset": data_offset}


def _with_checksum(metadata: dict[str, Any] | None, crc32: int) -> bytes:
    """The metadata as they are written; their length does not depend on the checksum."""
    return json.dumps({**(metadata or {}), "crc32": f"{crc32:08x}"}).encode("utf-8")


def _check_ids(path: Path, file, header: dict[str, Any], checksum: str | None) -> None:
    vocab_size, dtype = header["vocab_size"], id_dtype(header["vocab_size"])
    file.seek(header["data_offset"])
    position = crc32 = 0
    while (ids := np.frombuffer(file.read(_READ_IDS * dtype.itemsize), dtype)).size:
        crc32 = zlib.crc32(ids, crc32)
        if ids.max() >= vocab_size:
            at = int(np.argmax(ids >= vocab_size))
            raise UserError(f"token file {path}: id {ids[at]} at position {position + at} is "
                            f"outside its vocabulary, 0 to {vocab_size - 1}; make it again with "
                            "data/prepare.py")
        position += ids.size
    if checksum not in (None, f"{crc32:08x}"):
        raise UserError(f"token file {path} is damaged: its ids have the checksum {crc32:08x}, "
                        f"its metadata say {checksum!r:.20}; make it again with data/prepare.py")
