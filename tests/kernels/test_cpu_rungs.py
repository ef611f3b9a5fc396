"""The accuracy suite on the lower rungs of the ladder, by restricting what Numba compiles for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.common import cpu_features

TESTS = Path(__file__).resolve().parent
AVX2 = ("+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe")
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
TARGETS = {  # Numba's name of the processor, and its features
    "avx512bf16": ("cooperlake", f"{AVX512},+avx512vnni,+avx512bf16"),
    "avx512": ("skylake-avx512", AVX512),
    "avx2": ("haswell", AVX2),
    "plain": ("generic", ""),
}
LOWER = list(cpu_features.RUNGS)[list(cpu_features.RUNGS).index(cpu_features.RUNG) + 1:]


@pytest.mark.parametrize("rung", LOWER)
def test_the_accuracy_suite_is_green_on(rung):
    name, features = TARGETS[rung]
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    files = ["test_simd.py", "test_matmul.py", "test_attention.py", "test_cross_entropy.py",
             "test_all_ops.py"]
    done = subprocess.run(
        [sys.executable, "-c", "import sys, pytest\n"
         "from kernels.common import cpu_features\n"
         f"assert cpu_features.RUNG == {rung!r}, cpu_features.RUNG\n"
         "sys.exit(pytest.main(sys.argv[1:]))",
         "-n", "0", "-q", "-k", "not gpu and not oracle_in", *(TESTS / file for file in files)],
        env=environment, cwd=TESTS.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
