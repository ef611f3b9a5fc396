"""The lock of a run folder: one holder, named to the second, never left behind."""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers import ROOT

from andrea_numba.errors import UserError
from andrea_numba.lock import NAME, RunLock

HOLD = """
import sys, time
from pathlib import Path
from andrea_numba.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_told_of_the_first(holder, tmp_path):
    named = rf"process {holder.pid} on .+, since 2.+ writes into {tmp_path}"
    with pytest.raises(UserError, match=named) as told:
        RunLock(tmp_path).__enter__()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_holder_that_dies_is_not_in_the_way(holder, tmp_path, number):
    holder.send_signal(number)
    holder.wait()
    assert (tmp_path / NAME).exists()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_it_can_be_taken_again(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path), pytest.raises(UserError, match="another andrea-train"):
            RunLock(tmp_path).__enter__()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"[" * 900])
def test_a_lock_file_may_hold_anything(tmp_path, content):
    with RunLock(tmp_path):
        (tmp_path / NAME).write_bytes(content)
        with pytest.raises(UserError, match="its process is not known"):
            RunLock(tmp_path).__enter__()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*No such file"):
        RunLock(tmp_path / "nowhere").__enter__()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    import fcntl

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with RunLock(tmp_path) as first, RunLock(tmp_path):
        assert first.folder == tmp_path


def test_nothing_of_unix_is_needed_to_import_it():
    code = ("import sys; sys.modules['fcntl'] = None; import andrea_numba.lock; "
            "assert 'numpy' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
