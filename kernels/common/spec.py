"""What an op's spec.py is made of.

One table per function says what its arrays are. The documentation, the argument checks of the
public functions, the tests and the bench all read that table. Beside `FUNCTIONS`, a spec holds

    CASES, BENCH_CASES   tuples of dicts: a size for every symbol of the shapes, and options;
                         with precision="bf16" the operands are bfloat16, on a GPU or a CPU that can
    make_inputs(rng, case) -> dict    inputs by argument name, in float64 (ids: int32); an output
                         is named only to say that it is None in this case
    GRADIENTS            {gradient: argument of forward}, as computed by backward
    objective(outputs, inputs)        the number of which they are the gradients
    TOLERANCE            allowed error as a multiple of the error of the oracle run in float32

Arguments of backward that are outputs of forward (mean, rstd, ...) come from the oracle's forward.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

Arguments = Mapping[str, Any]
Case = Mapping[str, Any]
Shape = str | Callable[[Arguments], str]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# By the word in a table. All operands of one call have the same dtype: the precision of its
# products.
DTYPES = {"float32": (np.dtype(np.float32),), "int32": (np.dtype(np.int32),),
          "bfloat16": (BFLOAT16,), "operand": (np.dtype(np.float32), BFLOAT16)}


@dataclass(frozen=True)
class Array:
    """A parsed shape: "int32 B T ?" has dims ("B", "T"), dtype "int32" and may be None.

    `dtype` is a key of DTYPES.
    """

    dims: tuple[str, ...]
    dtype: str
    optional: bool

    def __str__(self) -> str:
        dtypes = " or ".join(map(str, DTYPES[self.dtype]))
        return f"[{', '.join(self.dims)}] {dtypes}" + (" or None" if self.optional else "")

    def shape(self, sizes: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape in numbers; `sizes` gives each symbol's value (and "..." as `shape`)."""
        if self.dims == ("...",):
            return tuple(sizes["shape"])
        return tuple(math.prod(size_of(f, sizes) for f in dim.split("*")) for dim in self.dims)


def size_of(symbol: str, sizes: Mapping[str, Any]) -> int:
    """The value of one factor of a dimension: a number or a symbol."""
    return int(symbol) if symbol.isdigit() else sizes[symbol]


def parse(shape: Shape, arguments: Arguments) -> Array:
    """Read a table entry: an optional dtype, the dims, an optional "?"."""
    words = (shape if isinstance(shape, str) else shape(arguments)).split()
    optional = words[-1] == "?"
    dtype = words[0] if words[0] in DTYPES else "float32"
    dims = [word for word in words if word not in DTYPES and word != "?"]
    return Array(tuple(dims), dtype, optional)


@dataclass(frozen=True)
class Function:
    """One function of an op. Each mapping goes from an argument's name to its shape.

    A shape is written as symbols separated by blanks: "N d", "B*T 3*d", "int32 B T". "..." is any
    shape, the same for every array so marked; a last "?" means that the argument may be None. A
    shape that depends on an option is a function of the arguments. The dtype is float32 unless a
    word of DTYPES comes first.
    """

    inputs: Mapping[str, Shape]
    flops: Callable[[Case], int]
    overwritten: Mapping[str, Shape] = field(default_factory=dict)
    added_to: Mapping[str, Shape] = field(default_factory=dict)
    updated: Mapping[str, Shape] = field(default_factory=dict)
    in_place: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Outputs that may be the same array as one of these inputs."""
    require: Callable[[Arguments], None] | None = None
    """Conditions beyond shapes: raises ValueError with what was given, expected, and to do."""
    bytes_moved: Callable[[Case], int] | None = None
    """Where the arrays' sizes are not the memory traffic, as when only some rows are read."""
    cases: tuple[Case, ...] = ()
    """Used instead of the spec's CASES where this function needs its own; so bench_cases."""
    bench_cases: tuple[Case, ...] = ()

    @property
    def outputs(self) -> dict[str, Shape]:
        return {**self.overwritten, **self.added_to, **self.updated}

    @property
    def arrays(self) -> dict[str, Shape]:
        return {**self.outputs, **self.inputs}

    def traffic(self, case: Case, arguments: Arguments) -> int:
        """Bytes that must move: each array once, and twice where it is read and written."""
        if self.bytes_moved:
            return self.bytes_moved(case)
        total = 0
        for name, shape in self.arrays.items():
            if arguments[name] is not None:
                array = parse(shape, arguments)
                passes = 2 if name in self.added_to or name in self.updated else 1
                itemsize = arguments[name].dtype.itemsize
                total += passes * itemsize * math.prod(array.shape(case))
        return total

    def describe(self) -> Iterator[str]:
        """One line per array, as appended to the docstring of the public function."""
        for rule in ("overwritten", "added_to", "updated", "inputs"):
            for name, shape in getattr(self, rule).items():
                described = " or ".join(sorted({str(parse(shape, o)) for o in _OPTIONS}))
                note = {"inputs": "", "added_to": ", added to", "updated": ", updated in place"}
                alias = "".join(f"; may be {other} itself" for other in self.in_place.get(name, ()))
                yield f"{name} {described}{note.get(rule, ', overwritten')}{alias}"


_OPTIONS = ({"transpose_w": False, "residual": None}, {"transpose_w": True, "residual": True})


def is_bf16(array: Any) -> bool:
    """Whether an array holds bfloat16 numbers."""
    return array.dtype == BFLOAT16


def cases_of(spec: Any, name: str, backend: str = "oracle") -> tuple[Case, ...]:
    """The cases of one function of an op that a backend can compute."""
    cases = spec.FUNCTIONS[name].cases or spec.CASES
    return tuple(case for case in cases if case.get("precision") != "bf16" or has_bf16(backend))


def has_bf16(backend: str) -> bool:
    """Whether operands of this backend may be bfloat16."""
    if backend != "cpu":
        return backend == "gpu"
    from .cpu_features import BF16

    return BF16


def label(case: Case) -> str:
    """A case as a short test name: "B=3 T=7 d=30"."""
    return " ".join(f"{key}={value}" for key, value in case.items())
