"""Putting the virtual GPU in the place of the driver, and running programs on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import vgpu
from vgpu import presence

TESTS = Path(vgpu.__file__).resolve().parents[1]
RUN = """
import sys
import warnings
import numpy as np
from numba import cuda
warnings.simplefilter("ignore")

@cuda.jit(cache=True)
def add(x, value, extra):
    i = cuda.grid(1)
    if i < x.size + extra:
        x[i] += value

if __name__ == "__main__":
    x = cuda.to_device(np.arange(8.0))
    add[1, 32](x, 1.5, int(sys.argv[1]))
    hits = sum(add.stats.cache_hits.values())
    print("result", x.copy_to_host().sum(), "hits", hits, cuda.get_current_device().name)
    sys.exit(int(sys.argv[2]))
"""


def python(*arguments, folder, **variables):
    """Run Python in a process of its own, without the device of this one."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"),
                   "PYTHONPATH": str(TESTS), **variables}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=120)


def test_names_that_are_missing_are_reported(monkeypatch):
    from vgpu import patches

    monkeypatch.setattr(patches, "NAMES", (*patches.NAMES, ("numba.cuda.dispatcher", "take_off"),
                                           ("numba.cuda.nowhere", "launch")))
    with pytest.raises(vgpu.VirtualGPUError) as caught:
        patches.check_names()
    report = str(caught.value)
    assert "numba.cuda.dispatcher.take_off, numba.cuda.nowhere.launch is missing" in report
    assert "supported: numba-cuda 0.30.*, cuda-core 1.2.*, cuda-bindings 13.4.*" in report
    assert len(report.splitlines()) == 1


def test_versions_and_packages_are_checked(monkeypatch):
    from vgpu import patches

    versions = {**patches.SUPPORTED, "numba-cuda": "0.28.1"}
    monkeypatch.setattr(patches, "_version", versions.get)
    with pytest.warns(UserWarning, match=r"not tested with numba-cuda 0\.28\.1, .*0\.30\.\*"):
        patches.check_names()
    del versions["numba-cuda"]
    with pytest.raises(vgpu.VirtualGPUError, match="numba-cuda is not installed"):
        patches.check_names()


def test_options():
    with vgpu.options(race=False, seed=5) as options:
        assert not options.race and options.seed == 5
        with vgpu.options(race=True):
            assert options.race
        assert not options.race
    assert options.race and options.seed == 0
    for wrong in (dict(speed=1), dict(schedule="best"), dict(memory=1), dict(race="no"),
                  dict(chunk=0), dict(chunk="many"), dict(seed=None), dict(seed=-1)):
        with pytest.raises(ValueError, match=next(iter(wrong))), vgpu.options(**wrong):
            pass


def test_programs_run_with_their_exit_code_and_a_cache(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(RUN)
    first = python("-m", "vgpu", script, 0, 0, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout == "result 40.0 hits 0 Virtual GPU (sm_90)\n"
    # under another package name, and as a module
    again = python("-m", f"{TESTS.name}.vgpu", "--no-race", "-m", "program", 0, 3, folder=tmp_path,
                   PYTHONPATH=f"{TESTS.parent}{os.pathsep}{tmp_path}")
    assert again.returncode == 3, again.stderr
    assert again.stdout == "result 40.0 hits 1 Virtual GPU (sm_90)\n"


def test_an_error_of_the_device_is_reported(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(RUN)
    result = python("-m", "vgpu", "--cc", "12.0", script, 1, 0, folder=tmp_path)
    assert result.returncode == 70
    assert result.stderr.startswith("out of bounds: ") and "kernel add" in result.stderr
    assert f'raised in File "{script}", line 16' in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere.py"], "there is no file nowhere.py"),
    (["-m", "no.where"], "there is no module no.where"),
    (["--cc", "7.5", "x.py"], "'7.5' is none of 8.0, "),
    (["--chunk", "0", "x.py"], "option chunk=0 is less than 1")])
def test_a_wrong_command_line_is_one_message(tmp_path, arguments, message):
    result = python("-m", "vgpu", *arguments, folder=tmp_path)
    assert result.returncode == 2 and message in result.stderr.splitlines()[-1]


def test_leaks_are_listed_at_the_end(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import sys\nfrom numba import cuda\n"
                      "sys.leaked = cuda.device_array(100)\nfreed = cuda.device_array(50)\n"
                      "del freed\n")
    result = python("-m", "vgpu", "--leak-check", script, folder=tmp_path)
    assert result.returncode == 0
    assert "memory leak: 1 allocations, 800 bytes" in result.stderr
    assert f"{script}:3" in result.stderr


def test_installation_waits_for_the_first_use_of_cuda(tmp_path):
    for module in presence.TRIGGERS:
        result = python("-c", "import sys, vgpu\n"
                        "print(vgpu.prepare('virtual', cc=(8, 0)))\n"
                        "assert not {'numpy', 'numba', 'numba_cuda'} & set(sys.modules)\n"
                        f"import {module}\n"
                        "from numba import cuda\n"
                        "print(vgpu.installed(), cuda.get_current_device().name)\n"
                        "vgpu.install(race=False)\n"
                        "try: vgpu.install(cc=(9, 0))\n"
                        "except ValueError as error: print(error)\n"
                        "try: vgpu.prepare('virtual', cc=(9, 0))\n"
                        "except ValueError as error: print(error)", folder=tmp_path)
        assert result.stdout.splitlines() == [
            "virtual GPU sm_80", "True Virtual GPU (sm_80)",
            *["option 'cc' cannot change after the first install"] * 2], result.stderr


def test_a_process_without_installation_has_no_gpu(tmp_path):
    result = python("-c", "from numba import cuda; print(cuda.is_available())", folder=tmp_path)
    assert result.stdout == "False\n" or presence.real_gpu()


def test_choices_of_the_device(monkeypatch):
    with pytest.raises(RuntimeError, match="'virtual' or 'real'"):
        vgpu.prepare("imaginary")
    monkeypatch.setattr(presence, "real_gpu", lambda: False)
    monkeypatch.setattr(presence, "install_on_import", lambda options: None)
    monkeypatch.setattr(presence.importlib.util, "find_spec", lambda name: None)
    assert vgpu.prepare(None) == "no CUDA (numba-cuda is not installed)"
    for choice in ("virtual", "real"):
        with pytest.raises(RuntimeError, match="numba-cuda is not installed"):
            vgpu.prepare(choice)
    monkeypatch.setattr(presence.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(RuntimeError, match="finds none"):
        vgpu.prepare("real")
    assert vgpu.prepare("") == "virtual GPU sm_90"
    monkeypatch.setattr(presence, "real_gpu", lambda: True)
    assert vgpu.prepare(None) == "real GPU"
    assert vgpu.prepare("virtual") == "virtual GPU sm_90"
