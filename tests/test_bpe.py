"""Byte-pair encoding: built, read from a tokenizer.json, and refused when it loses something."""

import itertools
import json
import string
import sys

import numpy as np
import pytest
from helpers import TEXT, refused, run_program

from andrea_numba import checkpoint, tokenizers
from andrea_numba.data import Document, prepare
from andrea_numba.errors import UserError
from andrea_numba.parameters import ParameterTable
from andrea_numba.tokenizers import (
    BpeTokenizer,
    build_tokenizer,
    read_special_tokens,
    read_tokenizer,
    tokenizer_from_dict,
    whole_words,
)
from tests.stored import Stored

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


# Special tokens on request

def asked(saved) -> BpeTokenizer:
    tokenizer = BpeTokenizer(saved)
    read_special_tokens(tokenizer, True)
    return tokenizer


def with_tokens(library, saved, *tokens, **options):
    theirs = library.Tokenizer.from_str(json.dumps(saved))
    theirs.add_special_tokens([library.AddedToken(token, **options) for token in tokens])
    return json.loads(theirs.to_str())


def test_special_tokens_become_their_ids_if_asked(library, saved):
    theirs = library.Tokenizer.from_str(json.dumps(saved))
    tokenizer = asked(saved)
    ids = tokenizer.encode(SPECIAL)
    assert ids.tolist() == theirs.encode(SPECIAL).ids
    assert np.count_nonzero(ids == tokenizer.document_mark) == 2
    assert tokenizer.decode(ids) == SPECIAL.replace("<|endoftext|>", "\n\n")
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.encode(SPECIAL).tolist() == ids.tolist()
    assert again.to_dict() == tokenizer.to_dict() != BpeTokenizer(saved).to_dict()
    read_special_tokens(again, False)
    assert again.document_mark not in again.encode(SPECIAL)


def test_text_is_not_cut_inside_a_special_token(library, saved):
    tokenizer = asked(with_tokens(library, saved, "<|end|>", "<|endings|>"))
    text = "x" * 70_000 + "<|endings|>" + "猫" * 70_000 + "<|end|><|end|>" + "y" * 70_000
    whole = tokenizer.encode(text)
    names = [name for name in tokenizer.special_names if name in text]
    special = [tokenizer._model.token_to_id(name) for name in names]
    assert len(special) == 2 and np.isin(whole, special).sum() == 3
    for cut in range(69_990, 70_020):
        chunks = [text[:cut], *(text[at:at + 70_003] for at in range(cut, len(text), 70_003))]
        ids = [tokenizer.encode(chunk) for chunk in whole_words(chunks, tokenizer.special_names)]
        found = np.concatenate(ids)
        assert found[np.isin(found, special)].tolist() == whole[np.isin(whole, special)].tolist()
        assert tokenizer.decode(found) == tokenizer.decode(whole)


def test_asked_and_not_asked_are_kept_apart_in_the_cache(saved, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    documents = [Document.from_text("t", SPECIAL * 20)]
    name, lengths = str(tmp_path / "tokenizer.json"), []
    for special_tokens in (False, True, False):
        data = prepare(documents, name, 0.1, 4, tmp_path, special_tokens=special_tokens)
        lengths.append(len(data.train))
    assert lengths[0] == lengths[2] > lengths[1] and len(list(tmp_path.glob("*.tokens"))) == 2


@pytest.mark.parametrize(("tokens", "options"), [
    (["<a b>"], {}), (["<mask>"], {"lstrip": True}), (["<x>"], {"rstrip": True})])
def test_special_tokens_with_spaces_are_refused(library, saved, tokens, options):
    with pytest.raises(UserError, match="holds spaces, or takes those"):
        asked(with_tokens(library, saved, *tokens, **options))


def test_where_there_are_none_they_cannot_be_asked_for(saved):
    with pytest.raises(UserError, match="has no special tokens; leave"):
        asked({**saved, "added_tokens": []})
    for name in ("byte", "char", "harris"):
        tokenizer = build_tokenizer(name, [TEXT], 2)
        read_special_tokens(tokenizer, False)
        with pytest.raises(UserError, match=f"^--special-tokens: the {name} tokenizer has no"):
            read_special_tokens(tokenizer, True)


def test_special_tokens_from_the_command_line(library, train, text, saved):
    (text / "s.txt").write_text(SPECIAL * 200)
    (text / "tokenizer.json").write_text(json.dumps(saved))
    options = "--tokenizer", "tokenizer.json", "--special-tokens", "--val-fraction", 0
    refused(train("s.txt", "--special-tokens"), "the byte tokenizer has no special tokens")
    done = train("s.txt", *options, "--steps", 1, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert train("--resume", "--out", "run", "--steps", 2).returncode == 0
    metadata = json.loads((text / "run/checkpoints/step-00000002/checkpoint.json").read_text())
    assert metadata["config"]["data"]["special_tokens"] and metadata["tokenizer"]["special_tokens"]
    plain = train("s.txt", *options[:2], *options[3:], "--steps", 1, "--out", "plain")
    assert plain.returncode == 0, plain.stderr
    refused(train("--resume", "--special-tokens", "--out", "plain", "--steps", 2),
            "--special-tokens True differs from the False")

    def generated(*arguments):
        result = run_program("andrea-generate", "run", "--device", "cpu", "--json", *arguments,
                             cwd=text)
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    prompt = "--prompt", SPECIAL, "--max-tokens", 1
    assert (generated(*prompt, "--special-tokens")[0]["prompt_tokens"]
            < generated(*prompt)[0]["prompt_tokens"])
    mark = BpeTokenizer(saved).document_mark
    for special in (["--special-tokens"], []):
        scored = [line.get("id") for line in generated("--score", "s.txt", *special)]
        assert scored.count(mark) == (400 if special else 0)


def test_a_token_file_says_whether_special_tokens_were_read(train, text, saved):
    (text / "tokenizer.json").write_text(json.dumps(saved))
    (text / "s.txt").write_text(SPECIAL * 200)
    for special in ([], ["--special-tokens"]):
        done = run_program("../data/prepare.py", "s.txt", "--tokenizer", "tokenizer.json",
                           "--output", "s.tokens", *special, cwd=text)
        assert done.returncode == 0, done.stderr
        trained = train("s.tokens", "--special-tokens", "--steps", 1, "--val-fraction", 0)
        if special:
            assert trained.returncode == 0, trained.stderr
        else:
            refused(trained, "made without --special-tokens")


# Large ones

def large(saved, letters: str):
    """A tokenizer of all tokens of up to three of these letters; those of three are merged in
    two ways, as in files made from the lists of tokens alone."""
    vocabulary, merges = dict(saved["model"]["vocab"]), []
    for length in (2, 3):
        for token in map("".join, itertools.product(letters, repeat=length)):
            vocabulary.setdefault(token, len(vocabulary))
            merges += [[token[:at], token[at:]] for at in range(1, length)]
    model = {**saved["model"], "vocab": vocabulary, "merges": merges}
    tokens = [{**token, "id": len(vocabulary)} for token in saved["added_tokens"]]
    return {**saved, "model": model, "added_tokens": tokens}


def test_as_large_as_that_of_llama_3(saved, tmp_path):
    """128,256 tokens and 280,147 merges."""
    contents = large(build_tokenizer("bpe", [TEXT], 1, 257).to_dict()["tokenizer"],
                     string.ascii_letters)
    assert len(contents["model"]["merges"]) > 280_147 and len(contents["model"]["vocab"]) > 128_256
    raw = json.dumps(contents, indent=2).encode()
    (tmp_path / "t.json").write_bytes(raw.ljust(tokenizers.MAX_FILE_BYTES))
    tokenizer = read_tokenizer(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(raw.ljust(tokenizers.MAX_FILE_BYTES + 1))
    with pytest.raises(UserError, match="longer than 33,554,432 bytes"):
        read_tokenizer(tmp_path / "t.json")
    stored = Stored()
    stored.config.model.d_model = stored.config.model.n_head = 1
    stored.config.model.vocab_size = tokenizer.vocab_size
    table = ParameterTable(stored.config.model)
    zeros = table.zeros()
    checkpoint.check_tokenizer(stored.config, tokenizer)
    folder = checkpoint.save(tmp_path, 1, stored.config, tokenizer, table, zeros, zeros, zeros, {})
    loaded = checkpoint.load(folder).tokenizer
    assert loaded.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def test_one_that_no_checkpoint_holds_is_refused_before_training(saved):
    tokenizer = BpeTokenizer(large(saved, string.ascii_letters + string.digits + "!?"))
    with pytest.raises(UserError, match=r"tokenizer of 266,\d+ ids does not fit into a checkpoint"):
        checkpoint.check_tokenizer(Stored().config, tokenizer)
