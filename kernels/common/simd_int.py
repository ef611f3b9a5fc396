"""Vectors of small integers in CPU kernels: int8 times int16, in exact sums of int32.

    total = multiply_add_pairs(total, load_int16_pairs(w, k), load_int16_pairs(x, k))

As in simd.py a vector has 16 lanes; each holds an int32, or a pair of int16. Every function needs
cpu_features.VECTORS.
"""

from llvmlite import ir
from numba import types
from numba.core.errors import NumbaTypeError
from numba.extending import intrinsic

from .cpu_features import AVX512, VNNI
from .simd_ir import (
    FLOATS,
    I8,
    I16,
    INTS,
    LANES,
    WORD_PAIRS,
    WORDS,
    address,
    call,
    f32x16,
    i32x16,
    shuffle,
)

PAIRS = 2 * LANES  # numbers in a vector of pairs


@intrinsic
def load_int16_pairs(typingctx, p, i):
    """Lane j is the pair p[i + 2j], p[i + 2j + 1] of int16, or of int8 converted to it."""
    if getattr(p, "dtype", None) not in (types.int8, types.int16):
        raise NumbaTypeError(f"load_int16_pairs reads int8 or int16, not {p}")
    element = I8 if p.dtype == types.int8 else I16

    def codegen(context, builder, signature, args):
        source = address(context, builder, p, *args, ir.VectorType(element, PAIRS))
        value = builder.load(source, align=element.width // 8)
        wide = builder.sext(value, WORD_PAIRS) if element == I8 else value
        return builder.bitcast(wide, INTS)

    return i32x16(p, types.intp), codegen


@intrinsic
def store_int16(typingctx, p, i, vector):
    """p[i : i + 16] = the nearest int16 of the float32 lanes; any number of one out of range."""
    if getattr(p, "dtype", None) != types.int16 or vector != f32x16:
        raise NumbaTypeError(f"store_int16 stores float32 to int16, not {vector} to {p}")

    def codegen(context, builder, signature, args):
        # The low bits of x + 1.5 * 2**23 hold x; a cast of NaN would be undefined.
        whole = builder.fadd(args[2], ir.Constant(FLOATS, [12582912.0] * LANES))
        words = builder.trunc(builder.bitcast(whole, INTS), WORDS)
        target = address(context, builder, p, *args[:2], WORDS)
        builder.store(words, target, align=2)
        return context.get_dummy_value()

    return types.void(p, types.intp, vector), codegen


@intrinsic
def multiply_add_pairs(typingctx, acc, a, b):
    """acc + a.low * b.low + a.high * b.high, of int32; one instruction where there is VNNI.

    A sum that leaves int32 is undefined.
    """
    if (acc, a, b) != (i32x16,) * 3:
        raise NumbaTypeError(f"multiply_add_pairs takes vectors of int32, not {acc}, {a}, {b}")

    def codegen(context, builder, signature, args):
        if VNNI:  # the one that saturates: of the other LLVM makes two instructions again
            return call(builder, "llvm.x86.avx512.vpdpwssds.512", INTS, *args)
        a, b = (builder.bitcast(x, WORD_PAIRS) for x in args[1:])
        if AVX512:
            products = call(builder, "llvm.x86.avx512.pmaddw.d.512", INTS, a, b)
        else:
            half = ir.VectorType(ir.IntType(32), LANES // 2)
            parts = [call(builder, "llvm.x86.avx2.pmadd.wd", half,
                          *(shuffle(builder, x, x, range(first, first + LANES)) for x in (a, b)))
                     for first in (0, LANES)]
            products = shuffle(builder, *parts, range(LANES))
        return builder.add(args[0], products)

    return i32x16(acc, a, b), codegen


@intrinsic
def as_floats(typingctx, a):
    """Each lane as the nearest float32; of float32 the vector itself."""
    if a not in (i32x16, f32x16):
        raise NumbaTypeError(f"as_floats takes a vector, not {a}")

    def codegen(context, builder, signature, args):
        return args[0] if a == f32x16 else builder.sitofp(args[0], FLOATS)

    return f32x16(a), codegen
