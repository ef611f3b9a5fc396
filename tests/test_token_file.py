"""Token files: what is written is read, what is damaged is refused in one line."""

import random
import struct
import zlib

import numpy as np
import pytest

from andrea_numba import token_file
from andrea_numba.errors import UserError
from andrea_numba.token_file import TokenFile, Tokens, is_token_file


def write(path, ids, vocab_size, metadata=None):
    TokenFile.write(path, [np.asarray(ids)], vocab_size, 11, 7, metadata)
    return path


def refusal(path):
    with pytest.raises(UserError) as error:
        TokenFile.open(path)
    assert "\n" not in str(error.value) and path.name in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("ids", "vocab_size", "width"), [
    ([0, 65_535], 65_536, 2), ([65_536, 0], 65_537, 4), ([0], 1, 2), ([2**31 - 1], 2**31, 4)])
def test_ids_survive_in_the_width_they_need(tmp_path, ids, vocab_size, width):
    path = write(tmp_path / "t.tokens", ids, vocab_size, {"any": "thing"})
    read = TokenFile.open(path)
    assert read.tokens[:].tolist() == ids and read.tokens.dtype.itemsize == width
    assert (read.vocab_size, read.n_tokens) == (vocab_size, len(ids))
    assert (read.n_bytes, read.n_characters, read.metadata) == (11, 7, {"any": "thing"})
    assert is_token_file(path) and not is_token_file(tmp_path / "none")


def test_the_format_is_the_documented_one(tmp_path):
    path = write(tmp_path / "t.tokens", [1, 2, 3], 300)
    raw = path.read_bytes()
    header = struct.unpack_from("<8sIIQQQQQQ", raw)
    assert header == (b"ANDREATK", 1, 2, 300, 3, 11, 7, 21, 128)
    ids = bytes([1, 0, 2, 0, 3, 0])
    assert raw[64:85] == f'{{"crc32": "{zlib.crc32(ids):08x}"}}'.encode() and raw[128:] == ids


def test_chunks_are_written_one_after_another(tmp_path):
    path = tmp_path / "t.tokens"
    TokenFile.write(path, (np.arange(n) for n in (3, 0, 2)), 10, 0, 0)
    tokens = TokenFile.open(path).tokens
    assert tokens[:].tolist() == [0, 1, 2, 0, 1]
    part = tokens.part(1, 4)
    assert len(part) == 3 and part[np.array([[0, 2]])].tolist() == [[1, 0]] and part[1] == 2
    assert np.asarray(part).tolist() == [1, 2, 0] == np.concatenate([*part.chunks()]).tolist()


def test_nothing_is_left_behind_when_writing_fails(tmp_path):
    def chunks():
        yield np.arange(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TokenFile.write(tmp_path / "t.tokens", chunks(), 10, 0, 0)
    for wrong in (-1, 10):
        with pytest.raises(ValueError):
            write(tmp_path / "t.tokens", [wrong], 10)
    assert list(tmp_path.iterdir()) == []


def test_offsets_beyond_32_bits(tmp_path):
    wide = TokenFile.open(write(tmp_path / "t.tokens", [1], 70_000))
    assert wide.offset_of(3_000_000_000) == 12_000_000_000 + 128
    assert wide.offset_of(np.int32(2_000_000_000)) == 8_000_000_000 + 128


def test_large_files_give_their_pages_back(tmp_path, monkeypatch):
    monkeypatch.setattr(token_file, "_KEPT_BYTES", 0)
    given_back = []

    class Watched(token_file.mmap.mmap):
        def madvise(self, *arguments):
            given_back.append(arguments)
            return super().madvise(*arguments)

    monkeypatch.setattr(token_file.mmap, "mmap", Watched)
    ids = np.arange(100_000) % 1000
    tokens = TokenFile.open(write(tmp_path / "t.tokens", ids, 1000)).tokens.part(10, 90_000)
    assert np.array_equal(tokens[5:50_000], ids[15:50_010])
    assert np.array_equal(tokens[np.array([0, 80_000])], ids[[10, 80_010]])
    assert len(given_back) == 2


def test_damaged_files(tmp_path):
    path = write(tmp_path / "t.tokens", np.arange(1000), 1000, {"a": 1})
    good = path.read_bytes()

    def damaged(raw):
        path.write_bytes(raw)
        return refusal(path)

    def field(format, offset, value):
        raw = bytearray(good)
        struct.pack_into(format, raw, offset, value)
        return damaged(bytes(raw))

    assert "cut short" in damaged(good[:-1])
    assert "too long" in damaged(good + b"\0")
    assert "not a token file" in damaged(b"")
    assert "not a token file" in damaged(b"text " * 100)
    assert "version 2" in field("<I", 8, 2)
    assert "damaged" in field("<I", 12, 4)  # width
    assert "damaged" in field("<Q", 16, 0)  # vocabulary
    assert "id 999 at position 999" in field("<Q", 16, 999)
    assert "cut short" in field("<Q", 24, 2**63)  # count
    assert "damaged" in field("<Q", 48, 2**40)  # metadata
    assert "damaged" in field("<Q", 56, 3)  # offset of the ids
    assert "JSON" in damaged(good[:64] + b"[" + good[65:])
    assert "checksum" in damaged(good[:-2] + b"\0\0")
    assert "checksum" in damaged(good.replace(b"crc32\": \"", b"crc32\":\"X"))
    assert "cannot read" in refusal(tmp_path / "nope.tokens")
    assert "holds no tokens" in refusal(write(tmp_path / "e.tokens", [], 5))
    path.write_bytes(good)
    assert isinstance(TokenFile.open(path).tokens, Tokens)  # the control: undamaged


def test_ten_thousand_random_headers(tmp_path):
    random.seed(0)
    path = write(tmp_path / "t.tokens", np.arange(8), 8)
    good = path.read_bytes()
    refused = 0
    for trial in range(10_000):
        raw = bytearray(good)
        if trial % 2:  # a few bytes wrong
            for _ in range(random.randint(1, 4)):
                raw[random.randrange(64)] = random.randrange(256)
        else:  # a header of nonsense behind a right beginning
            raw[12:64] = random.randbytes(52)
        with open(path, "r+b") as file:
            file.write(raw[:64])
        try:
            TokenFile.open(path)
        except UserError:
            refused += 1
    assert refused > 8000  # the rest changed only the two counts, which nothing contradicts
