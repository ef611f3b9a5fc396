"""What the data arguments name."""

import os

import pytest
from helpers import TEXT

from andrea_numba import corpora
from andrea_numba.config import DataConfig
from andrea_numba.data import Document, write_token_file
from andrea_numba.errors import UserError
from andrea_numba.stories import generate_stories, log_probability


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ANDREA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_stories_know_the_entropy_of_their_validation_text(monkeypatch):
    few = generate_stories(30_000)
    monkeypatch.setattr("andrea_numba.stories.generate_stories", lambda: few)
    corpus = corpora.open_corpus(DataConfig(data=["stories"]), context=128)
    dataset = corpus.dataset
    last = few[-dataset.n_val_documents:]
    text = dataset.tokenizer.decode(dataset.val[:])
    assert text == "".join(story.text + "\n\n" for story in last)
    nats = -sum(log_probability(story.text) for story in last)
    characters = sum(len(story.text) for story in last)
    assert corpus.source_entropy == pytest.approx(nats / characters, rel=1e-3)
    assert 0.35 < corpus.source_entropy < 0.70


def test_pydocs(monkeypatch):
    monkeypatch.setattr("andrea_numba.pydocs.collect_docstrings", lambda: [TEXT, TEXT + "x"])
    corpus = corpora.open_corpus(DataConfig(data=["pydocs"]), context=16)
    assert corpus.name == "pydocs" and corpus.source_entropy is None
    assert len(corpus.dataset.train) > len(TEXT)


def test_built_in_names_stand_alone():
    with pytest.raises(UserError, match="stories cannot be mixed"):
        corpora.open_corpus(DataConfig(data=["stories", "a.txt"]), context=16)


def test_a_file_with_the_name_of_a_corpus(tmp_path):
    (tmp_path / "stories").write_text(TEXT)
    corpus = corpora.open_corpus(DataConfig(data=["./stories"]), context=16)
    assert len(corpus.dataset.train) + len(corpus.dataset.val) == len(TEXT)
    assert corpus.source_entropy is None


def test_a_token_file(tmp_path):
    write_token_file(tmp_path / "t.tokens", [Document.from_text("t", TEXT)], "char")
    corpus = corpora.open_corpus(DataConfig(data=["t.tokens"]), context=16)
    assert corpus.name == "t"
    assert corpus.dataset.tokenizer.vocab_size == len(set(TEXT))


def test_a_token_file_has_its_own_validation_text(tmp_path):
    write_token_file(tmp_path / "t.tokens", [Document.from_text("t", TEXT)], "char")
    with pytest.raises(UserError, match="--val-data cannot be given"):
        corpora.open_corpus(DataConfig(data=["t.tokens"], val_data=["x"]), context=16)


@pytest.mark.parametrize(("data", "message"), [
    ([], "no data"), ([""], "name of a file"), (["storys"], "did you mean .* stories"),
    (["a\0b"], "name of a file")])
def test_names_that_cannot_be(data, message):
    with pytest.raises(UserError, match=message):
        corpora.open_corpus(DataConfig(data=data), context=16)


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        corpora.open_corpus(DataConfig(data=["pipe"]), context=16)


def test_notices_of_validation_files_are_kept(tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text(TEXT[:100])
    (tmp_path / "more" / "b.txt").write_text("")
    corpus = corpora.open_corpus(DataConfig(data=["t.txt"], val_data=["more"]), context=16)
    assert any("left out 1 empty" in notice for notice in corpus.dataset.notices)
