"""What the CPU kernels may use of this processor, asked of Numba's own target.

An instruction that the target does not have ends the process while it is compiled, without an
exception, so kernels ask first. The rungs, and what runs on each:

    amx          as avx512bf16, but products of bfloat16 by tiles of 16 x 16 sums
    avx512bf16   vectors of 512 bits, and products of pairs of bfloat16
    avx512       vectors of 512 bits
    avx2         vectors of 256 bits with fused multiply-add
    plain        NumPy and plain loops: other processors, ARM among them

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES restrict the target and so choose a lower rung. Compiled code
is kept in a folder of its rung, so that the code of two never meets (see cache).
"""

import ctypes
import sys

from numba.core.registry import cpu_target

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
RUNGS = {
    "amx": (*_AVX512, "avx512bf16", "amx-tile", "amx-bf16"),
    "avx512bf16": (*_AVX512, "avx512bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma"),
    "plain": (),
}
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def rung_of(features: str) -> str:
    """The highest rung for a list of features as LLVM writes it: "+avx2,+fma,-avx512f"."""
    given = features.split(",")
    return next(rung for rung, needs in RUNGS.items()
                if all(f"+{need}" in given for need in needs)
                and (rung != "amx" or _tiles_permitted()))


def _tiles_permitted() -> bool:
    """Linux lets a process use tiles when it has asked: Documentation/arch/x86/xstate.rst."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2]
RUNG = rung_of(_FEATURES)
VECTORS = RUNG != "plain"  # whether kernels/common/simd.py may be used
AVX512 = RUNG not in ("avx2", "plain")  # whether a vector is one register
TILES = RUNG == "amx"  # whether kernels/common/amx.py may be
BF16 = TILES or RUNG == "avx512bf16"  # whether pairs of bfloat16 may be, and so such operands
VNNI = AVX512 and "+avx512vnni" in _FEATURES.split(",")  # products of int16 that are added at once
