"""A tiled matrix product in shared memory, for matrices of any size and layout."""

import numpy as np
from numba import cuda, float32
from numba.cuda.cudadrv import devicearray

TILE = 16


@cuda.jit
def tiled_matmul(a, b, c):
    """c[M, N] = a[M, K] @ b[K, N], all float32: one thread per element of c."""
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    column, row = cuda.grid(2)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for start in range(0, a.shape[1], TILE):
        inside_a = row < a.shape[0] and start + x < a.shape[1]
        inside_b = start + y < b.shape[0] and column < b.shape[1]
        tile_a[y, x] = a[row, start + x] if inside_a else float32(0)
        tile_b[y, x] = b[start + y, column] if inside_b else float32(0)
        cuda.syncthreads()
        for k in range(TILE):
            total += tile_a[y, k] * tile_b[k, x]
        cuda.syncthreads()
    if row < c.shape[0] and column < c.shape[1]:
        c[row, column] = total


def launch_matmul(a, b, c) -> None:
    """Launch `tiled_matmul` for device arrays a [M, K], b [K, N] and c [M, N]."""
    rows, columns = c.shape
    grid = (-(-columns // TILE), -(-rows // TILE))
    tiled_matmul[grid, (TILE, TILE)](a, b, c)


def transposed(array):
    """The transpose of a device matrix as a view; `array.T` would compile and launch a kernel."""
    return devicearray.DeviceNDArray(
        array.shape[::-1], array.strides[::-1], array.dtype, gpu_data=array.gpu_data
    )


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of two float32 NumPy matrices, computed on the device."""
    c = cuda.device_array((a.shape[0], b.shape[1]), np.float32)
    launch_matmul(cuda.to_device(a), cuda.to_device(b), c)
    return c.copy_to_host()


def matmul_transposed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a.T @ b.T of two float32 NumPy matrices, computed on the device."""
    c = cuda.device_array((a.shape[1], b.shape[0]), np.float32)
    launch_matmul(transposed(cuda.to_device(a)), transposed(cuda.to_device(b)), c)
    return c.copy_to_host()
