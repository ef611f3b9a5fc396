"""Damage to the PTX of correct kernels is noticed, by a wrong result or by a report.

Each mutant differs from the compiled PTX in one instruction. Outputs start as NaN, so a result that
is not written is wrong.
"""

import contextlib
import random
import re
import signal
from dataclasses import dataclass

import numpy as np
import pytest
import vgpu
from numba import cuda
from vgpu.examples import matmul, reductions, tensor_core

pytestmark = pytest.mark.skipif(not vgpu.installed(), reason="runs damaged code")
PER_OPERATOR = 8  # mutants of one kernel by one operator, at most
SECONDS = 2  # of processor time; a mutant that runs longer hangs
ADDRESS = r"(?<=\[)(%\w+)(?:\+(-?\d+))?(?=\])"


def moved_by(nbytes):
    return lambda m: f"{m[1]}+{int(m[2] or 0) + nbytes}"


def one_more(m):
    return f"{m[1]}{int(m[2]) + 1}{m[3]}"


STRICT = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
NUMBER = r"(?:[suf]\d+|b64|b32)"
# name: (pattern of the instructions it applies to, pattern to replace, replacement)
OPERATORS = {
    "barrier dropped": (r"bar(rier)?\.(cta\.)?sync\b", r".*", ""),
    "warp barrier dropped": (r"bar\.warp\.sync\b", r".*", ""),
    "copy wait dropped": (r"cp\.async\.wait", r".*", ""),
    "copy commit dropped": (r"cp\.async\.commit", r".*", ""),
    "store dropped": (r"(@!?%p\d+ )?st\.", r".*", ""),
    "compare off by one": (r"setp\.(lt|le|gt|ge)\.", r"\.(lt|le|gt|ge)\.",
                           lambda m: f".{STRICT[m[1]]}."),
    "compare swapped": (r"setp\.(lt|le|gt|ge)\.", r", (\S+), (\S+);", r", \2, \1;"),
    "difference swapped": (rf"sub\.(rn\.)?{NUMBER} ", r", (\S+), (\S+);", r", \2, \1;"),
    "sum to difference": (rf"add\.(rn\.)?{NUMBER} ", r"^add", "sub"),
    "fma to sum": (r"fma\.rn\.f32", r"fma\.rn\.f32(.*), \S+, (\S+), (\S+);", r"add.f32\1, \2, \3;"),
    "product to sum": (r"mul\.(rn\.)?f32", r"^mul", "add"),
    "predicate negated": (r"@!?%p\d+ ", r"@(!?)", lambda m: "@" if m[1] else "@!"),
    "address 4 bytes on": (r"(ld|st)\.(global|shared)", ADDRESS, moved_by(4)),
    "address 2 bytes on": (r"(ld|st)\.\S*16", ADDRESS, moved_by(2)),
    "address 16 bytes on": (r"cp\.async\.c|ldmatrix", ADDRESS, moved_by(16)),
    "shuffle one lane on": (r"shfl\.sync", r"^(shfl\.\S+\s+\S+ \S+ )(\d+)(,.*)$", one_more),
}


@dataclass(frozen=True)
class Launch:
    """A correct launch: arrays in the order of the parameters, and what they hold afterwards."""

    grid: object
    block: object
    arrays: tuple
    expected: dict  # index of an array -> its values after the launch


def output(*shape):
    return np.full(shape, np.nan, np.float32)


def normal(*shape):
    return np.random.default_rng(shape[-1]).standard_normal(shape).astype(np.float32)


def tiled_matmul(m, k, n):
    a, b = normal(m, k), normal(k, n)
    grid = (-(-n // 16), -(-m // 16))
    return Launch(grid, (16, 16), (a, b, output(m, n)), {2: a.astype(np.float64) @ b})


def block_sums(length):
    x = np.random.default_rng(0).integers(-99, 99, length).astype(np.float32)
    return Launch(-(-length // 128), 128, (x, np.ones(1, np.float32)), {1: x.sum() + 1})


def layernorm(rows, width):
    x, gain, bias = normal(rows, width), normal(width), normal(width)
    mean = x.mean(axis=1, dtype=np.float64)
    scale = 1 / np.sqrt(x.var(axis=1, dtype=np.float64) + 1e-5)
    out = (x - mean[:, None]) * scale[:, None] * gain + bias
    return Launch(-(-rows // 4), (32, 4),
                  (x, gain, bias, output(rows, width), output(rows), output(rows)),
                  {3: out, 4: mean, 5: scale})


def warp_scan(length):
    x = normal(length)
    sums = x.reshape(-1, 32).cumsum(axis=1, dtype=np.float64)
    return Launch(length // 128, 128, (x, output(length)), {1: sums.ravel()})


def bf16_matmul(m, k, n):
    a, b = tensor_core.to_bf16(normal(m, k)), tensor_core.to_bf16(normal(k, n))
    exact = tensor_core.from_bf16(a).astype(np.float64) @ tensor_core.from_bf16(b)
    return Launch((n // 64, m // 64), 128, (a, b, output(m, n)), {2: exact})


# name: (kernel, launches). Several sizes, so that every part of an unrolled loop has its turn.
SUBJECTS = {
    "tiled matmul": (matmul.tiled_matmul, [tiled_matmul(20, 40, 23), tiled_matmul(1, 32, 16)]),
    "block sums": (reductions.block_sums, [block_sums(300)]),
    "layernorm": (reductions.layernorm_rows,
                  [layernorm(5, 296), layernorm(1, 128), layernorm(2, 40)]),
    "warp scan": (reductions.running_sums, [warp_scan(256)]),
    "bf16 matmul": (tensor_core.bf16_matmul, [bf16_matmul(128, 96, 128)]),
}


def compiled(kernel, launch):
    """The PTX text and the kernel's name in it."""
    special = kernel.specialize(*map(cuda.to_device, launch.arrays))
    library = next(iter(special.overloads.values()))._codelibrary
    return library.get_cubin().ptx, library._entry_name


def as_parameters(array, memory):
    """What numba-cuda passes for an array: no owner, size, item size, data, shape and strides."""
    sizes = (0, 0, array.size, array.itemsize), (*array.shape, *array.strides)
    return [*map(np.int64, sizes[0]), memory, *map(np.int64, sizes[1])]


@contextlib.contextmanager
def time_limit():
    def stop(signum, frame):
        raise TimeoutError
    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def symptom(launches, text, name):
    """What is wrong with the text: "" if no launch shows anything."""
    return next(filter(None, (symptom_of(launch, text, name) for launch in launches)), "")


def symptom_of(launch, text, name):
    memories = [array.copy() for array in launch.arrays]
    arguments = [parameter for pair in zip(launch.arrays, memories, strict=True)
                 for parameter in as_parameters(*pair)]
    try:
        with time_limit():
            vgpu.run_ptx(text, name, launch.grid, launch.block, arguments)
    except TimeoutError:
        return "hangs"
    except vgpu.VirtualGPUError as error:
        return error.kind
    for index, (array, memory) in enumerate(zip(launch.arrays, memories, strict=True)):
        expected = np.array(launch.expected.get(index, array), np.float64)
        if not np.abs(memory - expected).max() <= 1e-6 * np.abs(expected).max():
            return "wrong result"
    return ""


def instructions(text):
    """The instruction of each line, without comments and superfluous blanks."""
    return [re.sub(r"\s+", " ", line.partition("//")[0]).strip() for line in text.splitlines()]


class Equivalents:
    """Mutants that do what the kernel does, for these reasons and no others.

    1. numba adds the size of an array to negative indices. These kernels have none, so what it
       adds is always 0 and may be subtracted as well, and an index is never below -1.
    2. numba's range computes one more value after the last one, which nobody uses: its test
       "remaining > 0" may be ">= 0".
    3. The order of the operands of a difference does not matter where it is only squared.
    """

    def __init__(self, codes):
        self.codes = codes
        self.definitions = {}
        for code in codes:
            if m := re.match(r"[a-z]\S* (%\w+),", code):
                self.definitions.setdefault(m[1], code)

    def __contains__(self, mutant):
        operator, number = mutant
        code = self.codes[number]
        operands = re.findall(r"[^\s,;]+", code)[1:]
        match operator:
            case "sum to difference":
                return self.wraps(operands[-1])
            case "compare off by one":
                harmless = re.match(r"setp\.(lt\.s64 \S+ \S+ -\d|gt\.s64 \S+ \S+ 0;)", code)
                return bool(harmless) and all(c.startswith("selp.") for c in self.uses(operands[0]))
            case "difference swapped":
                square = rf"(fma|mul)\.\S+ \S+ {operands[0]}, {operands[0]}\b"
                return all(re.match(square, c) for c in self.uses(operands[0]))

    def uses(self, register):
        return [c for c in self.codes if re.search(rf" {register}\b", c.partition(",")[2])]

    def wraps(self, register):
        """Whether the register holds 0, or the size of an array if an index is negative."""
        code = self.definitions.get(register, "")
        parts = [self.definitions.get(r, "") for r in re.findall(r"%\w+", code)[1:]]
        sign = r"shr\.s64 .*, 63;|and\.b64 .*, -9223372036854775808;|setp\.lt\.s64 .*, (0|-\d+);"
        return bool(re.match(r"(and|selp)\.b64|shr\.u64", code)) and any(
            re.match(sign, part) for part in parts)


def mutants(text, seed):
    """(operator, line number, text) of a sample of all mutants that are not equivalent."""
    lines, codes = text.splitlines(), instructions(text)
    equivalents, chosen = Equivalents(codes), random.Random(seed)
    for operator, (applies, pattern, replacement) in OPERATORS.items():
        sites = []
        for number, code in enumerate(codes):
            if re.match(applies, code):
                changed = re.sub(pattern, replacement, code, count=1)
                if changed != code and (operator, number) not in equivalents:
                    sites.append((number, changed))
        for number, changed in chosen.sample(sites, min(PER_OPERATOR, len(sites))):
            yield operator, number + 1, "\n".join([*lines[:number], changed, *lines[number + 1:]])


@pytest.mark.parametrize("subject", SUBJECTS)
def test_at_least_95_percent_of_mutants_are_noticed(subject):
    kernel, launches = SUBJECTS[subject]
    text, name = compiled(kernel, launches[0])
    assert symptom(launches, text, name) == ""
    total, survivors = 0, []
    for operator, number, mutant in mutants(text, seed=1):
        total += 1
        if not symptom(launches, mutant, name):
            survivors.append(f"{operator}, line {number}: {instructions(text)[number - 1]}")
    print(f"{subject}: {total - len(survivors)} of {total} mutants noticed", *survivors,
          sep="\n  ")
    assert total > 30
    assert len(survivors) <= 0.05 * total, survivors
