"""The standard library's docstrings as a corpus."""

import sys

import pytest

from andrea_numba import pydocs
from andrea_numba.errors import UserError

LIMIT = 60_000


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return pydocs.collect_docstrings(LIMIT)


def test_prose_is_clean(documents):
    text = "\n\n".join(documents)
    assert len(text) >= LIMIT
    assert text.isascii() and text.encode("utf-8").decode("utf-8") == text
    assert "\r" not in text and "\x00" not in text and ">>>" not in text
    assert all(d == d.strip() and len(d) >= pydocs.MIN_CHARS for d in documents)
    letters = sum(map(str.isalpha, text)) / len("".join(text.split()))
    assert letters > 0.75
    assert " the " in text


def test_limit_stops_at_the_document_that_reaches_it(documents):
    assert sum(map(len, documents)) >= LIMIT > sum(map(len, documents[:-1]))
    fewer = pydocs.collect_docstrings(LIMIT // 4)
    assert len(fewer) < len(documents) and fewer == documents[: len(fewer)]


def test_same_documents_every_time(documents):
    assert pydocs.collect_docstrings(LIMIT) == documents


def test_no_document_twice(documents):
    assert len(set(documents)) == len(documents)


def test_nothing_is_imported():
    before = set(sys.modules)
    pydocs.collect_docstrings(LIMIT)
    assert set(sys.modules) - before == set()


def test_library_is_large_enough_to_train_on():
    assert sum(map(len, pydocs.collect_docstrings(500_000))) >= 500_000


def test_skipped_folders(tmp_path, monkeypatch):
    sources = {
        "b.py": '"""Second module, with quite enough words in it to count."""',
        "a.py": '"""First module, with quite enough words in it to count."""\nraise SystemExit',
        "broken.py": "def (",
        "test/c.py": '"""A test module, with quite enough words in it to count."""',
        "site-packages/d.py": '"""Somebody else\'s module, with quite enough words."""',
        "json/e.py": 'class A:\n    """First module, with quite enough words in it to count."""',
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    monkeypatch.setattr(pydocs.sysconfig, "get_path", lambda name: str(tmp_path))
    found = pydocs.collect_docstrings()
    assert [text.split()[0] for text in found] == ["First", "Second"]


def test_without_sources_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(pydocs.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="no docstrings under"):
        pydocs.collect_docstrings()


def test_cleaning():
    raw = """Return the sum of two numbers.

        A short example:

        >>> add(1, 2)
        3

        =====  =====
        +----+----+
        It works for any numbers. \t
        """
    assert pydocs.clean_docstring(raw) == (
        "Return the sum of two numbers.\n\nA short example:\n\nIt works for any numbers."
    )
