"""What the CPU kernels may use of this processor, asked of Numba's own target.

An instruction that the target does not have ends the process while it is compiled, without an
exception, so kernels ask first. The rungs, and what runs on each:

    avx512bf16   vectors of 512 bits, and products of pairs of bfloat16
    avx512       vectors of 512 bits
    avx2         vectors of 256 bits with fused multiply-add
    plain        NumPy and plain loops: other processors, ARM among them

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES restrict the target and so choose a lower rung. Numba's cache
keys contain both, so that the code of two rungs never meets.
"""

from numba.core.registry import cpu_target

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
RUNGS = {
    "avx512bf16": (*_AVX512, "avx512bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma"),
    "plain": (),
}


def rung_of(features: str) -> str:
    """The highest rung for a list of features as LLVM writes it: "+avx2,+fma,-avx512f"."""
    given = features.split(",")
    return next(rung for rung, needs in RUNGS.items()
                if all(f"+{need}" in given for need in needs))


RUNG = rung_of(cpu_target.target_context.codegen().magic_tuple()[2])
VECTORS = RUNG != "plain"  # whether kernels/common/simd.py may be used
BF16 = RUNG == "avx512bf16"  # whether its pairs of bfloat16 may be, and so such operands
