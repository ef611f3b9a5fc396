"""From text to training and validation ids: what is split, counted, cached and refused."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea_numba import data, sources
from andrea_numba.data import cache_folder, load_token_file, prepare, write_token_file
from andrea_numba.errors import UserError
from andrea_numba.sources import Document, open_sources
from andrea_numba.tokenising import Tokenising
from andrea_numba.tokenizers import CharTokenizer

ROOT = Path(__file__).resolve().parent.parent
NAMES = pytest.mark.parametrize("name", ["byte", "char"])


def documents(*texts):
    return [Document.from_text(f"text {i}", text) for i, text in enumerate(texts)]


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def refusal(*args, **kwargs):
    with pytest.raises(UserError) as error:
        prepare(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def decoded(dataset):
    return [dataset.tokenizer.decode(part[:]) for part in (dataset.train, dataset.val)]


@NAMES
@pytest.mark.parametrize("text", [
    "a\r\nb\r\n" * 500, "one line\r" * 600, "before <|endoftext|> after\n" * 10, "é∑😀\n" * 100])
def test_text_comes_through_unchanged(tmp_path, cache, name, text):
    path = tmp_path / "t.txt"
    path.write_bytes(text.encode())
    dataset = prepare(open_sources([str(path)]), name, 0.1, 4, cache)
    ids = np.concatenate([dataset.train[:], dataset.val[:]])
    assert dataset.tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode() if name == "byte" else text)  # no mark, nothing lost
    assert dataset.fingerprint == hashlib.sha256(text.encode()).hexdigest()
    assert len(dataset.notices) == ("\r" in text)
    if name == "char":
        assert dataset.tokenizer.vocab_size == len(set(text))


@NAMES
def test_a_byte_order_mark_changes_nothing(tmp_path, cache, name):
    text = "plain English text. " * 20
    datasets = []
    for i, mark in enumerate(("", "\ufeff")):
        path = tmp_path / f"{i}.txt"
        path.write_bytes((mark + text).encode())
        datasets.append(prepare(open_sources([str(path)]), name, 0.1, 4, cache))
    plain, marked = datasets
    assert decoded(plain) == decoded(marked)
    assert plain.tokenizer.to_dict() == marked.tokenizer.to_dict()
    assert plain.path == marked.path


@NAMES
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=6),
       fraction=st.floats(0, 0.9))
def test_any_documents(tmp_path_factory, name, texts, fraction):
    cache = tmp_path_factory.getbasetemp() / "shared-cache"
    try:
        dataset = prepare(documents(*texts), name, fraction, 1, cache)
    except UserError as error:
        assert re.search("training|validation", str(error))
        return
    whole = "".join(decoded(dataset)) if name == "char" else dataset.tokenizer.decode(
        np.concatenate([dataset.train[:], dataset.val[:]]))
    assert whole == ("".join(t + "\n\n" for t in texts) if len(texts) > 1 else texts[0])


def test_parts_never_overlap_and_lose_nothing(cache):
    text = "".join(chr(32 + i % 90) for i in range(5000))
    for fraction in (0.0, 0.001, 0.1, 0.5, 0.9):
        dataset = prepare(documents(text), "char", fraction, 4, cache)
        assert "".join(decoded(dataset)) == text
        assert len(dataset.val) == int(5000 * fraction)
        assert dataset.n_val_documents == (fraction > 0)


@NAMES
def test_validation_holds_whole_documents(cache, name):
    texts = [f"document {i} " + "x" * (7 * i) for i in range(20)]
    for fraction in (0.15, 0.3, 0.6):
        dataset = prepare(documents(*texts), name, fraction, 8, cache)
        n = dataset.n_val_documents
        assert 0 < n < 20
        assert decoded(dataset) == ["".join(t + "\n\n" for t in part)
                                    for part in (texts[:-n], texts[-n:])]
        # Forward to the next start: validation is at most the fraction asked for.
        assert len(dataset.val) <= fraction * (len(dataset.val) + len(dataset.train))


def test_a_cut_on_a_document_start_stays_and_one_in_the_last_document_too(cache):
    dataset = prepare(documents("a" * 9, "b" * 9), "byte", 0.5, 4, cache)
    assert decoded(dataset) == ["a" * 9 + "\n\n", "b" * 9 + "\n\n"]
    dataset = prepare(documents("a" * 9, "b" * 9, "c" * 9), "byte", 0.667, 4, cache)
    assert dataset.n_val_documents == 2 and len(dataset.val) == 20
    dataset = prepare(documents("a" * 9, "b" * 89), "byte", 0.2, 4, cache)
    assert len(dataset.val) == 20 and dataset.n_val_documents == 1


def test_the_next_document_is_found_far_away(cache, monkeypatch):
    monkeypatch.setattr("andrea_numba.token_file._READ_IDS", 16)
    dataset = prepare(documents("a" * 500, "b" * 100), "byte", 0.5, 4, cache)
    assert decoded(dataset)[1] == "b" * 100 + "\n\n"


def test_validation_text_is_measured_without_its_first_token(cache):
    first, second = "abc", "é∑😀 and more"
    dataset = prepare(documents(first * 9, second), "char", 0.4, 4, cache)
    assert decoded(dataset)[1] == second + "\n\n"
    assert (dataset.val_bytes, dataset.val_characters) == (len(second.encode()) - 2,
                                                           len(second) - 1)
    dataset = prepare(documents(first * 9, "x" + second), "byte", 0.45, 4, cache)
    assert (dataset.val_bytes, dataset.val_characters) == (len(second.encode()), len(second))
    dataset = prepare(documents(first), "byte", 0.0, 2, cache)
    assert (len(dataset.val), dataset.val_bytes, dataset.val_characters,
            dataset.n_val_documents) == (0, 0, 0, 0)


def test_too_short_parts_are_named_with_the_numbers(cache):
    line = refusal(documents("a" * 40), "byte", 0.0, 64, cache)
    assert "training part" in line and "40" in line and "65" in line and "--context 39" in line
    line = refusal(documents("a" * 66), "byte", 0.1, 64, cache)
    assert "training part has 60" in line and "66" in line and "--context 5 " in line
    line = refusal(documents("a" * 100), "byte", 0.1, 64, cache)
    assert "validation part has 10" in line and "--context 9 " in line
    assert "--val-fraction" in line
    assert "give more text" in refusal(documents("a"), "byte", 0.0, 64, cache)
    assert "at least 11" in refusal(documents("a" * 100), "byte", 0.1, 10, cache)
    prepare(documents("a" * 100), "byte", 0.1, 9, cache)  # the context that was promised to work
    for wrong in (-0.1, 1.0, float("nan")):
        assert "--val-fraction" in refusal(documents("a" * 100), "byte", wrong, 4, cache)


def test_texts_without_text_are_refused(tmp_path, cache):
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbf")
    assert "no text" in refusal(open_sources([str(tmp_path)]), "char", 0.1, 4, cache)
    assert "no text" in refusal([], "byte", 0.1, 4, cache)
    assert not cache.exists()


def test_bad_bytes_stop_everything_before_anything_is_written(tmp_path, cache):
    path = tmp_path / "l.txt"
    path.write_bytes(b"caf\xe9 au lait")
    line = refusal(open_sources([str(path)]), "byte", 0.1, 4, cache)
    assert "offset 3" in line and "0xE9" in line and not cache.exists()


@NAMES
def test_ids_are_written_once_and_reused(cache, name, monkeypatch):
    text = "some text é " * 50
    first = prepare(documents(text), name, 0.1, 4, cache)
    monkeypatch.setattr(Tokenising, "write_resumably", None)  # must not be called
    second = prepare(documents(text), name, 0.2, 8, cache)
    assert second.path == first.path and [p.name for p in cache.iterdir()] == [first.path.name]
    monkeypatch.undo()
    assert prepare(documents(text + "."), name, 0.1, 4, cache).path != first.path
    cuts = [prepare(documents(text[:n], text[n:]), name, 0.1, 4, cache) for n in (9, 10)]
    assert len({first.path, *(c.path for c in cuts)}) == 3
    assert len({first.fingerprint, *(c.fingerprint for c in cuts)}) == 3


def test_a_damaged_cache_file_is_replaced(cache):
    first = prepare(documents("some text " * 50), "byte", 0.1, 4, cache)
    text = decoded(first)
    first.path.write_bytes(first.path.read_bytes()[:-3])
    assert decoded(prepare(documents("some text " * 50), "byte", 0.1, 4, cache)) == text


def test_an_unwritable_cache_costs_a_notice(tmp_path):
    (tmp_path / "file").write_text("in the way")
    dataset = prepare(documents("some text " * 50), "byte", 0.1, 4, tmp_path / "file" / "cache")
    assert "".join(decoded(dataset)) == "some text " * 50
    assert len(dataset.notices) == 1 and "ANDREA_CACHE_DIR" in dataset.notices[0]
    folder = dataset.path.parent
    assert folder.exists()
    del dataset
    assert not folder.exists()


def test_where_the_cache_is(monkeypatch):
    for variable in ("ANDREA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/andrea-numba/tokens")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/andrea-numba/tokens")
    monkeypatch.setenv("ANDREA_CACHE_DIR", "/mine")
    assert cache_folder() == Path("/mine/andrea-numba/tokens")


def test_a_given_tokenizer_is_kept_and_new_characters_are_named(cache, monkeypatch):
    tokenizer = CharTokenizer.build(["abcdefgh"], 1)
    dataset = prepare(documents("abc" * 20), "byte", 0.1, 4, cache, tokenizer=tokenizer)
    assert dataset.tokenizer is tokenizer and dataset.train[:3].tolist() == [0, 1, 2]
    before = sorted(cache.iterdir())
    chunks = ["abc" * 20, "abz", "c"]
    changed = [Document("new.txt", lambda: iter(chunks))]
    line = refusal(changed, "char", 0.1, 4, cache, tokenizer=tokenizer)
    assert "new.txt" in line and "'z'" in line and "position 62" in line
    assert sorted(cache.iterdir()) == before


@NAMES
def test_separate_validation_text(cache, name):
    train, val = documents("abcdef " * 30), documents("fed é " * 9)
    dataset = prepare(train, name, 0.5, 4, cache, val_documents=val)
    assert decoded(dataset) == ["abcdef " * 30, "fed é " * 9]
    assert dataset.val_characters == 6 * 9 - 1 and dataset.n_val_documents == 1
    assert dataset.fingerprint != prepare(train, name, 0.1, 4, cache).fingerprint
    assert "training text" in refusal(train, name, 0.1, 4, cache, val_documents=train)
    assert "validation part has 54" in refusal(documents("abcdefé " * 90), "char", 0.1, 60, cache,
                                               val_documents=val)


@NAMES
def test_prepared_token_files(tmp_path, cache, name):
    path = tmp_path / "t.tokens"
    texts = ["first\r\n", "second document é", "third one"]
    assert len(write_token_file(path, documents(*texts), name)) == 1
    loaded = load_token_file(path, 0.4, 4)
    direct = prepare(documents(*texts), name, 0.4, 4, cache)
    assert decoded(loaded) == decoded(direct)
    assert (loaded.fingerprint, loaded.val_bytes, loaded.val_characters, loaded.n_val_documents
            ) == (direct.fingerprint, direct.val_bytes, direct.val_characters,
                  direct.n_val_documents)
    data.TokenFile.write(path, [np.arange(9)], 9, 0, 0)
    with pytest.raises(UserError, match="which tokenizer"):
        load_token_file(path, 0.1, 1)
    data.TokenFile.write(path, [np.arange(9)], 9, 0, 0,
                         {"tokenizer": {"name": "byte", "start_token": 1}})
    with pytest.raises(UserError, match="damaged"):
        load_token_file(path, 0.1, 1)
    with pytest.raises(UserError, match="cannot write"):
        write_token_file(tmp_path / "no" / "t.tokens", documents("a"), name)


def test_memory_stays_bounded(tmp_path):
    """32 MiB of text, in a process that may grow by much less than its ids need."""
    path = tmp_path / "big.txt"
    path.write_bytes(b"the cat sat on the mat\n" * (32 * 2**20 // 23))
    code = """
import resource, sys
import numpy as np
from andrea_numba.data import Loader, open_sources, prepare
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
dataset = prepare(open_sources([sys.argv[1]]), "char", 0.1, 128, sys.argv[2])
Loader(dataset.train, 8, 128, 0).next()
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "cache")],
                            cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 48 * 2**20, "text (32 MiB) or ids (64 MiB) were held in memory"


@pytest.mark.parametrize("environment", [{"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_starters_work_in_a_plain_locale(tmp_path, environment):
    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True,
                              text=True, env=os.environ | environment)

    text = tmp_path / "t.txt"
    text.write_bytes("naïve café\r\n".encode() * 9)
    done = run("data/prepare.py", str(text), "--tokenizer", "char", "--output",
               str(tmp_path / "t.tokens"))
    assert done.returncode == 0 and "CR" in done.stderr, done.stderr
    assert "".join(decoded(load_token_file(tmp_path / "t.tokens", 0.5, 4))) == "naïve café\r\n" * 9
    failed = run("data/prepare.py", "nope.txt", "--output", str(tmp_path / "n.tokens"))
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1
    assert str(ROOT / "nope.txt") in failed.stderr and not (tmp_path / "n.tokens").exists()
    done = run("data/stories.py", "--characters", "5000", "--seed", "3", "--output",
               str(tmp_path / "s.jsonl"))
    assert done.returncode == 0, done.stderr
    stories = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text("utf-8").splitlines()]
    assert sum(len(s["text"]) for s in stories) >= 5000
    assert all(s["log_probability"] < 0 for s in stories)
    assert len(list(open_sources([str(tmp_path / "s.jsonl")]))) == len(stories)


def test_chunk_borders_do_not_matter(tmp_path, cache, monkeypatch):
    path = tmp_path / "t.txt"
    path.write_bytes("aé∑😀\r\n".encode() * 50)
    whole = prepare(open_sources([str(path)]), "char", 0.1, 4, cache)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 7)
    pieces = prepare(open_sources([str(path)]), "char", 0.1, 4, tmp_path / "other")
    assert whole.fingerprint == pieces.fingerprint and decoded(whole) == decoded(pieces)
    assert whole.path.read_bytes() == pieces.path.read_bytes()


def test_the_readme_reads_a_token_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_token_file("book.tokens", documents("text é"), "char")
    code = (ROOT / "data" / "README.md").read_text("utf-8").split("```python")[1].split("```")[0]
    names = {}
    exec(code, names)
    assert names["ids"].tolist() == CharTokenizer.build(["text é"], 1).encode("text é").tolist()
    assert names["tokenizer"]["characters"] == " etxé"
