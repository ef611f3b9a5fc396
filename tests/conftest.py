"""Set-up shared by the whole suite."""

import os
import sys
from pathlib import Path

# As the programs do before NumPy and Numba load: the BLAS and the OpenMP threads must not spin
# against each other on a small machine.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

ROOT = Path(__file__).resolve().parent.parent
# Compiled kernels and token files of the tests stay out of the user's cache; they are kept
# between runs, and shared by all processes of a run.
os.environ.setdefault("ANDREA_CACHE_DIR", str(ROOT / ".pytest_cache" / "andrea-numba"))
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
