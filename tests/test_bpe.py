"""Byte-pair encoding: built, read from a tokenizer.json, and refused when it loses something."""

import json
import sys

import pytest
from helpers import TEXT

from andrea_numba.errors import UserError
from andrea_numba.tokenizers import BpeTokenizer, build_tokenizer, read_tokenizer, whole_words

SPECIAL = "The cat<|endoftext|> sat <|endoftext|>"


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("tokenizers")


@pytest.fixture
def saved(library):
    """The contents of a tokenizer.json as other programs write it."""
    return build_tokenizer("bpe", [TEXT], 1, 300).to_dict()["tokenizer"]


def refusal(saved) -> str:
    with pytest.raises(UserError) as error:
        BpeTokenizer(saved)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_sizes_are_exact(library):
    for size in (257, 280):
        tokenizer = build_tokenizer("bpe", [TEXT], 2, size)
        assert (tokenizer.vocab_size, tokenizer.document_mark) == (size, size - 1)
        assert tokenizer.start_token == tokenizer.document_mark
    assert build_tokenizer("bpe", [TEXT], 1).token_bytes(tokenizer.start_token) != b"\n\n"
    with pytest.raises(UserError, match=r"--vocab-size 8,449.*finds .* ids"):
        build_tokenizer("bpe", [TEXT], 1, 8449)
    with pytest.raises(UserError, match="--vocab-size 256 is too small"):
        build_tokenizer("bpe", [TEXT], 1, 256)


def test_the_library_reads_what_was_built_and_gives_the_same_ids(library, saved):
    ours, theirs = BpeTokenizer(saved), library.Tokenizer.from_str(json.dumps(saved))
    assert ours.encode(TEXT + "é 😀").tolist() == theirs.encode(TEXT + "é 😀").ids
    assert theirs.decode(ours.encode(TEXT).tolist()) == TEXT


def test_special_tokens_in_a_text_are_ordinary_text(saved, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode(SPECIAL)
    assert tokenizer.document_mark not in ids and tokenizer.decode(ids) == SPECIAL
    assert tokenizer.decode([tokenizer.document_mark]) == "\n\n"


def test_cutting_and_padding_in_a_file_are_not_done(library, saved):
    theirs = library.Tokenizer.from_str(json.dumps(saved))
    theirs.enable_truncation(3)
    theirs.enable_padding(length=20)
    tokenizer = BpeTokenizer(json.loads(theirs.to_str()))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_chunks_of_whole_words_have_the_ids_of_the_text(saved):
    tokenizer = BpeTokenizer(saved)
    chunks = [TEXT[i:i + 7] for i in range(0, len(TEXT), 7)]
    ids = [i for chunk in whole_words(chunks) for i in tokenizer.encode(chunk).tolist()]
    assert ids == tokenizer.encode(TEXT).tolist()


@pytest.mark.parametrize("changed", [
    {"normalizer": {"type": "Lowercase"}},
    {"normalizer": {"type": "NFC"}},
    {"pre_tokenizer": {"type": "Whitespace"}},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                       "use_regex": True}}])
def test_what_loses_text_is_refused(saved, changed):
    assert "does not give back every text" in refusal({**saved, **changed})


def test_other_kinds_and_damage_are_refused(library, saved):
    words = library.Tokenizer(library.models.WordPiece({"[UNK]": 0, "hello world": 1}))
    assert "not written in byte symbols" in refusal(json.loads(words.to_str()))
    assert "not a tokenizer.json" in refusal({**saved, "model": {"type": "BPE"}})
    model, vocabulary = saved["model"], saved["model"]["vocab"]
    for number in (7, 1 << 31):
        twice = {**saved, "model": {**model, "vocab": {**vocabulary, "a": number}}}
        assert "has ids up to" in refusal(twice)
    assert "tokenizer" in refusal({**saved, "model": {**model, "continuing_subword_prefix": "Ġ"}})
    del vocabulary["a"]
    assert "tokenizer" in refusal(saved)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'andrea-numba\[bpe\]'"):
        build_tokenizer("bpe", [TEXT], 1)


def test_from_the_command_line(library, train, text, saved):
    (text / "tokenizer.json").write_text(json.dumps(saved))
    done = train("t.txt", "--tokenizer", "tokenizer.json", "--steps", 2, "--out", "run")
    assert done.returncode == 0, done.stderr
    (text / "tokenizer.json").unlink()  # the checkpoint holds it
    resumed = train("--resume", "--out", "run", "--steps", 3)
    assert resumed.returncode == 0, resumed.stderr
    metadata = json.loads((text / "run/checkpoints/step-00000003/checkpoint.json").read_text())
    assert metadata["config"]["model"]["vocab_size"] == 300
