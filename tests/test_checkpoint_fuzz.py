"""JSON and headers of any content are read in little memory, or refused in one line."""

import json
import os
from itertools import islice

import pytest

from andrea_numba import bounded_json, checkpoint, tokenizers
from andrea_numba.errors import UserError
from andrea_numba.parameters import ParameterTable
from andrea_numba.tokenizers import build_tokenizer
from tests.fuzz_checkpoints import MAX_GROWTH, Fuzz, bombs
from tests.stored import Stored


def test_changed_at_random(tmp_path):
    fuzz = Fuzz(tmp_path, seed=1)
    for _ in range(200):
        fuzz.one()
    assert fuzz.refused > 150 and fuzz.growth < MAX_GROWTH


def test_made_to_harm(tmp_path):
    fuzz = Fuzz(tmp_path)
    for bomb in bombs(bounded_json.MAX_BYTES):
        fuzz.give("checkpoint.json", bomb)
    assert fuzz.growth < MAX_GROWTH


@pytest.mark.parametrize("value", [
    {}, [], 0, -1.5, "x", None, True, 2**128, {"a": [{"b": '"]{'}], "c": "\\\"", "é": "\0😀"}])
def test_json_comes_back(value):
    for ascii_only in (True, False):
        assert bounded_json.loads(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(("text", "reason"), [
    (b"", "Expecting value"),
    (b"\xff", "utf-8"),
    (b'"', "Unterminated"),
    (b"[" * 17 + b"]" * 17, "nested"),
    (b"9" * 65, "number"),
    (b"1e999", "1e999 is not a finite"),
    (b"NaN", "NaN is not a finite"),
    (b'{"a": 1, "a": 1}', "twice"),
    (b'{"%b": 1}' % (b"k" * 201), "key of more"),
    (b"[1,2]]", "Extra data"),
    (b" " * (bounded_json.MAX_BYTES + 1), "longer than"),
    (b"," * (bounded_json.MAX_MARKS + 1), "brackets and commas"),
    (b'"' * (bounded_json.MAX_MARKS + 1), "quotes"),
    (b":" * (bounded_json.MAX_KEYS + 1), "keys"),
])
def test_json_is_refused_with_its_reason(text, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        bounded_json.loads(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_the_largest_vocabulary_and_any_file_name_can_be_saved(tmp_path):
    """The limits are for what is hostile: all of Unicode fits, and a name that is not UTF-8."""
    every = "".join(chr(c) for c in range(0x110000) if not 0xd800 <= c <= 0xdfff)
    stored = Stored()
    stored.config.data.data = [os.fsdecode(b"caf\xe9.txt")]
    stored.config.model.d_model = stored.config.model.n_head = 1
    stored.config.model.vocab_size = len(every)
    table = ParameterTable(stored.config.model)
    zeros = table.zeros()
    saved = checkpoint.save(tmp_path, 1, stored.config, build_tokenizer("char", [every], 1), table,
                            zeros, zeros, zeros, {})
    loaded = checkpoint.load(saved)
    assert loaded.tokenizer.vocab_size == len(every)
    assert loaded.config.data.data == stored.config.data.data
    json.loads((saved / "checkpoint.json").read_text(encoding="utf-8"))  # by other programs too


def test_a_model_that_is_too_large_costs_no_memory(tmp_path):
    fuzz = Fuzz(tmp_path)
    metadata = json.loads(fuzz.json_of("checkpoint.json"))
    metadata["config"]["model"] |= {"d_model": 65536, "n_layer": 1000, "context": 1 << 24}
    fuzz.give("checkpoint.json", json.dumps(metadata).encode())
    assert fuzz.refused == 1 and fuzz.growth < MAX_GROWTH


def test_tokenizer_files_made_to_harm(tmp_path):
    fuzz = Fuzz(tmp_path)
    most = bombs(tokenizers.MAX_FILE_BYTES - 10, tokenizers.MAX_FILE_MARKS - 10)
    for bomb in islice(most, 10, None):  # those just within the limits
        (tmp_path / "tokenizer.json").write_bytes(b'{"model":%b}' % bomb)
        with pytest.raises(UserError) as error:
            tokenizers.read_tokenizer(tmp_path / "tokenizer.json")
        assert "\n" not in str(error.value)
    assert fuzz.growth < 700 << 20
