"""Tokenising that was interrupted goes on: the result is bit for bit that of one go."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from random import Random

import pytest
from helpers import ALL_TOKENIZERS, ROOT, TEXT

from andrea_numba import partial_file, sources, token_cache
from andrea_numba.data import Document, prepare
from andrea_numba.errors import UserError
from andrea_numba.partial_file import PartialFile, held
from andrea_numba.sources import open_sources
from andrea_numba.token_file import TokenWriter
from andrea_numba.tokenizers import build_tokenizer

LONG = TEXT + "é 😀\r\n" + TEXT[::-1]
# Tokenises argv[1] into the cache argv[2], slowly and with a note after each piece.
SLOWLY = """
import sys, time
from andrea_numba import partial_file, sources
from andrea_numba.data import prepare
sources.CHUNK_BYTES, partial_file.NOTE_SECONDS = 400, 0.0
note = partial_file.PartialFile.note
partial_file.PartialFile.note = lambda self, **what: (note(self, **what), time.sleep(0.01))
prepare(sources.open_sources([sys.argv[1]]), "byte", 0.1, 4, sys.argv[2])
"""


@pytest.fixture(autouse=True)
def a_note_after_every_piece(monkeypatch):
    monkeypatch.setattr(partial_file, "NOTE_SECONDS", 0.0)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 400)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "t.txt").write_bytes(LONG.encode())
    return tmp_path / "t.txt"


def ids_of(source, cache, name="byte", **options):
    """The token file's bytes; no other file is left beside it."""
    written = prepare(open_sources([str(source)]), name, 0.1, 4, cache, **options).path
    assert [file.name for file in cache.iterdir() if "tokenizer" not in file.name] == [written.name]
    return written.read_bytes()


def interrupt(monkeypatch, source, cache, notes=1, name="byte", **options):
    """Let `notes` notes be written, then interrupt; whether there were so many."""
    note, written = PartialFile.note, []

    def noting(self, **what):
        note(self, **what)
        written.append(what)
        if len(written) == notes:
            raise KeyboardInterrupt

    documents = source if isinstance(source, list) else open_sources([str(source)])
    with monkeypatch.context() as patched:
        patched.setattr(PartialFile, "note", noting)
        try:
            prepare(documents, name, 0.1, 4, cache, **options)
        except KeyboardInterrupt:
            return True
    return False


def said(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "goes on at" in line]


def _plain(folder):
    (folder / "t.txt").write_bytes(LONG.encode())


def _utf16(folder):
    (folder / "t.txt").write_bytes(LONG.encode("utf-16"))


def _lines(folder):
    texts = [TEXT[i:i + 300] for i in range(0, len(TEXT), 300)]
    (folder / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def _folder(folder):
    _lines(folder)
    (folder / "a.txt").write_bytes(LONG.encode())
    (folder / "b.md").write_text("short")


@pytest.mark.parametrize("write", [_plain, _utf16, _lines, _folder])
@pytest.mark.parametrize("name", ALL_TOKENIZERS)
def test_interrupted_at_every_note(tmp_path, monkeypatch, capsys, name, write):
    (tmp_path / "text").mkdir()
    write(tmp_path / "text")
    encoding = "utf-16" if write is _utf16 else "utf-8"
    documents = list(open_sources([str(tmp_path / "text")], encoding))
    tokenizer = build_tokenizer(name, [LONG], len(documents))
    whole = prepare(documents, name, 0.1, 4, tmp_path / "whole", tokenizer=tokenizer).path
    times = 0
    while interrupt(monkeypatch, documents, tmp_path / "cache", name=name, tokenizer=tokenizer):
        times += 1
        [partial] = (tmp_path / "cache").glob("*.partial")
        with partial.open("ab") as file:
            file.write(b"ids that came after the note")
    assert times > 10
    [written] = (tmp_path / "cache").iterdir()
    assert (written.name, written.read_bytes()) == (whole.name, whole.read_bytes())
    percents = [int(line.split()[-2]) for line in said(capsys)]
    assert len(percents) == times and percents == sorted(percents) and percents[-1] == 100


def test_killed_at_random(tmp_path, source):
    source.write_bytes(LONG.encode() * 40)
    rng, killed = Random(1), 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    while True:
        process = subprocess.Popen([sys.executable, "-c", SLOWLY, source, tmp_path / "cache"],
                                   env=environment, stderr=subprocess.PIPE, text=True)
        while killed < 5 and not list((tmp_path / "cache").glob("*.partial")):
            assert process.poll() is None
        if killed < 5:
            time.sleep(2 * rng.random())
            process.send_signal(signal.SIGKILL)
            killed += 1
        error = process.communicate(timeout=120)[1]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert "tokenising goes on at " in error and error.count("\n") == 1
    whole = ids_of(source, tmp_path / "whole")
    assert ids_of(source, tmp_path / "cache") == whole


@pytest.mark.parametrize(("place", "name"), [(TokenWriter, "append"), (partial_file, "write_file")])
def test_a_full_disk_costs_nothing_that_was_noted(tmp_path, source, monkeypatch, capsys, place,
                                                  name):
    whole, call, calls = ids_of(source, tmp_path / "whole"), getattr(place, name), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(place, name, failing)
        data = prepare(open_sources([str(source)]), "byte", 0.1, 4, tmp_path / "cache")
    assert data.path.read_bytes() == whole  # in a temporary folder
    assert len(data.notices) == 2 and "No space left" in data.notices[1]
    assert ids_of(source, tmp_path / "cache") == whole and len(said(capsys)) == 1


def test_another_text_is_begun_anew(tmp_path, source, monkeypatch, capsys):
    cache = tmp_path / "cache"
    assert interrupt(monkeypatch, source, cache, 5)
    left = set(cache.iterdir())
    source.write_bytes(LONG.encode() + b"!")
    prepare(open_sources([str(source)]), "byte", 0.1, 4, cache)
    assert said(capsys) == [] and len(set(cache.iterdir()) - left) == 1
    source.write_bytes(LONG.encode())
    prepare(open_sources([str(source)]), "byte", 0.1, 4, cache)
    assert len(said(capsys)) == 1 and len(list(cache.iterdir())) == 2


def test_ids_of_a_text_that_changed_and_changed_back_are_not_kept(tmp_path, source, monkeypatch,
                                                                  capsys):
    passes = [LONG, "?" + LONG[1:]]
    changing = [Document("t", lambda: Document.from_text("t", passes.pop(0)).chunks())]
    assert interrupt(monkeypatch, changing, tmp_path / "cache", 5)
    assert ids_of(source, tmp_path / "cache") == ids_of(source, tmp_path / "whole")
    assert said(capsys) == []


def test_a_text_that_changes_leaves_nothing(tmp_path):
    passes = [LONG, LONG + "!"]
    changing = [Document("t", lambda: Document.from_text("t", passes.pop(0)).chunks())]
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(changing, "byte", 0.1, 4, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("suffix", "damage"), [
    (".partial", lambda raw: raw[:-800]), (".partial", lambda raw: b""),
    (".partial", lambda raw: raw[:-800] + bytes([raw[-800] ^ 1]) + raw[-799:]),
    (".json", lambda raw: b""), (".json", lambda raw: b"[]"), (".json", lambda raw: raw[:20]),
    (".json", lambda raw: raw.replace(b"reached", b"x")),
    (".json", lambda raw: raw.replace(b"[", b"[-1, ")),
    (".json", lambda raw: raw.replace(b'"ids": ', b'"ids": 9')),
    (".json", lambda raw: b'{"ids": 1, "crc32": 0, "reached": [[], 1, 1, 1]}'),
    (".json", lambda raw: b'{"ids": 1, "crc32": 0, "reached": 1}')])
def test_damage_is_begun_anew(tmp_path, source, monkeypatch, capsys, suffix, damage):
    cache = tmp_path / "cache"
    assert interrupt(monkeypatch, source, cache, 9)
    [file] = cache.glob(f"*{suffix}")
    file.write_bytes(damage(file.read_bytes()))
    assert ids_of(source, cache) == ids_of(source, tmp_path / "whole")
    assert said(capsys) == []


def test_a_second_process_writes_its_own_file(tmp_path, source, monkeypatch):
    whole, cache = ids_of(source, tmp_path / "whole"), tmp_path / "cache"
    [name] = (file.name for file in (tmp_path / "whole").iterdir())
    assert interrupt(monkeypatch, source, cache, 5)
    with held(cache / name) as first:
        before = {file: file.read_bytes() for file in cache.iterdir()}
        with held(cache / name) as second:
            assert first and second is None
        written = prepare(open_sources([str(source)]), "byte", 0.1, 4, cache).path
        assert written.read_bytes() == whole
        assert {file: file.read_bytes() for file in before} == before
        first.complete()  # as that process would


def test_a_file_that_another_process_has_just_completed_is_left_alone(tmp_path, monkeypatch):
    def late(descriptor):
        os.rename(tmp_path / "t.partial", tmp_path / "t")

    monkeypatch.setattr(partial_file, "take", late)
    with held(tmp_path / "t") as file:
        assert file is None


def test_what_is_not_gone_on_with_is_removed(tmp_path, source, monkeypatch):
    cache = tmp_path / "cache"
    assert interrupt(monkeypatch, source, cache, 5)
    old = time.time() - token_cache.ABANDONED_SECONDS - 1
    for file in cache.iterdir():
        os.utime(file, (old, old))
    source.write_text(TEXT)
    ids_of(source, cache)


def test_short_work_leaves_no_note(tmp_path, source, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.undo()
    monkeypatch.setattr(TokenWriter, "complete", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(open_sources([str(source)]), "byte", 0.1, 4, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", [name for name in ALL_TOKENIZERS if name not in ("byte", "char")])
def test_a_tokenizer_learned_from_a_text_that_changed_is_not_kept(tmp_path, monkeypatch, name):
    monkeypatch.setattr("andrea_numba.tokenizers.bpe.MAX_CHARACTERS", 1000)  # the rest counts too
    passes = [LONG, LONG[:-1] + "!"]
    changing = [Document("t", lambda: Document.from_text("t", passes.pop(0)).chunks())]
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(changing, name, 0.1, 4, tmp_path)
    assert list(tmp_path.iterdir()) == []
