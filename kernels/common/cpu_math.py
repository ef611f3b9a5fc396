"""Float32 functions for CPU kernels, of a number in a loop that LLVM vectorises, or of a vector.

Numba calls the C library for exp and tanh, one element at a time (2.7 and 15 ns each). The
polynomial below costs 0.2 to 0.3 ns per element inside a vectorised loop.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from .cache import njit
from .simd import rint, times_power_of_two, where_less
from .spec import is_bf16

F = np.float32
FAST = {"contract", "nsz"}  # fused multiply-add, elementwise loops
FAST_SUM = {"contract", "nsz", "reassoc"}  # also sums in vector lanes; NaN and inf stay exact
BLOCK = 8192  # elements of one task of a flat loop; fixed, so bits do not depend on threads

_LOG2_E = F(1.4426950408889634)
_LOWEST = F(-126.0)  # 2**-126 is the smallest normal number


@intrinsic
def ordered_bits(typingctx, x):
    """int32 that sorts as the float32 x does: integer maxima vectorise without giving up NaN."""

    def codegen(context, builder, signature, args):
        i32 = ir.IntType(32)
        bits = builder.bitcast(args[0], i32)
        sign = builder.ashr(bits, ir.Constant(i32, 31))
        return builder.xor(bits, builder.and_(sign, ir.Constant(i32, 0x7FFFFFFF)))

    return types.int32(types.float32), codegen


@intrinsic
def from_ordered_bits(typingctx, x):
    """The float32 of `ordered_bits`."""

    def codegen(context, builder, signature, args):
        i32 = ir.IntType(32)
        sign = builder.ashr(args[0], ir.Constant(i32, 31))
        bits = builder.xor(args[0], builder.and_(sign, ir.Constant(i32, 0x7FFFFFFF)))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic(prefer_literal=True)
def stack_array(typingctx, size):
    """Uninitialised float32[size] on the stack, size a constant: `a = stack_array(32); a[i]`.

    LLVM knows that nothing else points to it, so a loop of constant length over it vectorises
    without overlap tests and, where all indices become constant, ends up in registers. (Loops of
    very few operations are unrolled before they are vectorised: give them 4 rows at a time.)
    """
    if not isinstance(size, types.IntegerLiteral):
        raise RequireLiteralValue("the size of a stack array must be a constant")
    length = ir.Constant(ir.IntType(64), size.literal_value)

    def codegen(context, builder, signature, args):
        array = cgutils.alloca_once(builder, ir.FloatType(), size=length)
        array.align = 64  # a cache line: no vector lies across two of them
        return array

    return types.CPointer(types.float32)(size), codegen


@intrinsic
def pointer(typingctx, array, start):
    """C pointer to element `start` of a contiguous array: `p = pointer(a, 8); p[i]`.

    Indexing it is one addition: no test for a negative index, no slice to cut to size. The array
    must stay alive elsewhere. `array` may be such a pointer itself.
    """

    def codegen(context, builder, signature, args):
        data = args[0]
        if isinstance(array, types.Array):
            data = context.make_array(array)(context, builder, data).data
        return builder.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.intp), codegen


@njit(fastmath=FAST, forceinline=True)
def exp2(x):
    """2**x as `exp2_normal`, but 0 below -126."""
    return where_less(x, _LOWEST, F(0.0), exp2_normal(x))


@njit(fastmath=FAST, forceinline=True)
def exp2_normal(x):
    """2**x, relative error below 2e-7 on [-126, 127]; 2**-126 below; above, any number or NaN.

    NaN stays NaN. With p(0) = 1 the polynomial has the smallest largest error on [-0.5, 0.5],
    0.9e-7.
    """
    near = where_less(x, _LOWEST, _LOWEST, x)
    n = rint(near)
    r = near - n
    p = r * F(1.326472731307149e-3) + F(9.671512991189957e-3)
    p = p * r + F(5.550733581185341e-2)
    p = p * r + F(2.402224242687225e-1)
    p = p * r + F(6.931470036506653e-1)
    return times_power_of_two(p * r + F(1.0), n)


@njit(fastmath=FAST, forceinline=True)
def exp(x):
    """e**x, relative error below 2e-7 on [-87, 88]; clamped outside; NaN stays NaN.

    ln 2 is subtracted in two parts (Cody and Waite), the remainder goes to Cephes' polynomial.
    """
    x = where_less(x, F(-87.0), F(-87.0), x)
    x = where_less(F(88.0), x, F(88.0), x)
    n = rint(x * _LOG2_E)
    r = x - n * F(0.693359375)
    r = r - n * F(-2.12194440e-4)
    p = r * F(1.9875691500e-4) + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    return times_power_of_two(p * r * r + r + F(1.0), n)


@intrinsic
def as_float(typingctx, x):
    """A float32 as it is, an int8 converted; a uint16 as the bfloat16 whose bits it holds."""

    def codegen(context, builder, signature, args):
        if x == types.float32:
            return args[0]
        if x == types.int8:
            return builder.sitofp(args[0], ir.FloatType())
        bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(x if x in (types.float32, types.int8) else types.uint16), codegen


@intrinsic
def stored_in(typingctx, array, x):
    """The float32 x as an element of `array`: in uint16 the bits of the nearest bfloat16.

    In integers, which any processor has. Of two that are as near it is the even one; NaN stays
    NaN.
    """
    if array.dtype == types.float32:
        return x(array, x), lambda context, builder, signature, args: args[1]

    def codegen(context, builder, signature, args):
        i32 = ir.IntType(32)
        bits = builder.bitcast(args[1], i32)
        odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
        rounded = builder.add(bits, builder.add(odd, i32(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", args[1], args[1])
        quiet = builder.or_(bits, i32(0x400000))
        return builder.trunc(builder.lshr(builder.select(is_nan, quiet, rounded), i32(16)),
                             ir.IntType(16))

    return types.uint16(array, types.float32), codegen


def words(array: np.ndarray) -> np.ndarray:
    """The array itself, or bfloat16 as the uint16 that Numba knows."""
    return array.view(np.uint16) if is_bf16(array) else array


def flat(array: np.ndarray) -> np.ndarray:
    """One-dimensional view of a C-contiguous array (a copy would lose what a kernel writes)."""
    if not array.flags.c_contiguous:
        raise ValueError(f"array of shape {array.shape} is not C-contiguous: pass a contiguous "
                         "array, for example np.ascontiguousarray(a)")
    return array.reshape(-1)
