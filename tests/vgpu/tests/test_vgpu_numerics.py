"""The helpers of generated code against rational arithmetic, on operands chosen to be hard."""

import random
from fractions import Fraction

import numpy as np
import pytest
import reference_float as real
from reference_float import FORMATS
from reference_values import float_edges
from vgpu import numerics

TYPES = {"f16": (np.float16, np.uint16), "f32": (np.float32, np.uint32),
         "f64": (np.float64, np.uint64)}


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def encode(kind, value):
    return FORMATS[kind].encode(Fraction(value) if value else 0.0)


def any_bits(generator, kind):
    return [generator.getrandbits(FORMATS[kind].width) for _ in range(3)]


def moderate(generator, kind):
    return [encode(kind, generator.uniform(-4, 4)) for _ in range(3)]


def edges(generator, kind):
    return [generator.choice(float_edges(kind)) for _ in range(3)]


def midpoint(generator, kind):
    """A product on the middle between two numbers, and an addend that decides the rounding."""
    precision = FORMATS[kind].precision
    left = 2 * generator.getrandbits(precision // 2) + 1
    right = 2 * generator.getrandbits(precision // 2 + 1) + 1
    tiny = Fraction(generator.choice((-1, 0, 1))) * real.power(-generator.randrange(2, 100))
    return [encode(kind, left), encode(kind, right), encode(kind, tiny)]


def cancelling(generator, kind):
    """An addend close to the negative product."""
    a, b = (generator.uniform(0.5, 2) for _ in range(2))
    c = encode(kind, -Fraction(a) * Fraction(b))
    return [encode(kind, a), encode(kind, b), max(c - generator.randrange(-3, 4), 0)]


def subnormal(generator, kind):
    """A result in or near the subnormal range."""
    form = FORMATS[kind]
    scale = form.smallest_exponent // 2 + form.precision // 2
    a, b = (generator.uniform(-1, 1) * float(real.power(scale + generator.randrange(8)))
            for _ in range(2))
    sign = generator.getrandbits(1) << form.width - 1
    c = sign | generator.choice((0, generator.getrandbits(form.fraction_bits)))
    return [encode(kind, a), encode(kind, b), c]


def tiny(generator, kind):
    """A product that is too small for the format, and a zero."""
    form = FORMATS[kind]
    sign = form.width - 1
    return [generator.getrandbits(1) << sign | generator.randrange(4),
            generator.getrandbits(1) << sign | generator.randrange(4),
            generator.getrandbits(1) << sign]


FAMILIES = [any_bits, moderate, edges, midpoint, cancelling, subnormal, tiny]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_fused_multiply_add(kind, family):
    generator = random.Random(kind)
    rows = [family(generator, kind) for _ in range(800)]
    number, word = TYPES.get(kind, (np.uint16, np.uint16))
    function = {"f16": numerics.fma_half, "bf16": numerics.fma_bf16}.get(kind, numerics.fma)
    columns = [np.array(column, word).view(number) for column in zip(*rows, strict=True)]
    found = function(*columns).view(word).tolist()
    form = FORMATS[kind]
    for place, (bits, row) in enumerate(zip(found, rows, strict=True)):
        a, b, c = map(form.decode, row)
        exact = real.add(real.multiply(a, b), c)
        same = real.is_nan(form.decode(bits)) if real.is_nan(exact) else bits == form.encode(exact)
        assert same, (list(map(hex, row)), hex(bits))
        if place < 200:  # one element of each operand, or of one, is a scalar
            scalar = function(*(column[place] for column in columns))
            assert isinstance(scalar, np.generic)
            assert scalar.view(word) == bits or scalar != scalar
            mixed = function(columns[0][place], columns[1][place:place + 1], columns[2][place])
            assert mixed.shape == (1,) and (mixed.view(word)[0] == bits or mixed[0] != mixed[0])


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_directed_rounding(family, mode):
    generator = random.Random(mode)
    rows = [family(generator, "f32") for _ in range(500)]
    a, b, c = (np.array(column, np.uint32).view(np.float32) for column in zip(*rows, strict=True))
    results = {
        "add": numerics.directed_add(a, c, mode), "mul": numerics.directed_mul(a, b, mode),
        "fma": numerics.directed_fma(a, b, c, mode), "div": numerics.directed_div(a, b, mode),
        "sqrt": numerics.directed_sqrt(a, mode)}
    form = FORMATS["f32"]
    for place, row in enumerate(rows):
        x, y, z = map(form.decode, row)
        exact = {"add": real.add(x, z, mode), "mul": real.multiply(x, y),
                 "fma": real.add(real.multiply(x, y), z, mode), "div": real.divide(x, y),
                 "sqrt": real.square_root(x)}
        for name, result in results.items():
            bits = int(result.view(np.uint32)[place])
            if real.is_nan(exact[name]):
                assert real.is_nan(form.decode(bits))
            else:
                assert bits == form.encode(exact[name], mode), (name, list(map(hex, row)))


def test_where_keeps_scalars():
    one, two = np.float32(1), np.float32(2)
    assert isinstance(numerics.where(np.True_, one, two), np.float32)
    assert numerics.where(np.False_, one, two) == two
    assert numerics.where(np.array([True, False]), one, two).tolist() == [1, 2]


def test_division_by_zero_gives_all_ones():
    for dtype in (np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        ones = dtype(0) - dtype(1)
        values = np.array([0, 1, 7], dtype)
        assert (numerics.divide(values, dtype(0)) == ones).all()
        assert (numerics.remainder(values, np.zeros(3, dtype)) == ones).all()
        assert isinstance(numerics.divide(dtype(6), dtype(0)), dtype)


def test_smallest_integer_divided_by_minus_one_wraps():
    smallest = np.array([-2**31], np.int32)
    assert numerics.divide(smallest, np.int32(-1))[0] == -2**31
    assert numerics.remainder(smallest, np.int32(-1))[0] == 0


APPROXIMATIONS = ("rcp_approx", "sqrt_approx", "rsqrt_approx", "ex2_approx", "lg2_approx",
                  "sin_approx", "cos_approx", "tanh_approx")


@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_hostile_approximation_differs_both_ways(name):
    function = getattr(numerics, name)
    values = np.linspace(0.01, 5, 1000, dtype=np.float32)
    nominal = function(values)
    numerics.set_approximation("hostile")
    try:
        hostile = function(values)
        scalar = function(values[3])
    finally:
        numerics.set_approximation("nominal")
    assert isinstance(scalar, np.float32) and scalar == hostile[3]
    assert (hostile > nominal).mean() > 0.2
    assert (hostile < nominal).mean() > 0.2


def test_unknown_approximation_is_refused():
    with pytest.raises(ValueError, match="exact"):
        numerics.set_approximation("exact")
