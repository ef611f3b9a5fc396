"""Folders of `transformers`: written and read without it, refused in one line when foreign.

That `transformers` computes the same with them is tested in tests/interop.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from helpers import ODD_MODEL, logits, random_batch, random_checkpoint
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from andrea_numba import checkpoint, huggingface, interchange
from andrea_numba.config import PRESETS, ModelConfig
from andrea_numba.errors import UserError
from andrea_numba.parameters import ParameterTable
from andrea_numba.tokenizers import build_tokenizer

CHAR = build_tokenizer("char", ["".join(map(chr, range(32, 92)))], 2)  # 61 ids
BYTE = build_tokenizer("byte", [], 1)
SHAPE = ModelConfig(**ODD_MODEL)


@pytest.fixture
def model():
    return random_checkpoint(SHAPE, CHAR)


@pytest.fixture
def folder(model, tmp_path):
    interchange.export(model, str(tmp_path / "model"))
    return tmp_path / "model"


def rewrite_json(file, change):
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def rewrite_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_files_and_names(folder):
    assert sorted(p.name for p in folder.iterdir()) == [
        "andrea_tokenizer.json", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json"]
    config = json.loads((folder / "config.json").read_text())
    assert config | {"n_embd": 30, "n_head": 3, "n_layer": 2, "n_positions": 7, "vocab_size": 61,
                     "activation_function": "gelu_new", "tie_word_embeddings": True,
                     "bos_token_id": 60, "eos_token_id": 60, "model_type": "gpt2"} == config
    shapes = {name: t.shape for name, t in load_file(folder / "model.safetensors").items()}
    assert shapes["transformer.wte.weight"] == (61, 30)  # without padding
    assert shapes["transformer.h.1.attn.c_attn.weight"] == (30, 90)
    assert len(shapes) == 2 + 2 + 2 * 12


@pytest.mark.parametrize("switches", [
    {}, {"tied": False}, {"bias": False}, {"norm_affine": False},
    {"tied": False, "bias": False, "norm_affine": False}], ids=str)
def test_what_is_exported_comes_back(switches, tmp_path):
    model = random_checkpoint(dataclasses.replace(SHAPE, **switches), CHAR)
    assert interchange.export(model, str(tmp_path / "m")) == []
    again = interchange.open_model(str(tmp_path / "m"), print)
    # GPT-2 has all biases and norms: those that were not there are zeros and ones.
    assert again.model == dataclasses.replace(model.model, bias=True, norm_affine=True)
    assert again.tokenizer.to_dict() == CHAR.to_dict()
    for name, tensor in ParameterTable(model.model).unpadded(model.weights).items():
        assert np.array_equal(ParameterTable(again.model).unpadded(again.weights)[name], tensor)
    ids, _ = random_batch(SHAPE, np.random.default_rng(0), 2)
    assert np.array_equal(logits(again, ids), logits(model, ids))


def test_a_document_mark_that_was_never_trained_ends_nothing(tmp_path):
    shape = dataclasses.replace(SHAPE, vocab_size=257)
    interchange.export(random_checkpoint(shape, BYTE), str(tmp_path / "m"))
    said = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert (said["bos_token_id"], said["eos_token_id"]) == (10, None)


def test_defaults_are_those_of_gpt2(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert huggingface._read_shape(tmp_path / "config.json") == ModelConfig(
        **PRESETS["gpt2-124m"]["model"])
    assert ParameterTable(ModelConfig(**PRESETS["gpt2-124m"]["model"])).count == 124_439_808


def _without_prefix(tensors):
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def _with_masks(tensors):
    tensors["transformer.h.0.attn.bias"] = np.ones((1, 1, 7, 7), bool)
    tensors["transformer.h.0.attn.masked_bias"] = np.full((), -1e4, np.float32)


def _with_tied_head(tensors):
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()


def _turned(tensors):
    """Matrices as [out, in], as of a model whose layers are torch.nn.Linear."""
    for name, tensor in tensors.items():
        if ".attn.c_" in name or ".mlp.c_" in name:
            tensors[name] = np.ascontiguousarray(tensor.T)


@pytest.mark.parametrize("change", [_without_prefix, _with_masks, _with_tied_head, _turned])
def test_other_ways_to_write_the_same(model, folder, change):
    rewrite_tensors(folder, change)
    assert huggingface.load(folder).weights.tobytes() == model.weights.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_numbers_of_16_bits(model, folder, dtype):
    rewrite_tensors(folder, lambda t: t.update({n: a.astype(dtype) for n, a in t.items()}))
    expected = model.weights.astype(dtype).astype(np.float32)
    assert huggingface.load(folder).weights.tobytes() == expected.tobytes()


def test_a_cache_of_links(model, folder, tmp_path):
    """As the hub's own cache is."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    assert huggingface.load(linked).weights.tobytes() == model.weights.tobytes()


def _config(**values):
    return lambda folder: rewrite_json(folder / "config.json", lambda c: c.update(values))


def _tensors(change):
    return lambda folder: rewrite_tensors(folder, change)


def _remove(name):
    return lambda folder: (folder / name).unlink()


def _header(change):
    def damage(folder):
        file = folder / "model.safetensors"
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length:])
    return damage


def _cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def _pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _sharded(folder):
    (folder / "model.safetensors").unlink()
    weight_map = {"transformer.wte.weight": "../../etc/passwd"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _long_header(folder):
    (folder / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")


def _foreign_tokenizer(folder):
    (folder / "andrea_tokenizer.json").unlink()


def _larger_tokenizer(folder):
    (folder / "andrea_tokenizer.json").write_text(json.dumps(BYTE.to_dict()))


WQKV = "transformer.h.0.attn.c_attn.weight"


@pytest.mark.parametrize(("damage", "message"), [
    (_config(model_type="llama"), "model_type is 'llama'"),
    (_config(activation_function="gelu"), "activation_function is 'gelu'"),
    (_config(activation_function=["gelu_new"]), "activation_function is"),
    (_config(layer_norm_epsilon=1e-6), "layer_norm_epsilon is 1e-06"),
    (_config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
    (_config(n_inner=77), "n_inner is 77; .* 120 only"),
    (_config(n_embd="wide"), "n_embd is 'wide'; expected a whole number"),
    (_config(n_layer=10**9), r"config.json: --n-layer 1000000000: must be at most"),
    (_config(n_head=7), "config.json: --d-model 30 cannot be split into --n-head 7"),
    (_config(vocab_size=0), "vocab_size is 0"),
    (_config(vocab_size=60), "knows 60 ids, the tokenizer has 61"),
    (_config(vocab_size=62), r"wte.weight has the shape \[61, 30\]; config.json says \[62, 30\]"),
    (_config(n_positions=1 << 24), r"wpe.weight has the shape \[7, 30\]; .* \[16777216, 30\]"),
    (_config(n_layer=3), "h.2.attn.c_attn.weight is missing"),
    (_config(n_layer=1), "tensor h.1.attn.c_attn.weight is unknown"),
    (_config(tie_word_embeddings=False), "lm_head.weight is missing"),
    (_tensors(lambda t: t.pop("transformer.h.1.mlp.c_fc.bias")), "h.1.mlp.c_fc.bias is missing"),
    (_tensors(lambda t: t.update({"score.weight": np.zeros(2)})), "score.weight is unknown"),
    (_tensors(lambda t: t.update({"wpe.weight": np.zeros(2)})), "there twice"),
    (_tensors(lambda t: t.update({WQKV: t[WQKV].reshape(60, 45)})),
     r"c_attn.weight has the shape \[60, 45\]; config.json says \[30, 90\]"),
    (_tensors(lambda t: t.update({WQKV: t[WQKV].astype(np.int32)})), "c_attn.weight is I32"),
    (_cut, r"not complete: expected \d+ bytes, found \d+"),
    (_remove("config.json"), "is not a checkpoint"),
    (_remove("model.safetensors"), "is not complete: it has no model.safetensors"),
    (_pickled, "pickled weights only"),
    (_sharded, "split into several files"),
    (_long_header, r"a header of 1152921504606846976 bytes"),
    (lambda f: (f / "model.safetensors").write_text("version https://example.invalid"), "header"),
    (lambda f: (f / "config.json").write_text("[" * 10_000), "not JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object"),
    (_header(lambda h: h.update({WQKV: 5})), "damaged"),
    (_header(lambda h: h[WQKV].update(shape=[30, -90])), "damaged"),
    (_header(lambda h: h[WQKV].update(shape=[1 << 40, 1 << 40])), "damaged"),
    (_header(lambda h: h[WQKV].update(data_offsets=[0, 10_800])), "damaged"),
    (_header(lambda h: h[WQKV].update(data_offsets=["a", "b"])), "damaged"),
    (_header(lambda h: h.clear()), "damaged"),
    (_foreign_tokenizer, "tokenizer.json: .* copy andrea_tokenizer.json from there"),
    (_larger_tokenizer, "knows 61 ids, the tokenizer has 257"),
    (lambda f: (f / "andrea_tokenizer.json").write_text("{}"), "tokenizer is damaged"),
], ids=range(39))
def test_foreign_and_damaged_folders(folder, damage, message):
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        interchange.open_model(str(folder), print)
    assert "\n" not in str(caught.value)


def test_an_export_overwrites_nothing_and_appears_whole(model, folder, tmp_path, monkeypatch):
    before = sorted(folder.iterdir())
    for existing in (folder, folder / "config.json"):
        with pytest.raises(UserError, match="exists; give another name"):
            interchange.export(model, str(existing))
    assert sorted(folder.iterdir()) == before

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(interchange, "write_file", full)
    with pytest.raises(UserError, match="No space left"):
        interchange.export(model, str(tmp_path / "new"))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    monkeypatch.undo()
    (tmp_path / "empty").mkdir()
    interchange.export(model, str(tmp_path / "empty"))
    assert len(list((tmp_path / "empty").iterdir())) == 6


# ---- andrea-train --init-from

def train_from(train, source, *arguments):
    return train("t.txt", "--init-from", source, "--steps", 2, "--warmup", 1, "--out", "tuned",
                 "--sample-tokens", 0, "--threads", 1, "--device", "cpu", *arguments, tiny=False)


@pytest.fixture
def source(text):
    """A folder with a model that knows the characters of t.txt."""
    tokenizer = build_tokenizer("char", [(text / "t.txt").read_text()], 1)
    shape = ModelConfig(16, 2, 1, 16, tokenizer.vocab_size)
    interchange.export(random_checkpoint(shape, tokenizer), str(text / "source"))
    return text / "source"


def test_training_begins_with_the_weights(train, text, source):
    result = train_from(train, "source", "--lr", 1e-12, "--min-lr", 0, "--weight-decay", 0)
    assert result.returncode == 0, result.stderr
    assert "of a fresh model" not in result.stderr
    tuned = checkpoint.load(checkpoint.find(str(text / "tuned")))
    loaded = huggingface.load(source)
    assert tuned.model == loaded.model and tuned.tokenizer.to_dict() == loaded.tokenizer.to_dict()
    assert np.allclose(tuned.weights, loaded.weights, atol=1e-7)
    # What was tuned can begin another one, and be resumed.
    shutil.move(text / "tuned", text / "first")
    assert train_from(train, "first").returncode == 0
    result = train("t.txt", "--resume", "--out", "tuned", "--steps", 3, tiny=False)
    assert result.returncode == 0, result.stderr


def test_a_shorter_window(train, text, source):
    result = train_from(train, "source", "--context", 8, "--lr", 1e-12, "--min-lr", 0)
    assert result.returncode == 0, result.stderr
    tuned = checkpoint.load(checkpoint.find(str(text / "tuned")))
    first = huggingface.load(source)
    positions = ParameterTable(first.model).unpadded(first.weights)["wpe"]
    found = ParameterTable(tuned.model).unpadded(tuned.weights)["wpe"]
    assert np.allclose(found, positions[:8], atol=1e-6)


@pytest.mark.parametrize(("flags", "said"), [
    (("--d-model", 32), "--d-model 32 differs from the 16"),
    (("--context", 17), "--context 17 is more than the 16"),
    (("--tokenizer", "byte"), "--tokenizer byte differs from the char"),
    (("--no-tied",), "--tied False differs from the True"),
])
def test_flags_that_disagree_with_the_weights(train, source, flags, said):
    result = train_from(train, "source", *flags)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert said in result.stderr


def test_text_with_characters_the_model_does_not_know(train, text, source):
    (text / "t.txt").write_text("é" * 400)
    result = train_from(train, "source")
    assert result.returncode == 2 and "'é' (U+00E9) at position 0" in result.stderr


def test_headers_cost_no_memory(folder):
    """Four GiB of zeros behind a length that claims them all as the header."""
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write((1 << 32).to_bytes(8, "little"))
        stream.truncate((1 << 32) + 8)
    with pytest.raises(UserError, match="a header of 4294967296 bytes is more than"):
        huggingface.load(folder)
