"""Compare an implementation with the oracle: one comparison for the tests and for the bench.

The float64 oracle gives the expected result. The same formula run by NumPy in float32 shows what
rounding costs on this very input, and the allowed error is a small multiple of that error. In a
case in bfloat16, NumPy gets operands that were rounded to it, and so does the implementation.
"""

import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..registry import load_op, load_spec
from .device_array import DeviceArray
from .spec import DTYPES, Case, Function, label, parse

GUARD_WORDS = 17  # odd, so that the arrays between guards have no more than 4-byte alignment
ALIGNED_GUARD_WORDS = 64  # for the kernels that need 16 bytes: what allocators give
GUARD_BITS = 0x7FC0DEAD  # a NaN: reading it shows, and any write to it shows
BF16_FACTOR = 2  # of the error of NumPy with rounded operands
FLOOR_ULPS = 4  # where the float32 run happens to be exact, this much of the largest value


def build_arguments(op: str, name: str, case: Case) -> dict[str, Any]:
    """All arguments of one call in signature order, in float64.

    Overwritten arrays hold NaN, arrays that are added to hold random values.
    """
    spec, oracle = load_spec(op), load_op(op, "oracle")
    function: Function = spec.FUNCTIONS[name]
    rng = np.random.default_rng(zlib.crc32(f"{op} {label(case)}".encode()))
    given = spec.make_inputs(rng, case)
    parameters = inspect.signature(getattr(oracle, name)).parameters
    if any(p not in given and p not in function.outputs for p in parameters):
        arguments = build_arguments(op, "forward", case)
        oracle.forward(**arguments)
        given = {**arguments, **given}
    for output in function.overwritten.keys() | function.added_to.keys():
        if output not in given or given[output] is not None:
            given[output] = np.full(parse(function.outputs[output], given).shape(case), np.nan)
    for output in function.added_to:
        if given[output] is not None:
            given[output] = rng.standard_normal(given[output].shape)
    return {parameter: given[parameter] for parameter in parameters}


def cast(arguments: Mapping[str, Any], dtype: type) -> dict[str, Any]:
    """A copy of the arguments with every array of real numbers in `dtype`."""
    return {
        name: value.astype(value.dtype if value.dtype == np.int32 else dtype)
        if isinstance(value, np.ndarray)
        else value
        for name, value in arguments.items()
    }


def as_stored(function: Function, case: Case, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the arguments in the dtypes of the function's table, operands as the case says."""
    stored = dict(arguments)
    for name, shape in function.arrays.items():
        if arguments[name] is not None:
            dtypes = DTYPES[parse(shape, arguments).dtype]
            stored[name] = arguments[name].astype(dtypes[-1 if is_in_bf16(case) else 0])
    return stored


def is_in_bf16(case: Case) -> bool:
    return case.get("precision") == "bf16"


def verify(op: str, name: str, case: Case, implementation: Callable[..., None],
           backend: str = "cpu", guard_words: int = GUARD_WORDS) -> list[str]:
    """What is wrong with `implementation` as `<op>.<name>` on this case; empty if nothing.

    Checked: every output within the allowed error, the write rule, memory around every array
    untouched, inputs unchanged, the same bits from a second call, and each call in place that the
    op's table allows. With backend "gpu" it is called with device arrays.
    """
    spec, oracle = load_spec(op), getattr(load_op(op, "oracle"), name)
    function: Function = spec.FUNCTIONS[name]
    exact = build_arguments(op, name, case)
    arguments = as_stored(function, case, exact)
    expected = cast(exact if is_in_bf16(case) else arguments, np.float64)
    yardstick = cast(arguments, np.float32)
    oracle(**expected)
    oracle(**yardstick)
    yardstick = as_stored(function, case, yardstick)
    factor = BF16_FACTOR if is_in_bf16(case) else spec.TOLERANCE

    def call(in_place: dict[str, str]) -> tuple[dict[str, np.ndarray], list[str]]:
        results, faults = _run(function, implementation, arguments, in_place, backend,
                               guard_words)
        for output in results:
            fault = compare(results[output], expected[output], yardstick[output], factor)
            if fault:
                faults.append(f"{output}: {fault}")
        return results, faults

    first, faults = call({})
    again, _ = call({})
    faults += [
        f"{output}: a second call gives other bits"
        for output in first
        if first[output].tobytes() != again[output].tobytes()
    ]
    for output, sources in function.in_place.items():
        for source in sources:
            if arguments[source] is None:
                continue
            faults += [f"with {output} = {source}: {fault}" for fault in call({output: source})[1]]
    return faults


def _run(
    function: Function,
    implementation: Callable[..., None],
    arguments: Mapping[str, Any],
    in_place: Mapping[str, str],
    backend: str,
    guard_words: int,
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Call with copies that have guard words around them; returns the outputs and faults."""
    arrays = {n: a for n, a in arguments.items() if isinstance(a, np.ndarray)}
    guarded = {name: _guarded(array, guard_words) for name, array in arrays.items()}
    memory = {name: upload(buffer, backend) for name, buffer in guarded.items()}
    views = {name: _inside(memory[name], array) for name, array in arrays.items()}
    for output, source in in_place.items():
        views[output] = views[source]
        memory[output] = memory[source]
    implementation(*({**arguments, **views}.values()))
    buffers = {name: download(memory[name], backend) for name in arrays}
    faults = []
    for name, array in arrays.items():
        untouched = _guarded(_inside(buffers[name], array), guard_words)
        if buffers[name].tobytes() != untouched.tobytes():
            faults.append(f"{name}: memory beside the array was written")
        is_written = name in function.outputs or name in in_place.values()
        if not is_written and _inside(buffers[name], array).tobytes() != array.tobytes():
            faults.append(f"{name}: an input was changed")
    results = {name: _inside(buffers[name], arrays[name]) for name in function.outputs
               if name in arrays}
    return results, faults


def _guarded(array: np.ndarray, guard_words: int) -> np.ndarray:
    buffer = np.full(-(-array.nbytes // 4) + 2 * guard_words, GUARD_BITS, np.uint32)
    _inside(buffer.view(np.uint8), array)[...] = array
    return buffer.view(np.uint8)


def _inside(buffer: Any, array: np.ndarray) -> Any:
    """The part of a buffer's bytes, in host or device memory, that lies between its guards."""
    start = (buffer.size - array.nbytes) // 8 * 4
    return buffer[start:start + array.nbytes].view(array.dtype).reshape(array.shape)


def upload(value: Any, backend: str) -> Any:
    """An array where `backend` wants it; anything else as it is."""
    if backend != "gpu" or not isinstance(value, np.ndarray):
        return value
    from .cuda import cuda

    owner = cuda.to_device(value.reshape(-1).view(np.uint8))
    return DeviceArray(owner, owner.device_ctypes_pointer.value, value.shape, value.dtype)


def download(array: Any, backend: str) -> np.ndarray:
    """The counterpart of `upload`."""
    if backend != "gpu":
        return array
    return array.owner.copy_to_host().view(array.dtype).reshape(array.shape)


def compare(
    result: np.ndarray, expected: np.ndarray, yardstick: np.ndarray, factor: float
) -> str | None:
    """None if `result` is close enough to `expected`, else one sentence.

    Allowed is `factor` times the largest error of `yardstick` (the oracle in float32), but not
    less than a few units in the last place of the largest expected value. NaN and infinity must
    stand exactly where the oracle has them.
    """
    result, yardstick = result.astype(np.float64), yardstick.astype(np.float64)
    finite = np.isfinite(expected)
    wrong = np.isfinite(result) != finite
    if wrong.any():
        return f"{int(wrong.sum())} of {wrong.size} elements are (not) finite, unlike the oracle's"
    if not finite.any():
        return None
    error = np.abs(result - expected, where=finite, out=np.zeros_like(expected))
    reference = np.abs(yardstick - expected, where=finite, out=np.zeros_like(expected))
    scale = np.abs(expected[finite]).max()
    allowed = factor * reference.max() + FLOOR_ULPS * np.finfo(np.float32).eps * scale
    if error.max() <= allowed:
        return None
    place = tuple(int(i) for i in np.unravel_index(error.argmax(), error.shape))
    return f"error {error.max():.3g} at {place}, allowed {allowed:.3g}"
