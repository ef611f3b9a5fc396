"""The checkpoints of a run: which are kept, which one is taken, and that none is lost."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

from andrea_numba import checkpoint, checkpoint_files
from andrea_numba.errors import UserError
from tests.stored import TOKENIZER, Stored, sign


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def names(run):
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def silent(text):
    raise AssertionError(f"nothing to say, but: {text}")


def damage(folder):
    file = folder / "optimizer.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize(("keep", "kept"), [
    (1, ["step-00000002", "step-00000005"]),
    (2, ["step-00000002", "step-00000004", "step-00000005"]),
    (9, [f"step-0000000{n}" for n in range(1, 6)]),
])
def test_the_newest_and_the_best_are_kept(run, keep, kept):
    stored = Stored(keep=keep)
    for step in range(1, 6):
        stored.save(run, step, best=step == 2)
    assert names(run) == kept
    stored.check(checkpoint.newest(str(run), silent), 5)
    stored.check(checkpoint.newest(str(run / "latest"), silent), 5)
    best = checkpoint.newest(str(run / "best"), silent)
    stored.check(best, 2)
    assert best.path.parent == run / "checkpoints"  # so that training can go on from it


def test_links_are_relative(run):
    Stored().save(run, 1, best=True)
    moved = run.rename(run.with_name("moved"))
    assert os.readlink(moved / "best") == os.readlink(moved / "latest") == (
        "checkpoints/step-00000001")
    Stored().check(checkpoint.newest(str(moved / "best"), silent), 1)


def test_another_best_replaces_the_first(run):
    stored = Stored()
    for step in (1, 2, 3):
        stored.save(run, step, best=True)
    assert names(run) == ["step-00000003"]
    stored.save(run, 4)
    checkpoint.mark_best(run, 4)
    assert names(run) == ["step-00000003", "step-00000004"]  # a mark removes nothing
    stored.save(run, 5)
    assert names(run) == ["step-00000004", "step-00000005"]
    with pytest.raises(checkpoint.SaveFailed, match="no checkpoint of step 9"):
        checkpoint.mark_best(run, 9)


def test_without_links_the_best_is_kept_too(run, monkeypatch):
    def unsupported(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", unsupported)
    stored = Stored()
    for step in range(1, 4):
        stored.save(run, step, best=step == 1)
    assert names(run) == ["step-00000001", "step-00000003"]
    assert (run / "best").read_text() == "checkpoints/step-00000001"


@pytest.mark.parametrize("text", ["../..", "checkpoints/step-00000009", "", "x" * 5000, "\0"])
def test_a_mark_that_means_nothing_is_none(run, text):
    Stored().save(run, 1)
    (run / "best").write_text(text)
    Stored().save(run, 2)
    assert names(run) == ["step-00000002"]


def test_the_same_step_again(run):
    """The second is in place before the first goes, so that there is one at every moment."""
    stored = Stored()
    assert stored.save(run, 1, best=True).name == "step-00000001"
    assert stored.save(run, 1).name == "step-00000001.1"
    assert stored.save(run, 1).name == "step-00000001.2"
    assert names(run) == ["step-00000001.2"]
    for name in ("latest", "best"):
        assert (run / name).resolve().name == "step-00000001.2"
    stored.check(checkpoint.newest(str(run), silent), 1)


def test_only_own_folders_are_removed(run):
    mine = run / "checkpoints" / "step-notes"
    mine.mkdir(parents=True)
    left_by_a_crash = run / "checkpoints" / ".step-00000001"
    left_by_a_crash.mkdir()
    (left_by_a_crash / "model.safetensors").write_text("half of it")
    Stored().save(run, 2)
    assert names(run) == ["step-00000002", "step-notes"]


def test_after_a_resume_at_an_earlier_step_the_later_ones_go(run):
    stored = Stored(keep=3)
    for step in (10, 20, 30):
        stored.save(run, step, best=step == 20)
    stored.save(run, 15)
    assert names(run) == ["step-00000010", "step-00000015"]
    assert not os.path.lexists(run / "best")
    stored.check(checkpoint.newest(str(run), silent), 15)


def test_damaged_ones_are_passed_over_and_named(run):
    stored, said = Stored(keep=3), []
    folders = [stored.save(run, step) for step in (1, 2, 3)]
    damage(folders[2])
    (folders[1] / "manifest.json").unlink()
    stored.check(checkpoint.newest(str(run), said.append), 1)
    assert [line.partition(" is ")[0] for line in said] == ["warning: a checkpoint"] * 2
    assert "step-00000003/optimizer.safetensors is damaged" in said[0]
    assert "step-00000002/manifest.json: No such file" in said[1]
    with pytest.raises(UserError, match=r"optimizer.safetensors is damaged"):
        checkpoint.newest(str(folders[2]), silent)


def test_one_that_is_not_complete_is_not_kept_in_the_place_of_a_whole_one(run):
    stored = Stored(keep=2)
    folders = [stored.save(run, step) for step in (1, 2)]
    (folders[1] / "manifest.json").unlink()
    stored.save(run, 3)
    assert names(run) == ["step-00000001", "step-00000003"]


def test_none_that_is_whole(run):
    stored = Stored(keep=2)
    damage(stored.save(run, 1))
    with pytest.raises(UserError, match=r"step-00000001.* is damaged.*json$"):
        checkpoint.newest(str(run), silent)
    damage(stored.save(run, 2))
    with pytest.raises(UserError, match=r"step-00000002.* the older checkpoints are not whole"):
        checkpoint.newest(str(run), silent)


def test_one_of_a_later_version_is_not_passed_over(run):
    """Training on from an older one would in the end remove it."""
    stored = Stored(keep=2)
    stored.save(run, 1)
    file = stored.save(run, 2) / "checkpoint.json"
    file.write_text(file.read_text().replace('"version": 2', '"version": 3'))
    sign(file.parent)
    with pytest.raises(UserError, match="needs a newer andrea-numba"):
        checkpoint.newest(str(run), silent)


def test_one_that_goes_while_it_is_looked_for(run, monkeypatch):
    """A run in training replaces its checkpoint while andrea-generate looks for it."""
    stored, said = Stored(), []
    stored.save(run, 1)
    load = checkpoint.load

    def replaced_first(path):
        if path.name == "step-00000001":
            stored.save(run, 2)
        return load(path)

    monkeypatch.setattr(checkpoint, "load", replaced_first)
    stored.check(checkpoint.newest(str(run), said.append), 2)
    assert said == []


def test_no_clock_decides_within_a_run(run):
    stored = Stored(keep=3)
    for step, moment in ((99_999_999, 3e9), (100_000_000, 2e9), (100_000_001, 1e9)):
        folder = stored.save(run, step)
        for path in (folder, *folder.iterdir()):
            os.utime(path, (moment, moment))
    stored.check(checkpoint.newest(str(run), silent), 100_000_001)
    stored.config.run.keep = 2
    stored.save(run, 100_000_002)
    assert names(run) == ["step-100000001", "step-100000002"]


def test_the_newest_of_all_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no checkpoint below"):
        checkpoint.find("")
    older, newer = (Stored().save(tmp_path / "runs" / name, 1) for name in "ab")
    os.utime(older, (1e9, 1e9))
    (tmp_path / "runs" / "c" / "checkpoints" / ".step-00000009").mkdir(parents=True)
    assert checkpoint.find("").resolve() == newer


@pytest.mark.parametrize(("path", "message"), [
    ("nosuch", "does not exist"), (".", "is not a checkpoint"), ("file", "is not a checkpoint")])
def test_find_refuses(tmp_path, monkeypatch, path, message):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        checkpoint.find(path)


def test_the_settings_are_read_without_numpy(run):
    stored = Stored(keep=2)
    stored.config.run.threads = 3
    stored.save(run, 1)
    folder = stored.save(run, 2)
    (folder / "checkpoint.json").write_text("{}")
    code = ("import sys; from andrea_numba.checkpoint_files import read_config; "
            "print(read_config(sys.argv[1])['run']['threads'], read_config('nowhere')); "
            "assert 'numpy' not in sys.modules")
    result = subprocess.run([sys.executable, "-c", code, str(run)], cwd=ROOT, check=True,
                            stdout=subprocess.PIPE, text=True)
    assert result.stdout == "3 None\n"
    shutil.rmtree(run / "checkpoints" / "step-00000001")
    assert checkpoint_files.read_config(str(run)) is None


def test_a_disk_without_room_is_noticed_before_anything_is_written(tmp_path, run, monkeypatch):
    stored = Stored()
    saved = stored.save(run, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    for action in (lambda: stored.save(run, 2),
                   lambda: checkpoint.check_space(tmp_path / "a" / "b", stored.table)):
        with pytest.raises(checkpoint.SaveFailed, match=r"1\.0 MiB free, a checkpoint .* 1\.\d"):
            action()
    assert names(run) == [saved.name] and not (tmp_path / "a").exists()
    stored.check(checkpoint.newest(str(run), silent), 1)


def test_what_could_not_be_read_back_is_not_written(run):
    stored = Stored()
    with pytest.raises(ValueError, match="not a finite number"):
        checkpoint.save(run, 1, stored.config, TOKENIZER, stored.table, *stored.arrays(1),
                        {"loss": float("nan")})
    assert not run.exists()
