"""The file of the published ANDREA models: written, read, recognised, refused."""

import dataclasses

import numpy as np
import pytest
from helpers import logits, random_batch, random_checkpoint

from andrea_numba import checkpoint, interchange, legacy
from andrea_numba.config import PRESETS, ModelConfig
from andrea_numba.errors import UserError
from andrea_numba.parameters import ParameterTable
from tests.stored import TOKENIZER, Stored

NANO = ModelConfig(vocab_size=257)
SWITCHES = [dict(tied=tied, bias=bias, norm_affine=norm)
            for tied in (True, False) for bias in (True, False) for norm in (True, False)]


def test_every_variant_is_recognised_by_its_size():
    found = legacy.layouts()
    assert [models for models in found.values() if len(models) != 1] == []
    assert len(found) == 8 * 7  # five presets, two of them with two vocabularies
    published = {12_780_288: "andrea-12m", 98_698_752: "andrea-120m", 480_513_024: "andrea-480m"}
    for count, preset in published.items():
        [model] = found[count]
        assert model == ModelConfig(**PRESETS[preset]["model"], tied=False, bias=False,
                                    norm_affine=False)
    [literal] = found[92_331_264]
    assert literal == ModelConfig(**PRESETS["andrea-120m"]["model"])


def saved(tmp_path, model):
    stored = Stored(model)
    return stored, checkpoint.load(stored.save(tmp_path / "run", 7))


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_what_is_written_comes_back(switches, tmp_path):
    model = dataclasses.replace(NANO, **switches)
    stored, loaded = saved(tmp_path, model)
    file = tmp_path / "nano.bin"
    [notice] = interchange.export(loaded, str(file))
    assert "nano.tokenizer.json" in notice
    raw = np.fromfile(file, "<i4", 2)
    assert raw.tolist() == [7, stored.table.count]
    assert file.stat().st_size == 8 + 12 * stored.table.count
    step, found, arrays = legacy.read(file, regions=3)
    assert (step, found) == (7, model)
    for array, expected in zip(arrays, stored.arrays(7), strict=True):
        assert array.tobytes() == expected.tobytes()
    opened = interchange.open_model(str(file), print)
    assert (opened.step, opened.tokenizer.to_dict()) == (7, TOKENIZER.to_dict())


def test_the_order_of_the_weights(tmp_path):
    """As the module says it: matrices as [out, in], q, k and v one after the other."""
    model = dataclasses.replace(NANO, tied=False)
    _, loaded = saved(tmp_path, model)
    interchange.export(loaded, str(tmp_path / "m.bin"))
    numbers = np.fromfile(tmp_path / "m.bin", "<f4", offset=8)
    tensors = ParameterTable(model).unpadded(loaded.weights)
    d, place = 128, 0

    def follows(expected):
        nonlocal place
        found = numbers[place:place + expected.size].reshape(expected.shape)
        place += expected.size
        assert np.array_equal(found, expected)

    follows(tensors["wte"])
    follows(tensors["wpe"])
    block = {name: tensors["blocks.0." + name] for name in (
        "ln_1_gamma", "ln_1_beta", "w_qkv", "b_qkv", "w_o", "b_o", "ln_2_gamma")}
    follows(block["ln_1_gamma"])
    follows(block["ln_1_beta"])
    for part in range(3):
        follows(block["w_qkv"][:, part * d:(part + 1) * d].T)
        follows(block["b_qkv"][part * d:(part + 1) * d])
    follows(block["w_o"].T)
    follows(block["b_o"])
    follows(block["ln_2_gamma"])
    place = ParameterTable(model).count - tensors["w_head"].size
    follows(tensors["w_head"])


def test_without_its_tokenizer_it_is_still_a_model(tmp_path):
    _, loaded = saved(tmp_path, NANO)
    interchange.export(loaded, str(tmp_path / "m.bin"))
    (tmp_path / "m.tokenizer.json").unlink()
    opened = interchange.open_model(str(tmp_path / "m.bin"), print)
    assert opened.tokenizer is None
    ids, _ = random_batch(NANO, np.random.default_rng(0), 1)
    assert np.array_equal(logits(opened, ids), logits(loaded, ids))
    [notice] = interchange.export(opened, str(tmp_path / "folder"))
    assert "none is written" in notice
    (tmp_path / "m.tokenizer.json").write_text('{"name": "byte", "start_token": -1}')
    with pytest.raises(UserError, match="tokenizer is damaged"):
        interchange.open_model(str(tmp_path / "m.bin"), print)


@pytest.mark.parametrize(("raw", "message"), [
    (b"", "not a legacy ANDREA file"),
    (b"\1\0\0", "not a legacy ANDREA file"),
    (b"\0" * 8, "not a legacy ANDREA file"),
    (b"\xff" * 800, "not a legacy ANDREA file"),
    (b"\1\0\0\0\2\0\0\0" + b"\0" * 23, "it would have 32 bytes, found 31"),
    (b"\1\0\0\0\2\0\0\0" + b"\0" * 25, "it would have 32 bytes, found 33"),
    (b"\1\0\0\0\2\0\0\0" + b"\0" * 24, "2 parameters, the number of no variant of the presets"),
    (b"Once upon a time there was a text.", "not a legacy ANDREA file, or not complete"),
], ids=range(8))
def test_other_files_are_refused(tmp_path, raw, message):
    (tmp_path / "m.bin").write_bytes(raw)
    with pytest.raises(UserError, match=message):
        interchange.open_model(str(tmp_path / "m.bin"), print)


def test_a_short_copy_is_refused(tmp_path):
    _, loaded = saved(tmp_path, NANO)
    interchange.export(loaded, str(tmp_path / "m.bin"))
    whole = (tmp_path / "m.bin").read_bytes()
    (tmp_path / "m.bin").write_bytes(whole[:-4])
    with pytest.raises(UserError, match=f"would have {len(whole)} bytes, found {len(whole) - 4}"):
        interchange.open_model(str(tmp_path / "m.bin"), print)


@pytest.mark.parametrize(("changes", "message"), [
    (dict(context=64), "no variant of the presets"),
    (dict(n_head=2), "as another variant"),
])
def test_what_could_not_be_recognised_is_not_written(tmp_path, changes, message):
    _, loaded = saved(tmp_path, dataclasses.replace(NANO, **changes))
    with pytest.raises(UserError, match=message):
        interchange.export(loaded, str(tmp_path / "m.bin"))
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_model_without_moments_is_not_written(tmp_path):
    with pytest.raises(UserError, match="no AdamW moments"):
        interchange.export(random_checkpoint(NANO, TOKENIZER), str(tmp_path / "m.bin"))
