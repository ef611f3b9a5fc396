"""Saving under faults, in the short form of `python -m tests.faults`."""

import errno
import os

import pytest

from andrea_numba import checkpoint
from tests.faults import MODEL, fill, inject, kill, newest_step, small_disk
from tests.stored import Stored


def test_any_call_of_a_save_may_fail(tmp_path):
    assert inject(tmp_path, errno.ENOSPC, best=True, lasting=False) > 50


def test_kill_at_any_moment(tmp_path):
    assert kill(tmp_path / "run", kills=3) > 3


@pytest.mark.parametrize("checked", [False, True])
def test_a_full_disk(tmp_path, checked):
    try:
        with small_disk(tmp_path, "4m") as disk:
            assert fill(disk, Stored(MODEL), checked) > 5
    except OSError as error:
        pytest.skip(f"no small file system can be mounted: {error.strerror}")


def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1000]))
    stored = Stored()
    stored.save(tmp_path / "run", 1)
    assert newest_step(stored, tmp_path / "run") == 1


def test_what_a_crash_left_does_not_fill_the_disk(tmp_path, monkeypatch):
    """It goes before free space is asked for, not after the save that it is in the way of."""
    left = tmp_path / "checkpoints" / ".step-00000002"
    left.mkdir(parents=True)
    there = []
    monkeypatch.setattr(checkpoint, "check_space", lambda *_: there.append(left.exists()))
    Stored().save(tmp_path, 3)
    assert there == [False]
