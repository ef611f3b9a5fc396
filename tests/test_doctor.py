"""andrea-train --doctor: every probe answers, whatever is broken, and the exit code is 0."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT, run_program

import kernels.common
from andrea_numba import cli_train, device, doctor


def lines_of(report: str, title: str) -> list[str]:
    """The indented lines below a title."""
    lines = report.splitlines()
    below = lines[lines.index(title) + 1:]
    end = next((i for i, line in enumerate(below) if not line.startswith("  ")), len(below))
    return [line[2:] for line in below[:end]]


@pytest.fixture
def report(capsys):
    """Ask the doctor in this process."""
    def ask() -> str:
        assert cli_train.main(["--doctor"]) == 0
        return capsys.readouterr().out
    return ask


@pytest.fixture
def no_path(monkeypatch):
    for name in ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_a_machine_without_cuda_gets_a_whole_report(text):
    environment = {"NUMBA_CUDA_DRIVER": "/nonexistent", "CUDA_VISIBLE_DEVICES": "-1"}
    result = run_program("andrea-train", "--doctor", cwd=text, env=environment)
    assert result.returncode == 0 and result.stderr == ""
    out = result.stdout
    assert [line for line in out.splitlines() if not line.startswith(" ")][:-1] == list(
        doctor.PROBES)
    assert any(line.startswith("Python 3.") for line in lines_of(out, "packages"))
    assert any(line.startswith("numba 0.") for line in lines_of(out, "packages"))
    assert any(line.endswith("of memory free") for line in lines_of(out, "machine"))
    assert any(line.startswith("CPU kernels: ") for line in lines_of(out, "machine"))
    assert "NUMBA_CUDA_DRIVER=/nonexistent (numba-cuda does not read it)" in lines_of(
        out, "environment")
    assert "CUDA_VISIBLE_DEVICES=-1" in lines_of(out, "environment")
    assert all(line.endswith("(writable)") for line in lines_of(out, "caches"))
    assert lines_of(out, "NVIDIA driver")[0].startswith("libcuda.so.1, by the system's loader: ")
    assert out.splitlines()[-1].startswith("device: cpu (")


def test_on_a_gpu_it_is_listed_and_chosen(text):
    pytest.importorskip("numba_cuda")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-m", "tests.vgpu", "-m", "andrea_numba.cli_train", "--doctor"],
        cwd=text, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "newest CUDA that it knows: 13.0" in lines_of(result.stdout, "NVIDIA driver")
    assert lines_of(result.stdout, "GPUs") == [
        "0: Virtual GPU (sm_90), compute capability 9.0 (supported), 4.00 GiB"]
    assert result.stdout.splitlines()[-1] == (
        "device: cuda (Virtual GPU (sm_90), compute capability 9.0, driver for CUDA 13.0), "
        "products in bf16")


def test_the_last_line_is_what_auto_says(report, monkeypatch):
    monkeypatch.setattr(device, "cuda_problem", lambda: "the reason")
    assert report().splitlines()[-1] == device.choose("auto").line
    assert device.choose("auto").line.endswith("; the reason)")


def test_without_numba_cuda_the_report_says_what_to_install(report, monkeypatch):
    """As in an environment where nothing of CUDA is installed."""
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    for name in ("cuda", "toolkit"):  # importing them raises ImportError
        monkeypatch.setitem(sys.modules, f"kernels.common.{name}", None)
        monkeypatch.delattr(kernels.common, name, raising=False)
    out = report()
    for title in ("CUDA toolkit", "GPUs"):
        [line] = lines_of(out, title)
        assert line.startswith("failed: ModuleNotFoundError: ")
    assert out.splitlines()[-1].endswith(f"; numba-cuda not installed: {device.INSTALL})")


@pytest.mark.parametrize("title", doctor.PROBES)
def test_a_probe_that_raises_is_one_line(report, monkeypatch, title):
    def probe():
        yield "a first line"
        raise OSError(5, "two\nlines")

    monkeypatch.setitem(doctor.PROBES, title, probe)
    out = report()
    assert lines_of(out, title) == ["a first line", "failed: OSError: [Errno 5] two lines"]
    assert out.splitlines()[-1].startswith("device: ")
    assert set(doctor.PROBES) <= set(out.splitlines())


def test_a_choice_that_raises_is_one_line(report, monkeypatch):
    def choose(name):
        raise RuntimeError("no choice")

    monkeypatch.setattr(device, "choose", choose)
    assert report().splitlines()[-1] == "failed: RuntimeError: no choice"


def test_untested_packages_are_marked(report, monkeypatch):
    cuda = pytest.importorskip("kernels.common.cuda")
    monkeypatch.setattr(doctor, "TESTED_NUMBA", "0.1.")
    monkeypatch.setattr(cuda, "TESTED", {"numba-cuda": "0.9"})
    marked = [line for line in lines_of(report(), "packages") if "is not the tested" in line]
    assert [line.split(" is not ")[1] for line in marked] == ["the tested 0.1.*",
                                                              "the tested 0.9.*"]


def test_a_library_that_is_missing_is_listed_with_every_place(report, monkeypatch, no_path):
    toolkit = pytest.importorskip("kernels.common.toolkit")

    def nothing(name):
        raise RuntimeError("Failure finding it")

    monkeypatch.setenv("CUDA_PATH", "/opt/no-cuda")
    monkeypatch.setattr(toolkit, "find_library", nothing)
    found = lines_of(report(), "CUDA toolkit")
    start = found.index(f"nvvm is missing (RuntimeError: Failure finding it): {device.EXTRAS}; "
                        "tried")
    places = [line.strip() for line in found[start + 1:] if line.startswith("  ")]
    assert any(line.endswith("nvidia/cu13/lib/libnvvm.so.4") for line in places)
    assert "libnvvm.so.4, by the system's loader" in places
    assert "/opt/no-cuda/nvvm/lib64/libnvvm.so.4" in places
    assert len([line for line in found if " is missing (" in line]) == len(toolkit.LIBRARIES)


def test_libraries_are_found_with_their_versions(no_path):
    toolkit = pytest.importorskip("kernels.common.toolkit")
    for name in toolkit.LIBRARIES:
        path, version = toolkit.find_library(name)
        assert os.path.isfile(path) and path in list(toolkit.library_places(name)), name
        assert version.replace(".", "").isdigit()
    assert any(path.is_file() for path in toolkit.libdevice_places())


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    def refuse(dir):
        raise OSError(30, "Read-only file system")

    assert doctor._writable(tmp_path / "new" / "folder") == "writable"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert doctor._writable(tmp_path) == "cannot be written: Read-only file system"
