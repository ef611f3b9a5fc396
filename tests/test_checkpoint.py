"""Checkpoints: complete, self-contained, and refused in one line when they are not."""

import json
import shutil

import numpy as np
import pytest
from helpers import dataset, tiny_config
from safetensors.numpy import load_file, save_file

from andrea_numba import checkpoint
from andrea_numba.errors import UserError
from andrea_numba.trainer import Trainer
from kernels.registry import op_table


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    config = tiny_config(tokenizer="char")
    trainer = Trainer(config, op_table("cpu"), dataset(config, folder))
    trainer.step()
    return trainer


@pytest.fixture
def saved(trained, tmp_path):
    return trained.save(tmp_path / "run", "x")


def test_what_is_saved_comes_back(trained, saved):
    loaded = checkpoint.load(saved)
    assert loaded.step == 1
    assert loaded.config == trained.config
    assert loaded.weights.tobytes() == trained.weights.tobytes()
    assert loaded.tokenizer.to_dict() == trained.dataset.tokenizer.to_dict()
    assert loaded.state["loader"] == trained.loader.state()


def test_files_are_plain_and_complete(trained, saved):
    assert sorted(p.name for p in saved.iterdir()) == [
        "checkpoint.json", "model.safetensors", "optimizer.safetensors"]
    weights = load_file(saved / "model.safetensors")
    assert weights["wte"].shape == (trained.config.model.vocab_size, 16)  # no padded rows
    assert "w_head" not in weights  # tied: stored once
    assert len(load_file(saved / "optimizer.safetensors")) == 2 * len(weights)


def test_it_needs_no_other_file(saved, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(saved, elsewhere)
    shutil.rmtree(tmp_path / "run")
    assert checkpoint.load(checkpoint.find(str(elsewhere))).step == 1


def test_only_own_folders_are_removed(trained, tmp_path):
    mine = tmp_path / "run" / "checkpoints" / "step-notes"
    mine.mkdir(parents=True)
    left_by_a_crash = mine.parent / ".step-00000001.123"
    left_by_a_crash.mkdir()
    trained.save(tmp_path / "run", "x")
    assert mine.exists() and not left_by_a_crash.exists()


def test_a_failed_save_leaves_nothing_half_written(trained, saved, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    trained.optimizer.step += 1
    with pytest.raises(UserError, match="No space left"):
        trained.save(tmp_path / "run", "x")
    trained.optimizer.step -= 1
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [saved.name]
    assert checkpoint.load(saved).step == 1


@pytest.mark.parametrize("change", [
    lambda state: state.clear(),
    lambda state: state.update(loader=[]),
    lambda state: state.update(average={"decay": 1.0}),
    lambda state: state["average"].update(total="x"),
    lambda state: state.pop("fingerprint"),
], ids=range(5))
def test_damaged_training_state_is_refused(saved, change):
    _rewrite(saved, lambda m: change(m["state"]))
    with pytest.raises(UserError, match="training state"):
        checkpoint.run_folder(checkpoint.load(saved))


def test_a_checkpoint_outside_its_run_is_not_resumed(saved, tmp_path):
    alone = shutil.copytree(saved, tmp_path / "alone")
    assert checkpoint.run_folder(checkpoint.load(saved)) == tmp_path / "run"
    with pytest.raises(UserError, match="without its run"):
        checkpoint.run_folder(checkpoint.load(alone))


def test_a_newer_one_replaces_the_older(trained, tmp_path):
    run = tmp_path / "run"
    first = trained.save(run, "x")
    trained.optimizer.step += 1
    second = trained.save(run, "x")
    trained.optimizer.step -= 1
    assert not first.exists() and second.exists()
    assert checkpoint.find(str(run)) == second


def test_saving_the_same_step_again(trained, saved, tmp_path):
    assert trained.save(tmp_path / "run", "x") == saved
    assert checkpoint.load(saved).step == 1


def test_find_newest_run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no checkpoint below"):
        checkpoint.find("")
    trained.save(tmp_path / "runs" / "a", "x")
    newest = trained.save(tmp_path / "runs" / "b", "x")
    (tmp_path / "runs" / "c" / "checkpoints" / ".step-00000009.1").mkdir(parents=True)
    assert checkpoint.find("").resolve() == newest


@pytest.mark.parametrize(("path", "message"), [("nosuch", "does not exist"), (".", "no checkpoin")])
def test_find_refuses(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        checkpoint.find(path)


def _rewrite(saved, change):
    file = saved / "checkpoint.json"
    metadata = json.loads(file.read_text())
    change(metadata)
    file.write_text(json.dumps(metadata))


def _truncate(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _pointer(saved):
    (saved / "model.safetensors").write_text("version https://example.invalid/spec/v1\n" * 3)


def _other_shape(saved):
    tensors = load_file(saved / "model.safetensors")
    tensors["wpe"] = np.zeros((8, 32), np.float32)
    save_file(tensors, saved / "model.safetensors")


def _shorter(saved):
    tensors = load_file(saved / "model.safetensors")
    del tensors["blocks.1.w_2"]
    save_file(tensors, saved / "model.safetensors")


def _renamed(saved):
    tensors = load_file(saved / "model.safetensors")
    tensors["blocks.1.w_9"] = tensors.pop("blocks.1.w_2")
    save_file(tensors, saved / "model.safetensors")


@pytest.mark.parametrize(("damage", "message"), [
    (_truncate, r"not complete, .*: expected \d+ bytes, found \d+"),
    (_pointer, "model.safetensors is not a checkpoint file"),
    (_other_shape, r"wpe is F32 \[8, 32\]; expected F32 \[16, 16\]"),
    (_shorter, "not complete, or of another model"),
    (_renamed, "blocks.1.w_2 is missing"),
    (lambda s: (s / "model.safetensors").unlink(), "model.safetensors"),
    (lambda s: (s / "checkpoint.json").write_text("{"), "not JSON"),
    (lambda s: (s / "checkpoint.json").write_text("[" * 100_000), "not JSON"),
    (lambda s: _rewrite(s, lambda m: m.pop("config")), "damaged"),
    (lambda s: _rewrite(s, lambda m: m.update(version=2)), "format version 2"),
    (lambda s: _rewrite(s, lambda m: m.update(format="x")), "is not an andrea-numba"),
    (lambda s: _rewrite(s, lambda m: m.update(step="1")), "damaged"),
    (lambda s: _rewrite(s, lambda m: m["config"]["model"].update(d_model="wide")), "expected int"),
    (lambda s: _rewrite(s, lambda m: m["config"]["model"].update(d_model=-16)), "at least 1"),
    (lambda s: _rewrite(s, lambda m: m.update(version=True)), "format version True"),
    (lambda s: _rewrite(s, lambda m: m["config"]["model"].update(n_layer=10**9)), "at most"),
    (lambda s: _rewrite(s, lambda m: m["config"]["model"].update(vocab_size=3)), "tokenizer has"),
    (lambda s: _rewrite(s, lambda m: m["tokenizer"].update(name="harris")), "tokenizer"),
], ids=range(18))
def test_damage_is_named_in_one_line(saved, damage, message):
    damage(saved)
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load(saved)
    assert "\n" not in str(caught.value)
