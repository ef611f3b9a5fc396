"""Checkpoints: complete, self-contained, and refused in one line when they are not."""

import json
import os
import shutil
import stat

import numpy as np
import pytest
from helpers import dataset, tiny_config
from safetensors.numpy import load_file

from andrea_numba import checkpoint, tensor_files
from andrea_numba.errors import UserError
from andrea_numba.trainer import Trainer
from kernels.registry import op_table
from tests.stored import sign


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
        "checkpoint.json", "manifest.json", "model.safetensors", "optimizer.safetensors"]
    assert len({stat.S_IMODE(p.stat().st_mode) for p in saved.iterdir()}) == 1
    weights = load_file(saved / "model.safetensors")
    assert weights["wte"].shape == (trained.config.model.vocab_size, 16)  # no padded rows
    assert "w_head" not in weights  # tied: stored once
    assert len(load_file(saved / "optimizer.safetensors")) == 2 * len(weights)


def test_it_needs_no_other_file(saved, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(saved, elsewhere)
    shutil.rmtree(tmp_path / "run")
    assert checkpoint.load(checkpoint.find(str(elsewhere))).step == 1


@pytest.mark.parametrize("change", [
    lambda state: state.clear(),
    lambda state: state.update(loader=[]),
    lambda state: state.update(run_id=7),
    lambda state: state.pop("run_id"),
    lambda state: state.pop("fingerprint"),
], ids=range(5))
def test_damaged_training_state_is_refused(saved, change):
    _rewrite(saved, lambda m: change(m["state"]))
    sign(saved)
    with pytest.raises(UserError, match="training state"):
        checkpoint.run_folder(checkpoint.load(saved))


def test_a_checkpoint_outside_its_run_is_not_resumed(saved, tmp_path):
    alone = shutil.copytree(saved, tmp_path / "alone")
    assert checkpoint.run_folder(checkpoint.load(saved)) == tmp_path / "run"
    with pytest.raises(UserError, match="without its run"):
        checkpoint.run_folder(checkpoint.load(alone))


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


def _tensors(change):
    def damage(saved):
        file = saved / "model.safetensors"
        tensors = load_file(file)
        ordered = {name: tensors[name] for name in sorted(tensors, key=_place(file))}
        ordered = change(ordered) or ordered
        file.write_bytes(b"".join(bytes(piece) for piece in tensor_files.encode(ordered)))
    return damage


def _place(file):
    header = _header(file.read_bytes())
    return lambda name: header[name]["data_offsets"]


def _header(raw):
    return json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])


def _claim(change):
    """Change the header alone; the data stay."""
    def damage(saved):
        file = saved / "model.safetensors"
        raw = file.read_bytes()
        text = change(_header(raw))
        text = text if isinstance(text, bytes) else json.dumps(text).encode()
        data = raw[8 + int.from_bytes(raw[:8], "little"):]
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return damage


def _length(length):
    def damage(saved):
        file = saved / "model.safetensors"
        file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    return damage


def _member(make):
    def damage(saved):
        (saved / "model.safetensors").rename(saved.parent / "moved")
        make(saved / "model.safetensors", saved.parent / "moved")
    return damage


def _manifest(change):
    def damage(saved):
        manifest = json.loads((saved / "manifest.json").read_text())
        manifest = change(manifest["files"]) or manifest
        (saved / "manifest.json").write_text(json.dumps(manifest))
    return damage


def _flip(name):
    def damage(saved):
        raw = bytearray((saved / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (saved / name).write_bytes(raw)
    return damage


def _refused(path, message):
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(("damage", "message"), [
    (_truncate, r"model.safetensors is not complete, .*: expected \d+ bytes, found \d+"),
    (_pointer, r"model.safetensors is not complete, .*: expected \d+ bytes, found 120"),
    (lambda s: (s / "model.safetensors").unlink(), "model.safetensors: No such file"),
    (lambda s: (s / "manifest.json").unlink(), "manifest.json: No such file"),
    (lambda s: (s / "checkpoint.json").write_text("{"), "not JSON"),
    (lambda s: (s / "checkpoint.json").write_text("[" * 100_000), "not JSON .* deep"),
    (lambda s: _rewrite(s, lambda m: m.update(version=1)), "format version 1; .* reads version 2"),
    (lambda s: _rewrite(s, lambda m: m.update(version=3)), "version 3.* needs a newer andrea-numb"),
    (lambda s: _rewrite(s, lambda m: m.update(version=True)), "format version True"),
    (lambda s: _rewrite(s, lambda m: m.update(format="x")), "is not an andrea-numba"),
    (_flip("checkpoint.json"), "checkpoint.json"),
    (_flip("model.safetensors"), "model.safetensors is damaged"),
    (_flip("optimizer.safetensors"), "optimizer.safetensors is damaged"),
    (lambda s: os.truncate(s / "optimizer.safetensors", 9), "optimizer.safetensors is not comple"),
    (_member(lambda file, moved: file.symlink_to(moved)), "not a regular file"),
    (_member(lambda file, moved: os.mkfifo(file)), "not a regular file"),
    (_member(lambda file, moved: file.mkdir()), "not a regular file"),
    (_manifest(lambda files: files.update({"../x": files["checkpoint.json"]})), "expected the fil"),
    (_manifest(lambda files: files.pop("optimizer.safetensors") and None), "expected the files"),
    (_manifest(lambda files: files.update({"checkpoint.json": 7})), "expected None bytes"),
    (_manifest(lambda files: {"files": []}), "manifest.json is damaged"),
    (_manifest(lambda files: [1]), "manifest.json is damaged"),
], ids=range(22))
def test_damage_is_named_in_one_line(saved, damage, message):
    damage(saved)
    _refused(saved, message)


@pytest.mark.parametrize(("damage", "message"), [
    (_truncate, r"model.safetensors is not complete: expected \d+ bytes, found \d+"),
    (_pointer, "model.safetensors is not a checkpoint file"),
    (_tensors(lambda t: t.update(wpe=np.zeros((8, 32), np.float32))),
     r"wpe is .*\[8, 32\].*; expected .*\[16, 16\]"),
    (_tensors(lambda t: t.pop("blocks.1.w_2") is None), "blocks.1.w_2 is missing"),
    (_tensors(lambda t: {("x" if n == "wpe" else n): a for n, a in t.items()}), "wpe is missing"),
    (_claim(lambda h: {**h, "wpe": {**h["wpe"], "dtype": "F64"}}), "tensor wpe is .*F64"),
    (_claim(lambda h: {**h, "wpe": {**h["wpe"], "shape": [-16, -16]}}), "tensor wpe is .*-16"),
    (_claim(lambda h: {**h, "wpe": {**h["wpe"], "shape": [10**60, 0]}}), "tensor wpe is .*1000"),
    (_claim(lambda h: {**h, "wpe": {**h["wpe"], "data_offsets": [0, 1024]}}), "wpe is .*, 1024"),
    (_claim(lambda h: {**h, "wpe": 1}), "tensor wpe is 1"),
    (_claim(lambda h: {**h, "../wpe": h["wpe"]}), "../wpe is unknown"),
    (_claim(lambda h: []), "not a JSON object"),
    (_claim(lambda h: b"[" * 500), "header is not JSON: nested"),
    (_claim(lambda h: b" " * 100_000), "header of 100000 bytes"),
    (_claim(lambda h: b'{"a": 1, "a": 2}'), "header is not JSON: a key is given twice"),
    (_length(1 << 60), "header of 1152921504606846976 bytes"),
    (_length(0), "header is not JSON"),
    (lambda s: _rewrite(s, lambda m: m.pop("config")), "damaged"),
    (lambda s: _rewrite(s, lambda m: m.update(step="1")), "damaged"),
    (lambda s: _rewrite(s, lambda m: m["config"]["model"].update(d_model="wide")), "expected int"),
    (lambda s: _rewrite(s, lambda m: m["config"]["model"].update(d_model=-16)), "at least 1"),
    (lambda s: _rewrite(s, lambda m: m["config"]["model"].update(d_model=65536)), "wte is .*65536"),
    (lambda s: _rewrite(s, lambda m: m["config"]["model"].update(n_layer=10**9)), "at most"),
    (lambda s: _rewrite(s, lambda m: m["config"]["model"].update(vocab_size=3)), "tokenizer has"),
    (lambda s: _rewrite(s, lambda m: m["tokenizer"].update(name="harris")), "tokenizer"),
], ids=range(25))
def test_what_a_manifest_agrees_with_is_still_looked_at(saved, damage, message):
    """A foreign file, or one that was made to harm, may come with a manifest of its own."""
    damage(saved)
    sign(saved)
    _refused(saved, message)


def test_files_of_two_saves_are_not_mixed(trained, saved, tmp_path):
    trained.step()
    other = trained.save(tmp_path / "other", "x")
    for name in ("checkpoint.json", "model.safetensors", "optimizer.safetensors"):
        mixed = shutil.copytree(saved, tmp_path / f"with {name}")
        shutil.copy(other / name, mixed / name)
        _refused(mixed, f"{name} is .*of another save")
