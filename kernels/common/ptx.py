"""Instructions that numba has no name for: the only file with inline PTX and LLVM intrinsics."""

from llvmlite import ir

from .cuda import cgutils, float32, intrinsic, types

_FLOAT4 = ir.VectorType(ir.FloatType(), 4)
_ALIGNMENT = 16  # bytes, of every 128-bit access


@intrinsic
def load4(typingctx, pointer, index):
    """pointer[index : index + 4] as a tuple, in one 128-bit load; the address divides by 16."""
    signature = types.UniTuple(float32, 4)(pointer, index)

    def codegen(context, builder, signature, arguments):
        return _load4(context, builder, arguments[0], arguments[1], signature.args[1])

    return signature, codegen


@intrinsic
def store4(typingctx, pointer, index, a, b, c, d):
    """pointer[index : index + 4] = a, b, c, d in one 128-bit store; the address divides by 16."""
    signature = types.void(pointer, index, float32, float32, float32, float32)

    def codegen(context, builder, signature, arguments):
        _store4(builder, arguments[0], arguments[1], signature.args[1], arguments[2:])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def load4_shared(typingctx, array, index):
    """`load4` from a shared array, as if it had one dimension.

    Declare the array with `cuda.shared.array(shape, float32, alignment=16)`: without that it
    may begin at any multiple of 4.
    """
    signature = types.UniTuple(float32, 4)(array, index)

    def codegen(context, builder, signature, arguments):
        pointer = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return _load4(context, builder, pointer, arguments[1], signature.args[1])

    return signature, codegen


@intrinsic
def store4_shared(typingctx, array, index, a, b, c, d):
    """`store4` into a shared array; see `load4_shared`."""
    signature = types.void(array, index, float32, float32, float32, float32)

    def codegen(context, builder, signature, arguments):
        pointer = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        _store4(builder, pointer, arguments[1], signature.args[1], arguments[2:])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def exp2(typingctx, x):
    """2**x by the special function unit, within 2 units in the last place; 0 below 2**-126."""
    signature = float32(float32)

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        assembly = ir.InlineAsm(kind, "ex2.approx.ftz.f32 $0, $1;", "=f,f")
        return builder.call(assembly, arguments)

    return signature, codegen


def _load4(context, builder, pointer, index, index_type):
    four = builder.load(_address(builder, pointer, index, index_type))
    four.align = _ALIGNMENT
    return cgutils.pack_array(builder, [
        builder.extract_element(four, ir.Constant(ir.IntType(32), i)) for i in range(4)])


def _store4(builder, pointer, index, index_type, values):
    four = ir.Constant(_FLOAT4, ir.Undefined)
    for i, value in enumerate(values):
        four = builder.insert_element(four, value, ir.Constant(ir.IntType(32), i))
    builder.store(four, _address(builder, pointer, index, index_type), align=_ALIGNMENT)


def _address(builder, pointer, index, index_type):
    """The address of pointer[index] as one of four floats; `index` is in elements."""
    i64 = ir.IntType(64)
    if index_type.bitwidth < 64:
        index = builder.sext(index, i64) if index_type.signed else builder.zext(index, i64)
    return builder.bitcast(builder.gep(pointer, [index]), _FLOAT4.as_pointer())
