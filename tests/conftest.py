"""Set-up shared by the whole suite."""

import os
import sys
from pathlib import Path

import pytest

# As the programs do before NumPy and Numba load: the BLAS and the OpenMP threads must not spin
# against each other on a small machine.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

ROOT = Path(__file__).resolve().parent.parent
# Compiled kernels and token files of the tests stay out of the user's cache; they are kept
# between runs, and shared by all processes of a run.
os.environ.setdefault("ANDREA_CACHE_DIR", str(ROOT / ".pytest_cache" / "andrea-numba"))
for folder in (ROOT / "tests", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

DEVICE = pytest.StashKey[str]()


def pytest_configure(config):
    """ANDREA_TEST_DEVICE=virtual or real forces a device; else a real GPU is used if found."""
    import vgpu

    try:
        config.stash[DEVICE] = vgpu.prepare(os.environ.get("ANDREA_TEST_DEVICE"))
    except RuntimeError as error:
        raise pytest.UsageError(f"ANDREA_TEST_DEVICE: {error}") from None
    # Kernels compiled for the virtual GPU must never reach a run on a real one.
    folder = "numba-" + config.stash[DEVICE].partition(" ")[0].lower()
    os.environ["NUMBA_CACHE_DIR"] = str(ROOT / ".pytest_cache" / folder)


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(f"CUDA tests ran on: {config.stash[DEVICE]}")


@pytest.fixture
def text(tmp_path):
    """A folder that holds a short text, t.txt."""
    from helpers import TEXT

    (tmp_path / "t.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def train(text):
    """Run andrea-train, with a tiny model unless told otherwise, in the folder `text`."""
    from helpers import TINY, run_program

    def run(*arguments, tiny=True, **options):
        return run_program("andrea-train", *arguments, *(TINY if tiny else ()), cwd=text, **options)
    return run
