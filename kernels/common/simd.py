"""Vectors of 16 lanes as values in CPU kernels: what a loop cannot say, in one line each.

    acc = registers(4)                         # acc[i] is a vector; constant indices: a register
    acc[i] = multiply_add(acc[i], broadcast(x[k]), load(w, j))
    store(y, j, acc[i] + load(bias, j))

A vector has 16 lanes of float32 or of int32; an int32 lane may hold a pair of bfloat16. LLVM puts
it into one register of 512 bits, or two of 256. `+ - * /`, `maximum` and `where_less` take vectors
of float32, and float32 numbers, which are broadcast. Only `multiply_add` is always fused; the rest
follows the fastmath flags of the function. What takes no vectors at all gives a number, so that a
formula is written once for vectors and for plain loops: see cpu_math.

`p` is a flat C-contiguous array or a `pointer` into one, of float32, of int32, or of uint16: the
bits of bfloat16, converted on the way to and from float32 lanes. No bounds are checked. Every
function but `prefetch` needs cpu_features.VECTORS; those that say so need cpu_features.BF16.
"""

import operator

from llvmlite import ir
from numba import types
from numba.core.errors import NumbaTypeError
from numba.extending import intrinsic, lower_builtin, type_callable

from .cpu_features import AVX512
from .simd_ir import (
    BYTES,
    FLOAT,
    FLOATS,
    I8,
    I32,
    INTS,
    LANES,
    STORED,
    VECTOR_OF,
    WORD_PAIRS,
    WORDS,
    ZIPPED,
    Vector,
    address,
    alike,
    call,
    element_of,
    f32x16,
    first_lanes,
    half_of,
    i32x16,
    larger,
    masked_load,
    masked_store,
    narrowed,
    need_floats,
    need_words,
    pairs_multiply_add,
    reduction,
    rounded_pairs,
    shuffle,
    splat,
    swap,
    vector_or_float,
    vectors,
    widened,
)

# Loads and stores


@intrinsic
def load(typingctx, p, i):
    """p[i : i + 16]."""
    element = element_of(p)

    def codegen(context, builder, signature, args):
        stored = STORED[element]
        source = address(context, builder, p, *args, stored)
        return widened(builder, builder.load(source, align=BYTES[stored.element]))

    return VECTOR_OF[element](p, types.intp), codegen


@intrinsic
def store(typingctx, p, i, vector):
    """p[i : i + 16] = vector; rounded to nearest even where p holds bfloat16 (needs BF16)."""
    element = element_of(p, vector)

    def codegen(context, builder, signature, args):
        stored = STORED[element]
        target = address(context, builder, p, *args[:2], stored)
        builder.store(narrowed(builder, stored, args[2]), target, align=BYTES[stored.element])
        return context.get_dummy_value()

    return types.void(p, types.intp, vector), codegen


@intrinsic
def store_uncached(typingctx, p, i, vector):
    """As `store`, past the caches; p[i] lies at a multiple of the vector's bytes there. `fence` in
    cpu_threads orders it."""
    element = element_of(p, vector)

    def codegen(context, builder, signature, args):
        stored = STORED[element]
        target = address(context, builder, p, *args[:2], stored)
        instruction = builder.store(narrowed(builder, stored, args[2]), target,
                                    align=LANES * BYTES[stored.element])
        instruction.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        return context.get_dummy_value()

    return types.void(p, types.intp, vector), codegen


@intrinsic
def prefetch(typingctx, p, i):
    """Ask for the cache line of p[i], of any type, to be read soon; p[i] need not exist."""
    if not isinstance(p, types.Array | types.CPointer):
        raise NumbaTypeError(f"prefetch takes an array or a pointer, not {p}")

    def codegen(context, builder, signature, args):
        source = address(context, builder, p, *args, I8)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), source, I32(0), I32(2), I32(1))
        return context.get_dummy_value()

    return types.void(p, types.intp), codegen


@intrinsic
def load_first(typingctx, p, i, count):
    """The first `count` of p[i : i + 16]; zeros beyond, where memory is not read."""
    element = element_of(p)

    def codegen(context, builder, signature, args):
        stored = STORED[element]
        source = address(context, builder, p, *args[:2], stored)
        mask = first_lanes(builder, args[2], LANES)
        return widened(builder, masked_load(builder, source, mask, stored))

    return VECTOR_OF[element](p, types.intp, types.intp), codegen


@intrinsic
def store_first(typingctx, p, i, vector, count):
    """p[i : i + count] = the first `count` lanes, at most 16, as `store` does."""
    element = element_of(p, vector)

    def codegen(context, builder, signature, args):
        stored = STORED[element]
        target = address(context, builder, p, *args[:2], stored)
        masked_store(builder, narrowed(builder, stored, args[2]), target,
                     first_lanes(builder, args[3], LANES))
        return context.get_dummy_value()

    return types.void(p, types.intp, vector, types.intp), codegen


@intrinsic
def load_pairs(typingctx, p, i, count):
    """Lane j is the pair p[i + 2j], p[i + 2j + 1] of bfloat16; zeros from p[i + count] on."""
    need_words("load_pairs", p)

    def codegen(context, builder, signature, args):
        source = address(context, builder, p, *args[:2], WORD_PAIRS)
        mask = first_lanes(builder, args[2], 2 * LANES)
        return builder.bitcast(masked_load(builder, source, mask, WORD_PAIRS), INTS)

    return i32x16(p, types.intp, types.intp), codegen


@intrinsic
def load_zipped(typingctx, p, i, count, other, other_count):
    """Lane j is the pair p[i + j], p[other + j] of bfloat16; zeros from j = (other_)count on."""
    need_words("load_zipped", p)

    def codegen(context, builder, signature, args):
        rows = [masked_load(builder, address(context, builder, p, args[0], index, WORDS),
                            first_lanes(builder, count, LANES), WORDS)
                for index, count in (args[1:3], args[3:5])]
        return builder.bitcast(shuffle(builder, *rows, ZIPPED), INTS)

    return i32x16(p, *4 * (types.intp,)), codegen


@intrinsic
def broadcast(typingctx, x):
    """x, a float32 or int32, in every lane."""
    if x not in (types.float32, types.int32):
        raise NumbaTypeError(f"broadcast takes a float32 or an int32, not {x}")

    def codegen(context, builder, signature, args):
        return splat(builder, args[0])

    return VECTOR_OF[x](x), codegen


@intrinsic(prefer_literal=True)
def registers(typingctx, count):
    """`count` vectors of float32, a constant, not initialised: `a = registers(8); a[i]`.

    Where all indices are constants once loops of constant length are unrolled, a[i] is a register.
    """
    kind, codegen = vectors(f32x16, count)
    return kind(count), codegen


@intrinsic(prefer_literal=True)
def registers_of(typingctx, p, count):
    """As `registers`, of vectors as `load` gives them from p."""
    kind, codegen = vectors(VECTOR_OF[element_of(p)], count)
    return kind(p, count), codegen


# Arithmetic


@intrinsic
def multiply_add(typingctx, acc, a, b):
    """acc + a * b, rounded once; for pairs of bfloat16 acc + a.low * b.low + a.high * b.high.

    The sum is of float32. Pairs need BF16; there, what is below 2**-126 counts as 0.
    """
    if (acc, a, b) == (f32x16, i32x16, i32x16):
        return pairs_multiply_add(acc, a, b)
    need_floats("multiply_add", acc, a, b)

    def codegen(context, builder, signature, args):
        return call(builder, "llvm.fma.v16f32", FLOATS, args[1], args[2], args[0])

    return f32x16(acc, a, b), codegen


@intrinsic
def maximum(typingctx, a, b):
    """a where a > b, else b: b also where either is NaN."""
    kind = vector_or_float("maximum", a, b)

    def codegen(context, builder, signature, args):
        return larger(builder, *alike(builder, args))

    return kind(a, b), codegen


@intrinsic
def where_less(typingctx, a, b, yes, no):
    """yes where a < b, else no: no also where a or b is NaN."""
    kind = vector_or_float("where_less", a, b, yes, no)

    def codegen(context, builder, signature, args):
        a, b, yes, no = alike(builder, args)
        return builder.select(builder.fcmp_ordered("<", a, b), yes, no)

    return kind(a, b, yes, no), codegen


@intrinsic
def lane_numbers(typingctx):
    """0, 1, ... 15 as float32."""

    def codegen(context, builder, signature, args):
        return ir.Constant(FLOATS, [float(i) for i in range(LANES)])

    return f32x16(), codegen


@intrinsic
def rint(typingctx, a):
    """Nearest integer, as float32. A call: fastmath would undo adding and subtracting 2**23."""
    kind = vector_or_float("rint", a)

    def codegen(context, builder, signature, args):
        return call(builder, "llvm.rint." + ("f32" if a == types.float32 else "v16f32"),
                    args[0].type, args[0])

    return kind(a), codegen


@intrinsic
def times_power_of_two(typingctx, a, n):
    """a * 2**n for integers n from -126 to 127. For NaN in n, any number."""
    kind = vector_or_float("times_power_of_two", a, n)
    if a != n:
        raise NumbaTypeError(f"times_power_of_two takes two of a kind, not {a} and {n}")

    def codegen(context, builder, signature, args):
        if kind == f32x16 and AVX512:  # one instruction instead of four
            return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, *args, args[0],
                        ir.IntType(16)(-1), I32(4))
        # The low bits of n + 1.5 * 2**23 hold n; no cast to int, whose result for NaN is undefined.
        x = builder.fadd(*alike(builder, [args[1], FLOAT(12582912.0)]))
        ints = INTS if kind == f32x16 else I32
        bits = builder.bitcast(x, ints)
        constant = (lambda value: ints([value] * LANES)) if kind == f32x16 else ints
        exponent = builder.shl(bits, constant(23))
        power = builder.bitcast(builder.add(exponent, constant(0x3F800000)), x.type)
        return builder.fmul(args[0], power)

    return kind(a, n), codegen


@intrinsic
def reciprocal(typingctx, a):
    """1 / a within 2e-7, for finite a whose reciprocal is too. NaN stays NaN."""
    kind = vector_or_float("reciprocal", a)

    def codegen(context, builder, signature, args):
        one = FLOAT(1.0)
        if kind != f32x16 or not AVX512:
            return builder.fdiv(*alike(builder, [one, args[0]]))
        # A division takes 16 cycles; an estimate of 14 bits and a step of Newton take 4.
        near = call(builder, "llvm.x86.avx512.rcp14.ps.512", FLOATS, args[0], args[0],
                    ir.IntType(16)(-1))
        fma = "llvm.fma.v16f32"
        wrong = call(builder, fma, FLOATS, builder.fneg(args[0]), near, splat(builder, one))
        return call(builder, fma, FLOATS, near, wrong, near)

    return kind(a), codegen


@intrinsic
def sum_lanes(typingctx, a):
    """Sum of the 16 lanes; the halves are added until one lane is left."""
    return reduction(a, ir.IRBuilder.fadd)


@intrinsic
def max_lanes(typingctx, a):
    """The largest lane; with NaN among them, any lane."""
    return reduction(a, larger)


@intrinsic
def transpose(typingctx, rows):
    """Transpose 16 x 16 in place: lane j of rows[i] and lane i of rows[j] change places."""
    if not (isinstance(rows, types.CPointer) and isinstance(rows.dtype, Vector)):
        raise NumbaTypeError(f"transpose takes registers, not {rows}")

    def codegen(context, builder, signature, args):
        places = [builder.gep(args[0], [I32(i)]) for i in range(LANES)]
        values = [builder.load(place) for place in places]
        for size in (8, 4, 2, 1):  # of the blocks that change places
            for i in range(LANES):
                if not i & size:
                    values[i], values[i + size] = swap(builder, values[i], values[i + size], size)
        for value, place in zip(values, places, strict=True):
            builder.store(value, place)
        return context.get_dummy_value()

    return types.void(rows), codegen


# Pairs of bfloat16


@intrinsic
def low_halves(typingctx, pairs):
    """The first of each pair, as float32."""
    return half_of("low_halves", pairs, lambda builder, a: builder.shl(a, INTS([16] * LANES)))


@intrinsic
def high_halves(typingctx, pairs):
    """The second of each pair, as float32."""
    return half_of("high_halves", pairs,
                   lambda builder, a: builder.and_(a, INTS([-1 << 16] * LANES)))


@intrinsic
def pack_pairs(typingctx, low, high):
    """Lane j is the pair low[j], high[j], rounded to nearest even. Needs BF16."""
    return rounded_pairs("pack_pairs", low, high, ZIPPED)


@intrinsic
def pack_neighbours(typingctx, first, second):
    """Lane j is the pair of elements 2j, 2j + 1 of `first` and `second` in a row. Needs BF16."""
    return rounded_pairs("pack_neighbours", first, second, range(2 * LANES))


# Operators


def _arithmetic(function, instruction: str) -> None:
    """`function` of two vectors of float32, or of one and a float32."""
    pairs = [(f32x16, f32x16), (f32x16, types.float32), (types.float32, f32x16)]

    @type_callable(function)
    def type_of(context):
        def typer(a, b):
            return f32x16 if (a, b) in pairs else None
        return typer

    def lower(context, builder, signature, args):
        both = [a if isinstance(a.type, ir.VectorType) else splat(builder, a) for a in args]
        return getattr(builder, instruction)(*both)

    for pair in pairs:
        lower_builtin(function, *pair)(lower)


for _function, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"),
                                (operator.mul, "fmul"), (operator.truediv, "fdiv")):
    _arithmetic(_function, _instruction)
