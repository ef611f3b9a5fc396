"""The cache of token ids: found by content, whole or made anew, whoever else writes to it."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import ROOT, TEXT, dataset, tiny_config

from andrea_numba.data import Document, prepare, write_token_file
from andrea_numba.errors import UserError
from andrea_numba.token_cache import ABANDONED_SECONDS

# Prepares as `ids_of` does, in another process; the folder is the first argument.
PREPARE = """
import resource, sys
from helpers import TEXT, dataset, tiny_config
from andrea_numba.errors import UserError
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    data = dataset(tiny_config(), sys.argv[1], TEXT * 2000)
    print(len(data.train), *data.notices, sep="\\n")
except UserError as error:
    print(error)
"""


def ids_of(folder, text=TEXT):
    data = dataset(tiny_config(), folder, text)
    return np.concatenate([data.train[:], data.val[:]]).tolist(), data


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, *map(str, arguments)], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("damage", [
    lambda raw: raw[:-3], lambda raw: raw[:-2] + b"\1\0", lambda raw: b"", lambda raw: raw + b"x",
    lambda raw: raw[:70] + b"\xff" + raw[71:], lambda raw: bytes(len(raw))], ids=range(6))
def test_damage_is_noticed_and_made_good(tmp_path, damage):
    ids, data = ids_of(tmp_path)
    good = data.path.read_bytes()
    data.path.write_bytes(damage(good))
    again, data = ids_of(tmp_path)
    assert again == ids and data.path.read_bytes() == good
    assert data.notices == [f"the token ids in {data.path} are damaged: they are made anew"]
    assert ids_of(tmp_path)[1].notices == []


def test_two_processes_at_once(tmp_path):
    processes = [start(tmp_path) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert said[0] == said[1] and said[0].strip().isdigit()
    [file] = tmp_path.iterdir()
    before = file.read_bytes()
    assert ids_of(tmp_path, TEXT * 2000)[1].notices == [] and file.read_bytes() == before


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_counts(tmp_path):
    process = start(tmp_path)
    while not list(tmp_path.glob("*.partial")):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    whole = [file for file in tmp_path.iterdir() if file.suffix == ".tokens"]
    [left] = tmp_path.glob("*.partial") if not whole else [None]
    if left:
        ids_of(tmp_path)
        assert left.exists()  # it might still be written to
        old = time.time() - ABANDONED_SECONDS - 1
        os.utime(left, (old, old))
        ids_of(tmp_path, TEXT[1:])
        assert [file.suffix for file in tmp_path.iterdir()] == [".tokens"] * 2
    ids, data = ids_of(tmp_path, TEXT * 2000)
    assert bytes(ids) == (TEXT * 2000).encode() and data.notices == []


def test_a_full_disk_is_one_line(tmp_path):
    """No file may be longer than the ids are: neither in the cache nor in a temporary folder."""
    process = start(tmp_path / "cache", 100_000)
    said = process.communicate(timeout=120)[0]
    assert said.startswith("cannot write token ids to ") and said.count("\n") == 1, said
    assert "File too large" in said and "ANDREA_CACHE_DIR" in said
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_in_the_place_of_the_file_is_no_obstacle(tmp_path):
    ids, data = ids_of(tmp_path)
    data.path.unlink()
    data.path.mkdir()
    again, data = ids_of(tmp_path)
    assert again == ids and len(data.notices) == 2


@pytest.mark.parametrize("second", [TEXT + "!", TEXT[:-1], "?" + TEXT[1:]])
@pytest.mark.parametrize("name", ["byte", "char"])
def test_text_that_changes_while_it_is_read_is_never_kept(tmp_path, name, second):
    """The ids would be found again under the fingerprint of another text."""
    passes = {"byte": [TEXT, second], "char": [TEXT, TEXT + "!?", second]}[name]
    changing = [Document("log.txt", lambda: iter((passes.pop(0),)))]
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(changing, name, 0.1, 4, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_token_files_replace_neither_devices_nor_folders(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(UserError, match="not a regular file"):
            write_token_file(tmp_path / name, [Document.from_text("t", TEXT)], "byte")


def test_a_text_is_not_overwritten_by_its_ids(tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    done = subprocess.run([sys.executable, ROOT / "data" / "prepare.py", "t.txt", "--output",
                           "./t.txt"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "one of the texts" in done.stderr
    assert (tmp_path / "t.txt").read_text() == TEXT
