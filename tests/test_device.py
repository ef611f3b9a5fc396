"""Which device is chosen, and the one line that says why; none of it needs a GPU."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, refused, run_program

from andrea_numba import device
from andrea_numba.errors import UserError
from andrea_numba.memory import HOST
from andrea_numba.program import run_program as run_action
from kernels.common import cpu_features

NEW = device.Gpu("GPU", (9, 0), (13, 0))


@pytest.fixture
def problem(monkeypatch):
    """`cuda_problem()` on a machine that differs in one point from one where CUDA works."""
    numba_cuda = pytest.importorskip("kernels.common.cuda").cuda

    def ask(gpu=NEW, toolkit=(13, 5), nvvm=True, version="", linker=True):
        def linker_version():
            if not linker:
                raise RuntimeError('Failure finding "libnvJitLink.so":\n none')
            return "13.5"

        def found():
            if isinstance(gpu, Exception):
                raise gpu
            return gpu

        monkeypatch.setattr(device, "gpu", found)
        monkeypatch.setattr("kernels.common.cuda.linker_version", linker_version)
        monkeypatch.setattr(numba_cuda.runtime, "get_version", lambda: toolkit)
        monkeypatch.setattr(numba_cuda.cudadrv.nvvm, "is_available", lambda: nvvm)
        monkeypatch.setattr(Path, "read_text", lambda path, **options: version)
        answer = device.cuda_problem()
        assert "\n" not in answer
        return answer

    return ask


def test_nothing_is_wrong_where_everything_is_there(problem):
    assert problem() == ""
    assert problem(device.Gpu("A100", (8, 0), (13, 0)), toolkit=(12, 9)) == ""


def test_a_gpu_that_is_too_old(problem):
    assert "RTX 2080 has compute capability 7.5; 8.0 is the oldest" in problem(
        device.Gpu("RTX 2080", (7, 5), (13, 0)))


@pytest.mark.parametrize(("driver", "extra"), [((13, 0), "cu13"), ((12, 4), "cu12")])
def test_a_missing_compiler_names_the_extra_for_the_driver(problem, driver, extra):
    answer = problem(device.Gpu("GPU", (9, 0), driver), nvvm=False)
    assert "NVVM" in answer and answer.endswith(f"pip install '.[{extra}]'")


def test_a_missing_linker_is_found_before_auto_chooses_cuda(problem):
    assert "(nvJitLink) is not installed: pip install '.[cu13]'" in problem(linker=False)


def test_a_driver_older_than_the_toolkit_names_both_versions(problem):
    answer = problem(device.Gpu("GPU", (9, 0), (12, 4)))
    assert "CUDA 12.4" in answer and "CUDA 13.5" in answer and "'.[cu12]'" in answer


@pytest.mark.parametrize(("error", "words"), [
    ("Error at driver init: \n\nCUDA driver library cannot be found.\n", "no NVIDIA driver"),
    ("Call to cuInit results in CUDA_ERROR_NO_DEVICE", "finds no GPU"),
    ("libNVVM cannot be found", "(NVVM) is not installed: pip install '.[cu13]'"),
    ("No libnvJitLink.so found", "(nvJitLink) is not installed: pip install '.[cu13]'"),
    ('Failure finding "libnvrtc.so"', "(NVRTC) is not installed: pip install '.[cu13]'"),
    ("CUDA is disabled due to setting NUMBA_DISABLE_CUDA=1 …:", "CUDA off: unset it"),
    ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "driver is older"),
    ("something\nnew", "CUDA does not work: something new"),
])
def test_errors_of_cuda_become_one_line(problem, error, words):
    assert words in problem(RuntimeError(error))


def test_wsl_gets_its_hint(problem):
    error = RuntimeError("Call to cuInit results in CUDA_ERROR_NO_DEVICE (100)")
    assert "WSL" in problem(error, version="Linux version 5.15 (Microsoft@Microsoft.com)")
    assert "WSL" not in problem(error, version="Linux version 6.1")


def test_without_numba_cuda_the_built_in_target_does_not_count(monkeypatch):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert device.cuda_problem() == "numba-cuda not installed: pip install '.[cu13]'"


def test_the_choice(monkeypatch):
    monkeypatch.setattr(device, "cuda_problem", lambda: "the reason")
    kernels = f"{cpu_features.RUNG} kernels"
    assert device.choose("auto").line == f"device: cpu ({kernels}; the reason)"
    assert device.choose("auto").memory is HOST
    with pytest.raises(UserError, match="--device cuda: the reason; use --device cpu"):
        device.choose("cuda")
    monkeypatch.setattr(device, "cuda_problem", lambda: pytest.fail("CUDA was touched"))
    assert device.choose("cpu").line == f"device: cpu ({kernels})"
    monkeypatch.setattr(cpu_features, "BF16", True)
    chosen = device.choose("cpu", "bf16")
    assert chosen.line == f"device: cpu ({kernels}), products in bf16"
    assert chosen.memory.precision == "bf16"
    monkeypatch.setattr(cpu_features, "BF16", False)
    with pytest.raises(UserError, match=r"needs a GPU or .* avx512_bf16.*--precision fp32"):
        device.choose("cpu", "bf16")


def test_errors_of_a_start_are_explained_or_left_alone():
    with pytest.raises(UserError, match=r"older than the installed CUDA toolkit.*--device cpu"), \
            device.explained():
        raise RuntimeError("ptxas: PTX was compiled with an unsupported toolchain")
    with pytest.raises(ZeroDivisionError), device.explained():
        raise ZeroDivisionError


@pytest.mark.parametrize("program", ["andrea-train", "andrea-generate"])
def test_cpu_and_help_never_import_cuda(text, program):
    (text / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith(('numba.cuda', 'numba_cuda', 'cuda')):\n"
        "            raise SystemExit(f'{name} is imported')\n"
        "sys.meta_path.insert(0, Refuse())\n")
    arguments = ["--help"] if program == "andrea-generate" else [
        "t.txt", "--device", "cpu", "--steps", 1, "--d-model", 8, "--n-head", 1, "--n-layer", 1,
        "--context", 8, "--sample-tokens", 4, "--threads", 1]
    result = run_program(program, *arguments, cwd=text, env={"PYTHONPATH": str(text)})
    assert result.returncode == 0, result.stderr
    assert "CUDA" not in result.stderr and "driver" not in result.stderr


def test_cuda_without_a_gpu_fails_soon_and_leaves_nothing(text):
    no_gpu = "import vgpu.presence; print(vgpu.presence.real_gpu())"
    found = subprocess.run([sys.executable, "-c", no_gpu], cwd=ROOT / "tests", text=True,
                           capture_output=True).stdout
    if found == "True\n":
        pytest.skip("this machine has a GPU")
    started = time.perf_counter()
    result = run_program("andrea-train", "t.txt", "--device", "cuda", "--steps", 2, cwd=text)
    refused(result, "--device cuda", "--device cpu")
    assert not (text / "runs").exists()
    if "driver" in result.stderr:  # numba-cuda was imported and asked
        assert time.perf_counter() - started < 30  # 5 s on an idle machine


@pytest.mark.parametrize(("smaller", "end"), [
    ("less of it may fit", "not enough memory (3 TB); less of it may fit\n"),
    ("", "not enough memory (3 TB)\n")])
def test_memory_that_is_short_is_one_line_with_the_programs_own_remedy(capsys, smaller, end):
    def action():
        raise MemoryError("3 TB")

    assert run_action("program", action, smaller) == 2
    assert capsys.readouterr().err == f"program: error: {end}"


# ---- signals while a program starts

# Python's own handler: a job in the background of a script may have inherited "ignore SIGINT".
AT_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Strike())
"""
STARTERS = {
    "andrea-train": [str(ROOT / "bin" / "andrea-train"), "t.txt"],
    "andrea-generate": [str(ROOT / "bin" / "andrea-generate")],
    "cli_train": ["-m", "andrea_numba.cli_train", "t.txt"],
    "cli_generate": ["-m", "andrea_numba.cli_generate"],
}


def ended_by(number: int, process_result, program: str) -> None:
    """The exit code of a signal, and for SIGINT one line; never a traceback."""
    assert process_result.returncode == 128 + number, process_result.stderr
    said = re.sub(r"^(device: .*|compiling kernels .*|)\n", "", process_result.stderr, flags=re.M)
    assert said == (f"{program}: interrupted\n" if number == signal.SIGINT else "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("starter", "module"), [
    *((starter, "argparse") for starter in STARTERS),  # the first that takes time
    ("andrea-train", "numpy"), ("cli_train", "numba.core.types"), ("cli_generate", "numpy"),
    ("andrea-train", "andrea_numba.corpora"),
])
def test_a_signal_in_an_import_ends_the_program_quietly(text, starter, module, number):
    (text / "sitecustomize.py").write_text(AT_IMPORT.format(name=module, number=int(number)))
    environment = {**os.environ, "PYTHONPATH": f"{text}{os.pathsep}{ROOT}"}
    before = sorted(text.iterdir())
    result = subprocess.run([sys.executable, *STARTERS[starter]], cwd=text, env=environment,
                            capture_output=True, text=True, timeout=120)
    ended_by(number, result, "andrea-" + re.split("[-_]", starter)[1])
    assert sorted(p for p in text.iterdir() if p.name != "__pycache__") == before


@pytest.mark.parametrize("delay", [0.2, 1.5])
def test_a_signal_while_kernels_are_compiled_ends_the_program_at_once(text, tmp_path, delay):
    """Numba's compiler calls back from C, where an exception would be printed and forgotten."""
    (text / "sitecustomize.py").write_text(AT_IMPORT.format(name="", number=0))
    environment = {**os.environ, "PYTHONPATH": str(text), "ANDREA_CACHE_DIR": str(tmp_path / "c")}
    process = subprocess.Popen(
        [sys.executable, *STARTERS["andrea-train"], "--device", "cpu", "--context", "16"],
        cwd=text, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = ""
    while "compiling" not in said:
        said += process.stderr.readline()
        assert process.poll() is None, said
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=20)
    ended_by(signal.SIGINT, subprocess.CompletedProcess([], process.returncode, "", said + rest),
             "andrea-train")
    assert not (text / "runs").exists()
