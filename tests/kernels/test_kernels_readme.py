"""The README of the kernels: its example runs, and its table lists what there is."""

import re
from pathlib import Path

import numpy as np
import pytest

import kernels
from kernels.registry import OPS, load_op, load_spec

README = (Path(kernels.__file__).parent / "README.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_runs():
    scope = {}
    exec(compile(EXAMPLES[0], "README.md", "exec"), scope)
    np.testing.assert_allclose(scope["y"].mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(scope["dbeta"], 4)


def test_the_gpu_example_runs():
    pytest.importorskip("numba_cuda")
    scope = {"kernels": kernels, "x": np.linspace(-3, 3, 32, dtype=np.float32).reshape(4, 8)}
    exec(compile(EXAMPLES[1], "README.md", "exec"), scope)
    expected = np.empty_like(scope["x"])
    load_op("gelu", "oracle").forward(expected, scope["x"])
    np.testing.assert_allclose(scope["y"], expected, atol=1e-6)


def test_the_table_lists_every_op_and_function():
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", README, re.MULTILINE)
    listed = {op: names.split(", ") for op, names in rows}
    assert listed == {op: list(load_spec(op).FUNCTIONS) for op in OPS}
