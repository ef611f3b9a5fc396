"""The on-disk cache of compiled kernels: fresh after any edit, shared, and never in the way."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMON = ROOT / "kernels" / "common"

HELPER = """
from .common.cache import njit

@njit()
def helper(x):
    return x * {factor}
"""
KERNEL = """
from .common.cache import njit
from .helper import helper

@njit()
def kernel(x):
    return helper(x) + 1

@njit()
def other(x):
    return x - 1
"""
REPORT = """
import pkg.kernel as k
print(k.kernel(3.0), k.other(3.0), sum(k.kernel.stats.cache_hits.values()))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two modules around a copy of the cache helper; returns the folder above it."""
    common = tmp_path / "pkg" / "common"
    common.mkdir(parents=True)
    (common / "__init__.py").touch()
    (common.parent / "__init__.py").touch()
    for name in ("cache.py", "cpu_features.py"):
        shutil.copy(COMMON / name, common / name)
    write_helper(tmp_path, 2)
    (common.parent / "kernel.py").write_text(KERNEL)
    return tmp_path


def write_helper(folder: Path, factor: int) -> None:
    (folder / "pkg" / "helper.py").write_text(HELPER.format(factor=factor))


def start(folder: Path, code: str = REPORT, **variables: str) -> subprocess.Popen:
    drop = {"ANDREA_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"}
    environment = {k: v for k, v in os.environ.items() if k not in drop}
    environment.update({"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **variables})
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip(), err


def run(folder: Path, code: str = REPORT, **variables: str) -> tuple[str, str]:
    variables = variables or {"ANDREA_CACHE_DIR": str(folder / "cache")}
    return finish(start(folder, code, **variables))


def test_second_process_hits_and_edited_helper_takes_effect(package: Path) -> None:
    assert run(package) == ("7.0 2.0 0", "")
    assert run(package) == ("7.0 2.0 1", "")
    write_helper(package, 10)
    assert run(package) == ("31.0 2.0 0", "")
    write_helper(package, 2)
    assert run(package) == ("7.0 2.0 1", ""), "the folder of the earlier sources is kept"


def test_numba_alone_would_be_stale(package: Path) -> None:
    """Negative control: with Numba's own cache the edited helper goes unnoticed."""
    (package / "pkg" / "common" / "cache.py").write_text(
        "import numba\ndef njit():\n    return numba.njit(cache=True)\n")
    variables = {"NUMBA_CACHE_DIR": str(package / "cache")}
    assert run(package, **variables)[0] == "7.0 2.0 0"
    write_helper(package, 10)
    assert run(package, **variables)[0] == "7.0 2.0 1"


def test_import_compiles_and_writes_nothing(package: Path) -> None:
    out, err = run(package, "import pkg.kernel as k; print(k.kernel.signatures)")
    assert (out, err) == ("[]", "")
    assert not (package / "cache").exists()


def test_importing_every_cpu_kernel_compiles_nothing(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import importlib, numba
from kernels.registry import OPS
compiled = []
for op in OPS:
    module = importlib.import_module(f"kernels.{{op}}.cpu")
    for name, value in vars(module).items():
        if isinstance(value, numba.core.dispatcher.Dispatcher) and value.signatures:
            compiled.append(name)
print(compiled)
"""
    assert run(tmp_path, code) == ("[]", "")
    assert not (tmp_path / "cache").exists()


def test_unusable_folder_runs_with_one_notice(package: Path) -> None:
    blocked = package / "file"
    blocked.write_text("a file where a folder is needed")
    out, err = run(package, ANDREA_CACHE_DIR=str(blocked))
    assert out == "7.0 2.0 0"
    assert err.count("\n") == 1
    assert "ANDREA_CACHE_DIR" in err
    assert str(blocked) in err


def test_reading_the_cache_gives_the_bits_of_the_run_that_compiled(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
from kernels.cross_entropy import cpu
logits = np.random.default_rng(0).standard_normal((64, 100), np.float32)
losses, dlogits = np.empty(64, np.float32), np.empty_like(logits)
cpu.backward(losses, dlogits, logits, np.arange(64, dtype=np.int32), 100, 1.0)
print(dlogits.tobytes().hex(), sum(cpu._all_rows.stats.cache_hits.values()))
"""
    compiled, hits = run(tmp_path, code)[0].split()
    assert hits == "0"
    assert run(tmp_path, code) == (f"{compiled} 1", "")


def test_kernel_runs_its_own_copies_of_what_it_calls(package: Path) -> None:
    """On any processor: the loader cannot put another function in the place of a copy."""
    (package / "pkg" / "kernel.py").write_text("""
import numba
from .common.cache import njit

@njit(parallel=True)
def kernel(x):
    for i in numba.prange(x.size):
        x[i] += 1
""")
    out, _ = run(package, """
import numpy as np
from pkg.kernel import kernel
kernel(np.zeros(3))
functions = kernel.overloads[kernel.signatures[0]].library.get_defined_functions()
print(*sorted({function.linkage.name for function in functions}))
""")
    assert out == "external internal"


def test_kernel_is_compiled_with_a_helper_from_the_disk(package: Path) -> None:
    (package / "pkg" / "kernel.py").write_text("""
import numba
from .common.cache import njit

@njit()
def helper(x):
    return 2 * x

@njit(parallel=True)
def kernel(x):
    for i in numba.prange(x.size):
        x[i] = helper(x[i])
""")
    assert run(package, "from pkg.kernel import helper; print(helper(1.5))")[0] == "3.0"
    out, _ = run(package, """
import numpy as np
from pkg.kernel import helper, kernel
x = np.ones(3)
kernel(x)
print(*x, helper(x[0]), sum(helper.stats.cache_hits.values()))
""")
    assert out == "2.0 2.0 2.0 4.0 1"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_runs_with_one_notice(package: Path) -> None:
    folder = package / "cache"
    folder.mkdir()
    folder.chmod(0o500)
    out, err = run(package)
    assert (out, err.count("\n")) == ("7.0 2.0 0", 1)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_file_is_compiled_again(package: Path, suffix: str) -> None:
    run(package)
    for path in (package / "cache").rglob(f"*.{suffix}"):
        path.write_bytes(b"damaged")
    assert run(package) == ("7.0 2.0 0", "")
    assert run(package) == ("7.0 2.0 1", ""), "the damaged file was replaced"


def test_processes_at_the_same_time(package: Path) -> None:
    """Different signatures of one function: no process may load another's code."""
    code = "import pkg.kernel as k; print([k.kernel(x) for x in ({})])"
    orders = {"3, 3.0, 3j": "[7, 7.0, (1+6j)]", "3j, 3.0, 3": "[(1+6j), 7.0, 7]"}
    variables = {"ANDREA_CACHE_DIR": str(package / "cache")}
    running = [(start(package, code.format(order), **variables), expected)
               for order, expected in orders.items() for _ in range(2)]
    for process, expected in running:
        assert finish(process) == (expected, "")
    for order, expected in orders.items():
        assert run(package, code.format(order)) == (expected, "")


def test_base_folder(package: Path) -> None:
    variables = {name: str(package / name) for name in
                 ("ANDREA_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME")}
    code = "from pkg.common import cache; print(cache.cache_folder())"
    for name in list(variables):
        folder = Path(run(package, code, **variables)[0])
        base = package / "HOME" / ".cache" if name == "HOME" else package / name
        assert folder.parent == base / "andrea-numba" / "jit"
        del variables[name]


def test_oldest_folders_are_removed(package: Path) -> None:
    jit = package / "cache" / "andrea-numba" / "jit"
    for age in range(6):
        folder = jit / f"old{age}"
        folder.mkdir(parents=True)
        os.utime(folder, (1e9 - age, 1e9 - age))
    run(package)
    kept = {path.name for path in jit.iterdir()}
    assert {name for name in kept if name.startswith("old")} == {"old0", "old1", "old2"}
    assert len(kept) == 4
