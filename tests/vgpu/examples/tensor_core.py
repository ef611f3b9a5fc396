"""A bfloat16 matrix product on tensor cores: cp.async double buffering, ldmatrix and mma.sync.

A block of four warps computes 64 x 64 elements; each warp 32 x 32 of them. Tiles lie in shared
memory in 16-byte pieces whose column is XORed with the row, so that ldmatrix has no bank conflicts.
"""

import numpy as np
from llvmlite import ir
from numba import cuda, float32, uint16, uint32
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 64, 64, 32
TILE_ELEMENTS = 64 * 32
TILE_BYTES = 2 * TILE_ELEMENTS
PIECES = TILE_BYTES // 16
THREADS = 128

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def inline_ptx(builder, ptx: str, result, constraints: str, arguments: list):
    """Emit one PTX instruction that all threads of the warp reach together."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    assembly = ir.InlineAsm(kind, ptx, constraints, side_effect=True)
    return builder.call(assembly, arguments, attrs=("convergent",))


def unpack(builder, value, count):
    return [builder.extract_value(value, index) for index in range(count)]


def statement(ptx: str):
    """An intrinsic without arguments or result."""
    def build(typing_context):
        def generate(context, builder, signature, arguments):
            inline_ptx(builder, ptx, ir.VoidType(), "~{memory}", [])
            return context.get_dummy_value()
        return types.void(), generate
    return intrinsic(build)


def matrix_load(ptx: str):
    """An intrinsic that loads four 8 x 8 matrices from the row address of each lane."""
    def build(typing_context, address):
        def generate(context, builder, signature, arguments):
            result = ir.LiteralStructType([I32] * 4)
            value = inline_ptx(builder, ptx, result, "=r,=r,=r,=r,r,~{memory}", arguments)
            return cgutils.pack_array(builder, unpack(builder, value, 4))
        return types.UniTuple(types.uint32, 4)(types.uint32), generate
    return intrinsic(build)


commit_copies = statement("cp.async.commit_group;")
wait_for_all_but_one_group = statement("cp.async.wait_group 1;")
load_matrices = matrix_load("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];")
load_matrices_transposed = matrix_load(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
)


@intrinsic
def copy_async(typing_context, target, source):
    """Start the copy of 16 bytes from the global address `source` to shared memory."""
    def generate(context, builder, signature, arguments):
        ptx = "cp.async.cg.shared.global [$0], [$1], 16;"
        inline_ptx(builder, ptx, ir.VoidType(), "r,l,~{memory}", arguments)
        return context.get_dummy_value()
    return types.void(types.uint32, types.uint64), generate


@intrinsic
def multiply_accumulate(typing_context, a, b, c):
    """c + a @ b for a 16 x 16, b 16 x 8 and c 16 x 8, spread over the warp's registers."""
    def generate(context, builder, signature, arguments):
        a, b, c = arguments
        registers = unpack(builder, a, 4) + unpack(builder, b, 2) + unpack(builder, c, 4)
        ptx = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
        result = ir.LiteralStructType([F32] * 4)
        value = inline_ptx(builder, ptx, result, constraints, registers)
        return cgutils.pack_array(builder, unpack(builder, value, 4))
    sums = types.UniTuple(types.float32, 4)
    words = [types.UniTuple(types.uint32, count) for count in (4, 2)]
    return sums(*words, sums), generate


def data_pointer(context, builder, kind, array):
    return context.make_array(kind)(context, builder, array).data


@intrinsic
def global_address(typing_context, array):
    """The address of the first element of an array in global memory."""
    def generate(context, builder, signature, arguments):
        pointer = data_pointer(context, builder, signature.args[0], arguments[0])
        return builder.ptrtoint(pointer, I64)
    return types.uint64(array), generate


@intrinsic
def shared_address(typing_context, array):
    """The address, inside the shared memory of the block, of the first element of an array."""
    def generate(context, builder, signature, arguments):
        pointer = data_pointer(context, builder, signature.args[0], arguments[0])
        shared = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, 3))
        return builder.ptrtoint(shared, I32)
    return types.uint32(array), generate


@cuda.jit(device=True)
def offset_a(row, piece):
    """Byte offset of a 16-byte piece in a tile of a: 64 rows of four pieces."""
    return uint32(row * 64 + (piece ^ ((row >> 1) & 3)) * 16)


@cuda.jit(device=True)
def offset_b(row, piece):
    """Byte offset of a 16-byte piece in a tile of b: 32 rows of eight pieces."""
    return uint32(row * 128 + (piece ^ (row & 7)) * 16)


@cuda.jit(device=True)
def start_copies(a, b, tile_a, tile_b, first_row, first_column, depth):
    """Start the copy of the tiles of a and b that lie `depth` along the inner dimension."""
    for part in range(PIECES // THREADS):
        index = part * THREADS + cuda.threadIdx.x
        row, piece = index >> 2, index & 3
        source = (first_row + row) * a.shape[1] + depth + piece * 8
        copy_async(tile_a + offset_a(row, piece), global_address(a) + 2 * source)
    for part in range(PIECES // THREADS):
        index = part * THREADS + cuda.threadIdx.x
        row, piece = index >> 3, index & 7
        source = (depth + row) * b.shape[1] + first_column + piece * 8
        copy_async(tile_b + offset_b(row, piece), global_address(b) + 2 * source)


@cuda.jit(device=True)
def multiply_pair(upper, lower, address_b, pair, sums):
    """Add the product of 32 x 16 elements of a and 16 x 16 of b to the sums of the warp."""
    b = load_matrices_transposed(address_b)
    for tile in range(4):
        below, right = tile >> 1, tile & 1
        s = sums[4 * below + 2 * pair + right]
        s[0], s[1], s[2], s[3] = multiply_accumulate(
            lower if below else upper,
            (b[2], b[3]) if right else (b[0], b[1]),
            (s[0], s[1], s[2], s[3]),
        )


@cuda.jit(device=True)
def multiply_step(tile_a, tile_b, warp_row, warp_column, step, sums):
    """Add the product of 32 x 16 elements of a and 16 x 32 of b to the sums of the warp.

    Steps and pairs are separate calls, not loops, so that every index into `sums` is a constant
    and the sums stay in registers.
    """
    lane = cuda.threadIdx.x & 31
    half, row_a, row_b = lane >> 4, warp_row + (lane & 15), step * 16 + (lane & 15)
    upper = load_matrices(uint32(tile_a + offset_a(row_a, 2 * step + half)))
    lower = load_matrices(uint32(tile_a + offset_a(row_a + 16, 2 * step + half)))
    piece = (warp_column >> 3) + half
    multiply_pair(upper, lower, uint32(tile_b + offset_b(row_b, piece)), 0, sums)
    multiply_pair(upper, lower, uint32(tile_b + offset_b(row_b, piece + 2)), 1, sums)


@cuda.jit
def bf16_matmul(a, b, c):
    """c[M, N] float32 = a[M, K] @ b[K, N], bfloat16 as uint16; M, N % 64 == 0 and K % 32 == 0."""
    tiles_a = cuda.shared.array((2, TILE_ELEMENTS), uint16, alignment=128)
    tiles_b = cuda.shared.array((2, TILE_ELEMENTS), uint16, alignment=128)
    sums = cuda.local.array((8, 4), float32)
    lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    warp_row, warp_column = (warp >> 1) * 32, (warp & 1) * 32
    first_row, first_column = cuda.blockIdx.y * BLOCK_ROWS, cuda.blockIdx.x * BLOCK_COLUMNS
    base_a, base_b = shared_address(tiles_a), shared_address(tiles_b)
    for tile in range(8):
        for element in range(4):
            sums[tile, element] = float32(0)

    start_copies(a, b, base_a, base_b, first_row, first_column, 0)
    commit_copies()
    stage = uint32(0)
    for depth in range(0, a.shape[1], BLOCK_DEPTH):
        following = uint32(TILE_BYTES - stage)
        if depth + BLOCK_DEPTH < a.shape[1]:
            start_copies(a, b, base_a + following, base_b + following,
                         first_row, first_column, depth + BLOCK_DEPTH)
        # An empty group after the last tile: "all but one" then still waits for that tile.
        commit_copies()
        wait_for_all_but_one_group()
        cuda.syncthreads()
        multiply_step(base_a + stage, base_b + stage, warp_row, warp_column, 0, sums)
        multiply_step(base_a + stage, base_b + stage, warp_row, warp_column, 1, sums)
        cuda.syncthreads()
        stage = following

    for tile in range(8):
        row = first_row + warp_row + (tile >> 2) * 16 + (lane >> 2)
        column = first_column + warp_column + (tile & 3) * 8 + (lane & 3) * 2
        for element in range(4):
            c[row + 8 * (element >> 1), column + (element & 1)] = sums[tile, element]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 values rounded to bfloat16 (to nearest even), as uint16."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(values: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 numbers given as uint16."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def matmul_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The float32 product of two bfloat16 (uint16) NumPy matrices, computed on the device."""
    c = cuda.device_array((a.shape[0], b.shape[1]), np.float32)
    grid = (b.shape[1] // BLOCK_COLUMNS, a.shape[0] // BLOCK_ROWS)
    bf16_matmul[grid, THREADS](cuda.to_device(a), cuda.to_device(b), c)
    return c.copy_to_host()
