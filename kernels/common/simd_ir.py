"""The LLVM side of `simd.py`: types, addresses, masks and shuffles of its vectors."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaTypeError, RequireLiteralValue
from numba.extending import models, register_model

LANES = 16
I8, I16, I32, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
WORDS, WORD_PAIRS = ir.VectorType(I16, LANES), ir.VectorType(I16, 2 * LANES)
_LETTER = {FLOAT: "f32", I32: "i32", I16: "i16"}
BYTES = {FLOAT: 4, I32: 4, I16: 2}


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BFLOATS = ir.VectorType(_Bfloat(), 2 * LANES)


class Vector(types.Type):
    """16 lanes of `lane`, float32 or int32."""

    def __init__(self, lane: types.Type):
        self.lane = lane
        super().__init__(name=f"{lane}x{LANES}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, FLOATS if fe_type.lane == types.float32 else INTS)


f32x16, i32x16 = Vector(types.float32), Vector(types.int32)
ZIPPED = [lane for j in range(LANES) for lane in (j, LANES + j)]  # of two vectors, alternating
# By element type of memory: the vector it is loaded as, and as it lies there.
VECTOR_OF = {types.float32: f32x16, types.int32: i32x16, types.uint16: f32x16}
STORED = {types.float32: FLOATS, types.int32: INTS, types.uint16: WORDS}


def element_of(p, vector=None) -> types.Type:
    """The element type of memory that `vector` may be stored to."""
    flat = isinstance(p, types.Array) and p.ndim == 1 and p.layout == "C"
    element = p.dtype if flat or isinstance(p, types.CPointer) else None
    if element not in VECTOR_OF:
        raise NumbaTypeError("expected a flat array or a pointer of float32, int32 or uint16, "
                             f"not {p}")
    if vector not in (None, VECTOR_OF[element]):
        raise NumbaTypeError(f"{vector} cannot be stored to {p}")
    return element


def address(context, builder, kind, p, index, stored):
    """Pointer to p[index], as one to a vector of the type `stored`."""
    data = context.make_array(kind)(context, builder, p).data if isinstance(
        kind, types.Array) else p
    return builder.bitcast(builder.gep(data, [index]), ir.PointerType(stored))


def vectors(kind, count):
    """Type and code of an array of vectors on the stack."""
    if not isinstance(count, types.IntegerLiteral):
        raise RequireLiteralValue("the number of registers must be a constant")

    def codegen(context, builder, signature, args):
        array = cgutils.alloca_once(builder, FLOATS if kind == f32x16 else INTS,
                                    I32(count.literal_value))
        array.align = 64  # a cache line
        return array

    return types.CPointer(kind), codegen


def widened(builder, value):
    """A loaded vector as lanes of 32 bits."""
    if value.type != WORDS:
        return value
    wide = builder.zext(value, INTS)
    return builder.bitcast(builder.shl(wide, ir.Constant(INTS, [16] * LANES)), FLOATS)


def narrowed(builder, stored, value):
    """Lanes of 32 bits as the vector to be stored."""
    if stored != WORDS:
        return value
    rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512",
                    ir.VectorType(_Bfloat(), LANES), value)
    return builder.bitcast(rounded, WORDS)


def first_lanes(builder, count, lanes: int):
    """Mask of the first `count` lanes."""
    numbers = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
    return builder.icmp_signed("<", numbers, splat(builder, builder.trunc(count, I32), lanes))


def masked_load(builder, source, mask, stored):
    name = f"llvm.masked.load.{_name(stored)}.p0"
    zeros = ir.Constant(stored, [0] * stored.count)
    return call(builder, name, stored, source, I32(BYTES[stored.element]), mask, zeros)


def masked_store(builder, value, target, mask):
    name = f"llvm.masked.store.{_name(value.type)}.p0"
    call(builder, name, ir.VoidType(), value, target, I32(BYTES[value.type.element]), mask)


def _name(vector) -> str:
    """As LLVM's overloaded intrinsics call it."""
    return f"v{vector.count}{_LETTER[vector.element]}"


def splat(builder, value, lanes: int = LANES):
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return shuffle(builder, one, one, [0] * lanes)


def vector_or_float(name, *kinds) -> types.Type:
    """What comes of these: a vector if any is one, of float32, else a float32."""
    if any(kind not in (f32x16, types.float32) for kind in kinds):
        raise NumbaTypeError(f"{name} takes vectors of float32 and float32 numbers, not {kinds}")
    return f32x16 if f32x16 in kinds else types.float32


def alike(builder, values):
    """Numbers broadcast where there is a vector among the values."""
    if all(value.type == FLOAT for value in values):
        return values
    return [splat(builder, value) if value.type == FLOAT else value for value in values]


def shuffle(builder, a, b, lanes):
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(a, b, mask)


def swap(builder, a, b, size: int):
    """Exchange the upper blocks of `size` lanes of a with the lower ones of b."""
    upper = [lane & size for lane in range(LANES)]
    return (shuffle(builder, a, b, [LANES + j - size if up else j for j, up in enumerate(upper)]),
            shuffle(builder, a, b, [LANES + j if up else j + size for j, up in enumerate(upper)]))


def larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def reduction(a, combine):
    need_floats("a reduction", a)

    def codegen(context, builder, signature, args):
        value = args[0]
        for size in (8, 4, 2, 1):
            other = [j ^ size for j in range(LANES)]
            value = combine(builder, value, shuffle(builder, value, value, other))
        return builder.extract_element(value, I32(0))

    return types.float32(a), codegen


def rounded_pairs(name, first, second, lanes):
    need_floats(name, first, second)

    def codegen(context, builder, signature, args):
        both = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BFLOATS, args[1], args[0])
        words = builder.bitcast(both, WORD_PAIRS)
        return builder.bitcast(shuffle(builder, words, words, lanes), INTS)

    return i32x16(first, second), codegen


def half_of(name, pairs, bits):
    """Lanes of float32 whose bits `bits` makes of the pairs."""
    if pairs != i32x16:
        raise NumbaTypeError(f"{name} takes pairs of bfloat16, not {pairs}")

    def codegen(context, builder, signature, args):
        return builder.bitcast(bits(builder, args[0]), FLOATS)

    return f32x16(pairs), codegen


def pairs_multiply_add(*kinds):
    def codegen(context, builder, signature, args):
        a, b = (builder.bitcast(x, BFLOATS) for x in args[1:])
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, args[0], a, b)

    return f32x16(*kinds), codegen


def call(builder, name, result, *args):
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def need_words(name, p) -> None:
    if element_of(p) != types.uint16:
        raise NumbaTypeError(f"{name} reads uint16, the bits of bfloat16, not {p}")


def need_floats(name, *vectors) -> None:
    if any(vector != f32x16 for vector in vectors):
        raise NumbaTypeError(f"{name} takes vectors of float32, not {vectors}")
