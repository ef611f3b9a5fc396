"""The matrix unit of some x86 processors (AMX): tiles of sums as registers, one line each.

    configure()                       # once in each thread, before the others
    zero(0)
    load(1, a, i, a_row)              # 16 rows of 16 words, a_row words apart
    load(2, b, j, b_row)
    multiply_add(0, 1, 2)             # tile 0 += tile 1 . tile 2
    store(0, c, k, c_row)
    release()

There are eight tiles, numbered by constants, of 16 rows of 64 bytes: sums in float32, or words,
each a pair of bfloat16. A row of a tile should be one cache line in memory: elsewhere loads take
five times as long. Everything here needs cpu_features.TILES.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaTypeError, RequireLiteralValue
from numba.extending import intrinsic

from .simd_ir import I8, address, element_of

TILES, ROWS, ROW_BYTES = 8, 16, 64
WORDS = ROW_BYTES // 4  # of a row, and so terms of a sum in words

# Of LDTILECFG: palette 1, then bytes of a row (16 bits each) and rows (8 bits each) of every tile.
_CONFIGURATION = (bytes([1]).ljust(16, b"\0")
                  + (ROW_BYTES.to_bytes(2, "little") * TILES).ljust(32, b"\0")
                  + (bytes([ROWS]) * TILES).ljust(16, b"\0"))


@intrinsic
def configure(typingctx):
    """All tiles of the calling thread are of full size from here to `release`."""

    def codegen(context, builder, signature, args):
        kind = ir.ArrayType(I8, len(_CONFIGURATION))
        memory = cgutils.global_constant(builder, "amx_configuration",
                                         kind(bytearray(_CONFIGURATION)))
        _call(builder, "ldtilecfg", builder.bitcast(memory, ir.PointerType(I8)))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def release(typingctx):
    """The calling thread is done with tiles: nothing of them is saved when it is interrupted."""

    def codegen(context, builder, signature, args):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def zero(typingctx, tile):
    """tile = 0."""
    number = _number(tile)

    def codegen(context, builder, signature, args):
        _call(builder, "tilezero", number)
        return context.get_dummy_value()

    return types.void(tile), codegen


@intrinsic(prefer_literal=True)
def load(typingctx, tile, p, i, row):
    """Row r of the tile = p[i + r * row : ... + 16], for elements of 32 bits."""
    return _move("tileloadd64", tile, p, i, row)


@intrinsic(prefer_literal=True)
def store(typingctx, tile, p, i, row):
    """p[i + r * row : ... + 16] = row r of the tile."""
    return _move("tilestored64", tile, p, i, row)


@intrinsic(prefer_literal=True)
def multiply_add(typingctx, sums, a, b):
    """sums[r, j] += for each word w of 16: a[r, w].low b[w, j].low + a[r, w].high b[w, j].high.

    Products of bfloat16, sums in float32; what is below 2**-126 counts as 0.
    """
    numbers = [_number(tile) for tile in (sums, a, b)]

    def codegen(context, builder, signature, args):
        _call(builder, "tdpbf16ps", *numbers)
        return context.get_dummy_value()

    return types.void(sums, a, b), codegen


def _move(name: str, tile, p, i, row):
    number = _number(tile)
    element = element_of(p)
    if element not in (types.float32, types.int32):
        raise NumbaTypeError(f"tiles hold float32 or int32, not {element}")

    def codegen(context, builder, signature, args):
        place = address(context, builder, p, *args[1:3], I8)
        _call(builder, name, number, place, builder.mul(args[3], args[3].type(4)))
        return context.get_dummy_value()

    return types.void(tile, p, types.intp, types.intp), codegen


def _number(tile) -> ir.Constant:
    if not isinstance(tile, types.IntegerLiteral):
        raise RequireLiteralValue("the number of a tile must be a constant")
    return I8(tile.literal_value)


def _call(builder, name: str, *args) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)
