"""Instructions that numba has no name for: the only file with inline PTX and LLVM intrinsics.

In brackets: the section of NVIDIA's "PTX ISA", chapter "Instruction Set". Tensor-core kernels
address shared memory by 32-bit numbers of bytes, which begin at `dynamic_shared()`; a warp's
instructions (ldmatrix, mma) must be reached by all of its 32 lanes together.
"""

from llvmlite import ir

from .cuda import cgutils, float32, int32, intrinsic, types, uint32

_FLOAT4 = ir.VectorType(ir.FloatType(), 4)
_WORD2, _WORD4 = (ir.VectorType(ir.IntType(32), n) for n in (2, 4))
_ALIGNMENT = 16  # bytes, of every 128-bit access
_DYNAMIC = "dynamic_shared_memory"


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
    four = builder.load(_address(builder, pointer, index, index_type, _FLOAT4))
    four.align = _ALIGNMENT
    return cgutils.pack_array(builder, _elements(builder, four))


def _store4(builder, pointer, index, index_type, values):
    place = _address(builder, pointer, index, index_type, _FLOAT4)
    builder.store(_vector(builder, _FLOAT4, values), place, align=_ALIGNMENT)


def _elements(builder, vector):
    count = vector.type.count
    return [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(count)]


def _vector(builder, kind, values):
    vector = ir.Constant(kind, ir.Undefined)
    for i, value in enumerate(values):
        vector = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), i))
    return vector


def _address(builder, pointer, index, index_type, kind):
    """The address of pointer[index] as a `kind`; `index` is in elements of the pointer."""
    return builder.bitcast(builder.gep(pointer, [_widened(builder, index, index_type)]),
                           kind.as_pointer())


def _widened(builder, index, index_type):
    i64 = ir.IntType(64)
    if index_type.bitwidth == 64:
        return index
    return builder.sext(index, i64) if index_type.signed else builder.zext(index, i64)


@intrinsic
def dynamic_shared(typingctx):
    """Where dynamic shared memory begins, a multiple of 1024; its size is given at the launch."""

    def codegen(context, builder, signature, arguments):
        module = builder.module
        memory = module.globals.get(_DYNAMIC)
        if memory is None:
            memory = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), _DYNAMIC, 3)
            memory.linkage, memory.align = "external", 1024
        return builder.ptrtoint(memory, ir.IntType(32))

    return uint32(), codegen


@intrinsic
def cp_async(typingctx, destination, pointer, index, size):
    """Copy pointer[index :] to the 16 bytes of shared memory at `destination`, in the background.

    `size` bytes (0 to 16) are read, the rest becomes zeros: edges without branches. Both addresses
    divide by 16, and the pointer is valid even if nothing is read. [cp.async]
    """
    signature = types.void(uint32, pointer, index, int32)

    def codegen(context, builder, signature, arguments):
        destination, pointer, index, size = arguments
        source = builder.gep(pointer, [_widened(builder, index, signature.args[2])])
        text = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"
        return _call(context, builder, text, "", "rlr",
                     (destination, builder.ptrtoint(source, ir.IntType(64)), size), memory=True)

    return signature, codegen


@intrinsic
def cp_async_commit(typingctx):
    """Close a group of `cp_async`; a group may be empty. [cp.async.commit_group]"""
    return _instruction("cp.async.commit_group;", memory=True)


def _cp_async_wait(pending):
    @intrinsic
    def wait(typingctx):
        return _instruction(f"cp.async.wait_group {pending};", memory=True)

    return wait


# Wait until all of this thread's groups, or all but the newest, have arrived; a barrier then shows
# them to the other threads. [cp.async.wait_group]
cp_async_wait_0, cp_async_wait_1 = map(_cp_async_wait, range(2))


@intrinsic
def ldmatrix(typingctx, address):
    """Four 8x8 matrices of bf16 from shared memory, a register each. [ldmatrix]

    Lanes 8i to 8i + 7 give the addresses of matrix i's rows (16 bytes each, at multiples of 16);
    lane l gets elements 2(l % 4) and 2(l % 4) + 1 of row l // 4 of each matrix.
    """
    return _instruction("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
                        "rrrr", "r", memory=True)


@intrinsic
def ldmatrix_transposed(typingctx, address):
    """`ldmatrix` of the transposed matrices: rows stay in memory as they are."""
    return _instruction("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
                        "rrrr", "r", memory=True)


@intrinsic
def mma_bf16(typingctx, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """c + A·B of a warp: A [16, 16] and B [16, 8] in bf16, c [16, 8] in float32. [mma.m16n8k16]

    Lane l, with row r = l // 4 and column 2(l % 4), holds: c0, c1 at row r, c2, c3 at row r + 8;
    a0 at row r, a1 at row r + 8, a2 and a3 the same 8 columns on; b0 at k = 2(l % 4) of column r,
    b1 the same 8 further in k. That is how `ldmatrix` delivers them.
    """
    return _instruction(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "ffff", "rrrrrrffff")


@intrinsic
def pack_bf16(typingctx, low, high):
    """Two floats, rounded to the nearest bf16 (ties to even), in one word. [cvt]"""
    return _instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", "ff")


@intrinsic
def bits_float(typingctx, bits):
    """The float32 with these bits; `word << 16` and `word & 0xFFFF0000` unpack two bf16."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return float32(uint32), codegen


@intrinsic
def load4_words(typingctx, pointer, index):
    """16 bytes from pointer[index] on, in four words; the address divides by 16."""
    signature = types.UniTuple(uint32, 4)(pointer, index)

    def codegen(context, builder, signature, arguments):
        four = builder.load(_address(builder, *arguments, signature.args[1], _WORD4))
        four.align = _ALIGNMENT
        return cgutils.pack_array(builder, _elements(builder, four))

    return signature, codegen


@intrinsic
def store4_words(typingctx, pointer, index, a, b, c, d):
    """Write four words from pointer[index] on; the address divides by 16."""
    signature = types.void(pointer, index, uint32, uint32, uint32, uint32)

    def codegen(context, builder, signature, arguments):
        place = _address(builder, *arguments[:2], signature.args[1], _WORD4)
        builder.store(_vector(builder, _WORD4, arguments[2:]), place, align=_ALIGNMENT)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def load2_words(typingctx, pointer, index):
    """8 bytes from pointer[index] on, in two words; the address divides by 8."""
    signature = types.UniTuple(uint32, 2)(pointer, index)

    def codegen(context, builder, signature, arguments):
        two = builder.load(_address(builder, *arguments, signature.args[1], _WORD2))
        two.align = 8
        return cgutils.pack_array(builder, _elements(builder, two))

    return signature, codegen


@intrinsic
def store2_words(typingctx, pointer, index, a, b):
    """Write two words from pointer[index] on; the address divides by 8."""
    signature = types.void(pointer, index, uint32, uint32)

    def codegen(context, builder, signature, arguments):
        place = _address(builder, *arguments[:2], signature.args[1], _WORD2)
        builder.store(_vector(builder, _WORD2, arguments[2:]), place, align=8)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def load4_words_shared(typingctx, address):
    """16 bytes of shared memory in four words; the address divides by 16. [ld]"""
    return _instruction("ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", "rrrr", "r", memory=True)


@intrinsic
def store4_words_shared(typingctx, address, a, b, c, d):
    """Write four words to shared memory; the address divides by 16. [st]"""
    return _instruction("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", "", "rrrrr", memory=True)


@intrinsic
def store2_shared_at(typingctx, address, a, b):
    """Write two floats to shared memory; the address divides by 8. [st]"""
    return _instruction("st.shared.v2.f32 [$0], {$1, $2};", "", "rff", memory=True)


@intrinsic
def store_word_shared(typingctx, address, word):
    """Write a word to shared memory; the address divides by 4. [st]"""
    return _instruction("st.shared.u32 [$0], $1;", "", "rr", memory=True)


_NUMBA = {"f": float32, "r": uint32}
_LLVM = {"f": ir.FloatType(), "r": ir.IntType(32), "l": ir.IntType(64)}


def _instruction(text, outputs="", inputs="", memory=False):
    """(signature, codegen) of one instruction; operands by letter: f float32, r uint32.

    memory: it reads or writes memory, and stays where it is among other accesses.
    """
    results = [_NUMBA[letter] for letter in outputs]
    result = (types.void if not results else results[0] if len(results) == 1
              else types.UniTuple(results[0], len(results)))

    def codegen(context, builder, signature, arguments):
        return _call(context, builder, text, outputs, inputs, arguments, memory)

    return result(*(_NUMBA[letter] for letter in inputs)), codegen


def _call(context, builder, text, outputs, inputs, arguments, memory=False):
    constraints = ",".join([*(f"={letter}" for letter in outputs), *inputs,
                            *(["~{memory}"] if memory else [])])
    kinds = [_LLVM[letter] for letter in outputs]
    result = (ir.VoidType() if not kinds else kinds[0] if len(kinds) == 1
              else ir.LiteralStructType(kinds))
    function = ir.FunctionType(result, [_LLVM[letter] for letter in inputs])
    # A warp's instruction must not move to where some of its lanes are absent.
    together = ".sync" in text
    value = builder.call(ir.InlineAsm(function, text, constraints, side_effect=memory or together),
                         arguments, attrs=("convergent",) if together else ())
    if not kinds:
        return context.get_dummy_value()
    if len(kinds) == 1:
        return value
    return cgutils.pack_array(builder,
                              [builder.extract_value(value, i) for i in range(len(kinds))])
