"""The public functions: they compute what the cpu functions do, and refuse what does not fit."""

import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kernels
from kernels.common.spec import cases_of
from kernels.common.verify import build_arguments, cast, verify
from kernels.registry import OPS, load_op, load_spec, op_table

FUNCTIONS = [(op, name) for op in OPS for name in load_spec(op).FUNCTIONS]


def good_call(op, name, case_number=1):
    """Arguments by name that the public function accepts."""
    return cast(build_arguments(op, name, cases_of(load_spec(op), name)[case_number]), np.float32)


def integers(*values):
    return np.array(values, np.int32)


def refusal(op, name, **changed):
    """The message with which the public function refuses a call that differs in `changed`."""
    arguments = good_call(op, name) | changed
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(getattr(kernels, op), name)(**arguments)
    message = str(caught.value)
    assert message.startswith(f"{op}.{name}: ") and "\n" not in message
    return message


@pytest.mark.parametrize(("op", "name"), FUNCTIONS)
def test_the_public_function_is_checked_and_right(op, name):
    public = getattr(getattr(kernels, op), name)
    for case in cases_of(load_spec(op), name):
        assert verify(op, name, case, public) == []


@pytest.mark.parametrize(("op", "name"), FUNCTIONS)
def test_the_docstring_and_signature_are_those_of_the_op(op, name):
    public = getattr(getattr(kernels, op), name)
    *parameters, stream = inspect.signature(public).parameters.values()
    reference = inspect.signature(getattr(load_op(op, "oracle"), name)).parameters
    assert parameters == list(reference.values()) and stream.name == "stream"
    for argument in load_spec(op).FUNCTIONS[name].arrays:
        assert re.search(rf"^ +{argument} \[", public.__doc__, re.MULTILINE)


@pytest.mark.parametrize(("op", "name"), FUNCTIONS)
def test_every_array_is_checked(op, name):
    for argument in load_spec(op).FUNCTIONS[name].arrays:
        array = good_call(op, name)[argument]
        if array is None:
            continue
        other = np.float64 if array.dtype == np.float32 else np.int64
        message = refusal(op, name, **{argument: array.astype(other)})
        assert argument in message and array.dtype.name in message and other.__name__ in message
        assert "list" in refusal(op, name, **{argument: array.tolist()})
        spread_out = np.repeat(array, 2, axis=-1)[..., ::2]
        if spread_out.size > 1:
            assert "C-contiguous" in refusal(op, name, **{argument: spread_out})
        message = refusal(op, name, **{argument: np.zeros((0, *array.shape[1:]), array.dtype)})
        assert f"{argument} has shape" in message


@pytest.mark.parametrize(("op", "name"), FUNCTIONS)
def test_sizes_that_disagree_are_refused(op, name):
    for argument, array in good_call(op, name).items():
        if not isinstance(array, np.ndarray) or argument in ("wte", "dwte", "wpe", "dwpe"):
            continue  # a longer table is right too
        if op == "grad_norm" and argument == "grads":
            continue  # any length is right
        longer = np.zeros((len(array) + 1, *array.shape[1:]), array.dtype)
        assert "expected" in refusal(op, name, **{argument: longer})


@pytest.mark.parametrize(("op", "name"), FUNCTIONS)
def test_overlapping_outputs_are_refused_unless_in_place_is_allowed(op, name):
    function, public = load_spec(op).FUNCTIONS[name], getattr(getattr(kernels, op), name)
    arrays = {n: a for n, a in good_call(op, name).items() if isinstance(a, np.ndarray)}
    for output, other in itertools.product(function.outputs.keys() & arrays.keys(), arrays):
        alike = ((*arrays[n].shape, arrays[n].dtype) for n in (output, other))
        if other == output or len(set(alike)) > 1:
            continue
        arguments = good_call(op, name)
        arguments[output] = arguments[other]
        allowed = function.in_place.get(output, ()), function.in_place.get(other, ())
        if other in allowed[0] or output in allowed[1]:
            public(**arguments)
        else:
            with pytest.raises(ValueError, match="overlaps"):
                public(**arguments)


def test_shifted_overlap_is_refused_even_where_in_place_is_allowed():
    memory = np.zeros(101, np.float32)
    with pytest.raises(ValueError, match="overlaps"):
        kernels.gelu.backward(memory[1:], memory[:-1], np.zeros(100, np.float32))


def test_a_read_only_output_is_refused():
    y, x = np.zeros((2, 5), np.float32)
    y.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.gelu.forward(y, x)


@pytest.mark.parametrize("bad", [-1, 61, 2**31 - 1])
def test_ids_out_of_range_are_refused_before_they_are_used(bad):
    ids = good_call("embedding", "forward")["ids"]
    ids[1, 3] = bad
    message = refusal("embedding", "forward", ids=ids)
    assert f"ids[1, 3] is {bad}, expected 0 to 60" in message
    assert "ids[1, 3]" in refusal("embedding", "backward", ids=ids)


@pytest.mark.parametrize("bad", [-2, 61, 100])
def test_targets_out_of_range_are_refused(bad):
    targets = good_call("cross_entropy", "forward")["targets"]
    targets[2] = bad
    for name in ("forward", "backward"):
        message = refusal("cross_entropy", name, targets=targets)
        assert f"targets[2] is {bad}, expected -1 to 60" in message


@pytest.mark.parametrize(
    ("op", "name", "changed", "words"),
    [
        ("embedding", "forward", {"start": integers(3)}, "start[0] is 3, expected 0 to 2"),
        ("embedding", "forward", {"start": integers(-1)}, "start[0] is -1, expected 0 to 2"),
        ("embedding", "forward", {"start": 1}, "start is int, expected a NumPy array"),
        ("attention", "append", {"start": integers(25)}, "start[0] is 25, expected 0 to 24"),
        ("attention", "decode", {"position": integers(33)}, "position[0] is 33, expected 0 to"),
        ("cross_entropy", "forward", {"vocab_size": 129}, "vocab_size is 129, expected 1 to 128"),
        ("layernorm", "forward", {"gamma": None}, "gamma is None, expected gamma, beta"),
        ("layernorm", "backward", {"dbeta": None}, "dbeta is None"),
        ("layernorm", "forward", {"x": None}, "x is None, expected an array [N, d] float32"),
        ("layernorm", "forward", {"eps": "1e-5"}, "eps is '1e-5', expected float"),
        ("matmul", "forward", {"transpose_w": 1}, "transpose_w is 1, expected bool"),
        ("matmul", "forward", {"transpose_w": True}, "w has shape (30, 90), expected (90, 30)"),
        ("adamw", "update", {"n_decay": 32}, "n_decay is 32, expected 0 to 31"),
        ("adamw", "update", {"rates": np.zeros(3, np.float32)}, "rates[1:] is [0.0, 0.0]"),
        ("adamw", "update", {"clip": -1.0}, "clip is -1.0, expected 0 or more"),
        ("grad_norm", "forward", {"norm": np.zeros(2, np.float32)}, "norm has shape (2,)"),
    ],
)
def test_refusals_say_what_was_given_and_expected(op, name, changed, words):
    assert words in refusal(op, name, **changed)


def test_heads_that_do_not_divide_the_features_are_refused_with_those_that_do():
    out, qkv = np.zeros((7, 30), np.float32), np.zeros((7, 90), np.float32)
    with pytest.raises(ValueError, match="30 features do not divide into 4 heads; use one of 1, 2"):
        kernels.attention.forward(out, np.zeros((1, 4, 7), np.float32), qkv)


def test_arrays_in_different_places_are_refused():
    class OnDevice:
        def __init__(self, array):
            self.__cuda_array_interface__ = array.__array_interface__
            self.shape = array.shape

    x = np.zeros(5, np.float32)
    with pytest.raises(TypeError, match="y is in host memory but x in device memory"):
        kernels.gelu.forward(np.zeros(5, np.float32), OnDevice(x))


def test_integer_scalars_count_as_floats():
    arguments = good_call("cross_entropy", "backward") | {"scale": 1}
    kernels.cross_entropy.backward(**arguments)
    assert np.isfinite(arguments["dlogits"]).all()


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="softmax"):
        _ = kernels.softmax
    with pytest.raises(ValueError, match="unknown backend 'tpu'"):
        op_table("tpu")
    with pytest.raises(ValueError, match="unknown op 'softmax'"):
        load_op("softmax", "cpu")
    assert set(OPS) <= set(dir(kernels))
    assert kernels.IDENTITY == "andrea-numba"


@pytest.mark.parametrize(
    "statement", ["import kernels", "import kernels.layernorm", "import kernels.registry"]
)
def test_importing_loads_no_compiler_and_sets_no_environment(statement):
    program = (
        f"import os, sys; before = dict(os.environ); {statement}; "
        "assert 'numba' not in sys.modules; assert dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_folder_works_as_a_subpackage(tmp_path):
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "__init__.py").touch()
    (tmp_path / "host" / "ops").symlink_to(Path(kernels.__file__).parent)
    program = (
        "import sys, numpy as np, host.ops as ops\n"
        "x, w, y = np.ones((2, 3), 'f'), np.ones((3, 4), 'f'), np.zeros((2, 4), 'f')\n"
        "ops.matmul.forward(y, None, x, w, None, None, False); assert (y == 3).all()\n"
        "assert 'kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
