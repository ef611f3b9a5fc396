"""The Harris tokenizer: what letters vary, where words are cut, and the same ids everywhere."""

import itertools
import json
import random
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import TEXT
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea_numba import streams, tokenising
from andrea_numba.data import Document, prepare
from andrea_numba.errors import UserError
from andrea_numba.pydocs import collect_docstrings
from andrea_numba.tokenizers import HarrisTokenizer, build_tokenizer, segments, whole_words
from andrea_numba.tokenizers.trie import Trie
from andrea_numba.tokenizers.words import WORD, count_words

LETTERS = st.text("abcé", min_size=1, max_size=6)
STEMS = ("walk", "jump", "print", "build", "learn", "count", "track", "mark")
ENDINGS = ("ing", "ed", "er", "s", "")
INFLECTED = " ".join(stem + ending for stem in STEMS for ending in ENDINGS) * 3


def followers(words):
    """Of each prefix: the letters that follow it, "" for the end of a word."""
    found = defaultdict(set)
    for word in words:
        for at in range(len(word) + 1):
            found[word[:at]].add(word[at:at + 1])
    return {prefix: len(letters) for prefix, letters in found.items()}


@settings(max_examples=200, deadline=None)
@given(words=st.sets(LETTERS, max_size=30))
def test_words_are_cut_where_both_varieties_jump(words):
    after, before = followers(words), followers([word[::-1] for word in words])
    expected = {}
    for word in words:
        expected[word] = [
            at for at in range(2, len(word))
            if (after[word[:at]] * before[word[at:][::-1]]) ** 2
            >= 25 * after[word[:at - 1]] * before[word[at + 1:][::-1]]]
    assert segments._cuts(words) == expected


def test_endings_are_found():
    tokenizer = build_tokenizer("harris", [INFLECTED], 1)
    for word in ("walking", "printer", "jumped"):
        stem = next(stem for stem in STEMS if word.startswith(stem))
        assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(" " + word)] == [
            " " + stem, word.removeprefix(stem)]
    assert tokenizer.to_dict()["segments"][0] in ("ing", "ed", "er")


@settings(max_examples=200, deadline=None)
@given(pieces=st.sets(st.text("abé ", min_size=2, max_size=4).map(str.encode), max_size=12),
       text=st.text("abcé \n", max_size=40))
def test_the_longest_match_is_taken_at_each_place(pieces, text):
    pieces, raw, expected = sorted(pieces), text.encode(), []
    while raw:
        fits = [(len(piece), 257 + i) for i, piece in enumerate(pieces) if raw.startswith(piece)
                and not (piece.endswith(b" ") and raw[len(piece):len(piece) + 1] > b" ")]
        length, token = max(fits, default=(1, raw[0]))
        expected.append(token)
        raw = raw[length:]
    assert Trie(pieces).encode(text.encode()).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.sampled_from([" the", "cat's", " mat", "ty", " ", "\n", "12", ",", "é",
                                      "\u3000"])).map("".join),
       cuts=st.lists(st.integers(0, 80), max_size=5))
def test_ids_do_not_depend_on_where_the_text_was_cut(text, cuts):
    tokenizer = build_tokenizer("harris", [TEXT, "  cat's\n\n  12,3 é"], 1)
    places = [0, *sorted(cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(places)]
    ids = [i for chunk in whole_words(chunks) for i in tokenizer.encode(chunk).tolist()]
    assert ids == tokenizer.encode(text).tolist()
    assert "".join(WORD.findall(text)) == text


@pytest.fixture(scope="module")
def docstrings():
    return [Document.from_text(f"{i}", text) for i, text in enumerate(collect_docstrings())]


@pytest.mark.parametrize("vocab_size", [257, 2305, 4353, 8449])
def test_vocabularies_of_the_presets(vocab_size, docstrings):
    texts = [text for document in docstrings for text in document.chunks()]
    tokenizer = build_tokenizer("harris", texts, 2, vocab_size)
    assert tokenizer.vocab_size == vocab_size and len(tokenizer.segments) == vocab_size - 257
    text = "".join(texts[:300])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    random.Random(0).shuffle(texts)  # nor does the order in which words come up matter
    assert build_tokenizer("harris", texts, 2, vocab_size).to_dict() == tokenizer.to_dict()


def test_one_thread_and_two_give_the_same_ids(docstrings, tmp_path, monkeypatch):
    ids = []
    for threads in (1, 2):
        config = SimpleNamespace(NUMBA_NUM_THREADS=threads)  # not Numba's own: its pool may start
        monkeypatch.setattr(streams, "numba", SimpleNamespace(config=config))
        dataset = prepare(docstrings, "harris", 0.1, 8, tmp_path / str(threads), vocab_size=2305)
        ids.append(np.concatenate([dataset.train[:], dataset.val[:]]))
        assert dataset.tokenizer.vocab_size == 2305
    assert np.array_equal(*ids)


def test_what_was_learned_is_kept_by_content(tmp_path, monkeypatch):
    documents = [Document.from_text("text", TEXT)]
    first = prepare(documents, "harris", 0.1, 8, tmp_path, vocab_size=272)
    (tmp_path / first.path.name).unlink()
    with monkeypatch.context() as patched:
        patched.setattr(tokenising, "build_tokenizer", None)
        again = prepare(documents, "harris", 0.1, 8, tmp_path, vocab_size=272)
    assert again.tokenizer.to_dict() == first.tokenizer.to_dict()
    for file in tmp_path.glob("*.tokenizer.json"):
        file.write_text("{")
    assert prepare(documents, "harris", 0.1, 8, tmp_path,
                   vocab_size=272).tokenizer.to_dict() == first.tokenizer.to_dict()
    assert prepare(documents, "harris", 0.1, 8, tmp_path, vocab_size=271).path != first.path


def test_rare_words_are_forgotten_when_there_are_too_many():
    chunks = [" the cat" * 50 + "".join(f" w{chr(97 + i)}{chr(97 + j)}" for i in range(26))
              for j in range(26)]
    counts = count_words(chunks, most=100)
    assert len(counts) <= 100 and counts[" cat"] == 26 * 50
    assert count_words(chunks) == Counter(word for chunk in chunks for word in WORD.findall(chunk))


def test_vocabularies_that_cannot_be_are_refused():
    possible = build_tokenizer("harris", [TEXT], 1).vocab_size
    assert build_tokenizer("harris", [TEXT], 1, possible).vocab_size == possible
    with pytest.raises(UserError, match=rf"--vocab-size 8,449.*finds {possible} ids.*give more"):
        build_tokenizer("harris", [TEXT], 1, 8449)
    with pytest.raises(UserError, match=r"--vocab-size 256 is too small.*257"):
        build_tokenizer("harris", [TEXT], 1, 256)


def test_saved_segments_hold_any_character():
    tokenizer = HarrisTokenizer(['\n\t"', "\\\\", "é", "😀\r\n"], 256)
    saved = json.dumps(tokenizer.to_dict())
    assert HarrisTokenizer.from_dict(json.loads(saved)).encode('😀\r\né\\\\\n\t"').tolist() == [
        260, 259, 258, 257]


def test_from_the_command_line(train, text):
    settings = ["t.txt", "--tokenizer", "harris", "--vocab-size", 272]
    shown = train(*settings, "--show-tokens", "cat\n mats é")
    assert shown.returncode == 0, shown.stderr
    tokens = [line.split("\t") for line in shown.stdout.splitlines()]
    pieces = [json.loads(piece) for _, piece in tokens]
    assert "".join(pieces[:-2]) == "cat\n mats " and pieces[-2:] == ["\\xc3", "\\xa9"]
    assert all(int(token) < 272 for token, _ in tokens) and not (text / "runs").exists()
    done = train(*settings, "--steps", 2, "--out", "run")
    assert done.returncode == 0, done.stderr
    saved = json.loads((text / "run/checkpoints/step-00000002/checkpoint.json").read_text())
    assert len(saved["tokenizer"]["segments"]) == 272 - 257
    assert saved["config"]["model"]["vocab_size"] == 272
    resumed = train("--resume", "--out", "run", "--steps", 3)
    assert resumed.returncode == 0, resumed.stderr
    refused = train(*settings[:3], "--vocab-size", 8449, "--show-tokens", "a")
    assert refused.returncode == 2 and "more than this text gives" in refused.stderr
