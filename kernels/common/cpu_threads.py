"""What the threads of a CPU kernel need of each other: numbers to share out, and order."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .simd_ir import call


@intrinsic
def take_number(typingctx, numbers, i):
    """numbers[i], of int64, which becomes one larger: no two threads take the same."""

    def codegen(context, builder, signature, args):
        data = context.make_array(numbers)(context, builder, args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), ir.IntType(64)(1),
                                  "monotonic")

    return types.int64(numbers, types.intp), codegen


@intrinsic
def fence(typingctx):
    """What `store_uncached` wrote is seen by other threads before what is written from here on."""

    def codegen(context, builder, signature, args):
        call(builder, "llvm.x86.sse.sfence", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), codegen
