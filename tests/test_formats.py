"""What FORMATS.md shows works, and what it says of names is so."""

import re

import numpy as np
from helpers import ROOT

from andrea_numba import checkpoint, huggingface
from andrea_numba.config import ModelConfig
from andrea_numba.parameters import ParameterTable
from tests.stored import Stored

PAGE = (ROOT / "andrea_numba" / "FORMATS.md").read_text(encoding="utf-8")


def test_ten_lines_of_numpy_read_a_checkpoint(tmp_path):
    stored = Stored()
    folder = stored.save(tmp_path / "run", 3)
    [code, _] = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 10
    names = {"folder": str(folder)}
    exec(code, names)
    expected = stored.table.unpadded(checkpoint.load(folder).weights)
    assert names["metadata"]["step"] == 3
    assert names["weights"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(names["weights"][name], tensor)


def test_the_table_has_every_name():
    rows = re.findall(r"^\| (`(?:blocks|w|ln_f)\S.*?) \| .* \| (`.*`) \|$", PAGE, re.M)
    said = {}
    for ours, theirs in rows:
        ours, theirs = re.findall("`(.*?)`", ours), re.findall("`(.*?)`", theirs)
        first = theirs[0].removesuffix(".weight")
        said |= {name if "." in name or i == 0 else "blocks.N." * ("blocks" in ours[0]) + name:
                 t if i == 0 else first + t
                 for i, (name, t) in enumerate(zip(ours, theirs, strict=True))}
    table = ParameterTable(ModelConfig(n_layer=1, vocab_size=5, tied=False))
    expected = {name.replace(".0.", ".N."): huggingface.name_of(name).replace(".0.", ".N.")
                for name in table.tensors}
    assert said == expected
