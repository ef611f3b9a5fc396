"""The on-disk cache of CUDA kernels, and what importing them does: nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda")

ROOT = Path(__file__).resolve().parents[2]
HELPER = """
from .common.cuda import device_function, float32

@device_function
def helper(x):
    return x * float32({factor})
"""
KERNEL = """
from .common.cuda import Floats, cuda, device_function, float32, kernel
from .helper import helper

def make(width):
    @device_function
    def inner(x):
        return helper(x)

    @kernel(threads=32, name=f"scale_{width}")
    def scale(out: Floats, x: Floats):
        i = cuda.grid(1)
        out[i] = inner(x[i]) + float32(width)

    return scale

one, two = make(1), make(2)
"""
RUN = """
import vgpu
vgpu.install(cc={cc})
import numpy as np
from numba import cuda
from pkg.kernel import one, two
x, out = cuda.to_device(np.full(32, 3, np.float32)), cuda.device_array(32, np.float32)
results = []
for made in (one, two):
    made.launch(1, out, x)
    results.append(float(out.copy_to_host()[31]))
print(results, sum(sum(made.dispatcher._cache_hits.values()) for made in (one, two)))
"""
IMPORT = """
import warnings, numba.cuda
from numba.cuda.cudadrv.driver import driver
filters, called = list(warnings.filters), set(vars(driver))
config = {k: v for k, v in vars(numba.config).items() if k.isupper()}
import kernels
from kernels import compile_report
from kernels.common import cuda
compile_report.load_gpu_modules()
made = cuda.all_kernels().values()
print(config == {k: v for k, v in vars(numba.config).items() if k.isupper()},
      [f for f in warnings.filters if f not in filters], set(vars(driver)) - called,
      len(made) > 20, [kernel for kernel in made if "dispatcher" in vars(kernel)])
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with two kernels around a copy of our own layer; returns the folder above it."""
    shutil.copytree(ROOT / "kernels" / "common", tmp_path / "pkg" / "common",
                    ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pkg" / "__init__.py").touch()
    write_helper(tmp_path, 2)
    (tmp_path / "pkg" / "kernel.py").write_text(KERNEL)
    return tmp_path


def write_helper(folder: Path, factor: int) -> None:
    (folder / "pkg" / "helper.py").write_text(HELPER.format(factor=factor))


def run(folder: Path, code: str = RUN.format(cc=(9, 0)), **variables: str) -> tuple[str, str]:
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'tests'}{os.pathsep}{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1", "ANDREA_CACHE_DIR": str(folder / "cache"), **variables}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_kernels_are_compiled_once_and_again_after_an_edit(package):
    """Also those of a factory, although what they close over has another name in each process."""
    assert run(package) == ("[7.0, 8.0] 0", "")
    assert run(package) == ("[7.0, 8.0] 2", "")
    write_helper(package, 10)
    assert run(package) == ("[31.0, 32.0] 0", "")


def test_code_of_another_device_is_not_used(package):
    run(package)
    assert run(package, RUN.format(cc=(8, 0))) == ("[7.0, 8.0] 0", "")
    assert run(package) == ("[7.0, 8.0] 2", "")


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_file_is_replaced(package, suffix):
    run(package)
    for path in (package / "cache").rglob(f"*.{suffix}"):
        path.write_bytes(b"damaged")
    assert run(package) == ("[7.0, 8.0] 0", "")
    assert run(package) == ("[7.0, 8.0] 2", "")


def test_an_unusable_folder_costs_one_notice(package):
    blocked = package / "file"
    blocked.write_text("a file where a folder is needed")
    out, err = run(package, ANDREA_CACHE_DIR=str(blocked))
    assert out == "[7.0, 8.0] 0" and err.count("\n") == 1 and "ANDREA_CACHE_DIR" in err


def test_importing_every_kernel_compiles_nothing_and_changes_no_setting(tmp_path):
    assert run(tmp_path, IMPORT) == ("True [] set() True []", "")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("hidden", "words"), [
    ("numba_cuda", "numba-cuda not installed"),
    ("cuda.bindings", "a package that numba-cuda needs cannot be imported"),
])
def test_without_numba_cuda_it_says_what_to_install(tmp_path, hidden, words):
    code = (f"import sys; sys.modules[{hidden!r}] = None\n"
            "from kernels import registry; print(registry.problem('gpu'))")
    out, err = run(tmp_path, code)
    assert words in out and "pip install '.[cu13]'" in out and "\n" not in out and err == ""


def test_versions_that_do_not_fit_are_one_line(tmp_path):
    """numba-cuda 0.29 on numba 0.68 ends its import with an AttributeError."""
    (tmp_path / "numba_cuda.py").write_text("raise AttributeError('no NPDatetime')")
    code = (f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
            "from kernels import registry; print(registry.problem('gpu'))")
    out, err = run(tmp_path, code)
    assert "do not fit together" in out and "NPDatetime" in out and "\n" not in out and err == ""


def test_numbas_own_target_and_simulator_are_reported(tmp_path):
    code = ("import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Numba' not in "
            "type(f).__name__]\nfrom kernels import registry; print(registry.problem('gpu'))")
    assert "only numba's own CUDA target (Built-in)" in run(tmp_path, code)[0]
    code = "from kernels import registry; print(registry.problem('gpu'))"
    assert "unset it" in run(tmp_path, code, NUMBA_ENABLE_CUDASIM="1")[0]


def test_without_a_driver_it_says_so(tmp_path):
    pytest.importorskip("vgpu.presence")
    from vgpu.presence import real_gpu

    if real_gpu():
        pytest.skip("there is a GPU")
    code = "from kernels import registry; print(registry.problem('gpu'))"
    assert run(tmp_path, code)[0].startswith("no GPU: ")
