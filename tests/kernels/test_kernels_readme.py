"""The README of the kernels: its example runs, and its table lists what there is."""

import re
from pathlib import Path

import numpy as np

import kernels
from kernels.registry import OPS, load_spec

README = (Path(kernels.__file__).parent / "README.md").read_text(encoding="utf-8")


def test_the_example_runs():
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    np.testing.assert_allclose(scope["y"].mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(scope["dbeta"], 4)


def test_the_table_lists_every_op_and_function():
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", README, re.MULTILINE)
    listed = {op: names.split(", ") for op, names in rows}
    assert listed == {op: list(load_spec(op).FUNCTIONS) for op in OPS}
