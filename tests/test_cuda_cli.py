"""The programs on CUDA: train, go on, change the device, generate, refuse what does not fit."""

import os
import re
import subprocess
import sys

import pytest
import vgpu.presence
from helpers import ROOT, TEXT, events, refused, run_program

pytest.importorskip("numba_cuda")

SMALL = ["--d-model", 8, "--n-head", 2, "--n-layer", 1, "--context", 8, "--batch-size", 2,
         "--sample-tokens", 4, "--threads", 1]
ON_GPU = ["-m"] if vgpu.presence.real_gpu() else ["-m", "tests.vgpu", "--no-race", "-m"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda_cli")
    (folder / "t.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def program(folder):
    def run(name, *arguments):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, *ON_GPU, f"andrea_numba.cli_{name}",
                               *map(str, arguments)], cwd=folder, env=environment,
                              capture_output=True, text=True, timeout=300)
    return run


def test_train_resume_and_generate(program, folder):
    """Three steps on CUDA, one more there, one more on the CPU; then both write the same text."""
    first = program("train", "t.txt", *SMALL, "--device", "cuda", "--steps", 3, "--warmup", 1,
                    "--log-every", 2, "--eval-every", 2, "--sample-every", 2, "--precision", "fp32",
                    "--out", "run")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "andrea-generate run\n"
    assert re.search(r"^device: cuda \(.+, compute capability \d+\.\d+, .+\), "
                     r"products in fp32$", first.stderr, re.M)
    assert re.search(r"^kernels ready in [\d.]+ s$", first.stderr, re.M)
    assert "in steps, peak host memory " in first.stderr
    run = folder / "run"
    assert [e["step"] for e in events(run, "run.loss")] == [1, 2, 3]
    assert [e["step"] for e in events(run, "run.eval")] == [2, 3]

    again = program("train", "--resume", "--out", "run", "--device", "auto", "--steps", 4)
    assert again.returncode == 0, again.stderr
    assert re.search("^device: cuda .*, products in fp32$", again.stderr, re.M)  # as before
    assert "first use" not in again.stderr  # the kernels were checked, and that is remembered
    moved = program("train", "--resume", "--out", "run", "--device", "cpu", "--steps", 5)
    assert moved.returncode == 0, moved.stderr
    losses = [e["loss"] for e in events(run, "run.loss")]
    assert len(losses) == 5 and losses[4] < losses[0]

    texts = [program("generate", "run", "--prompt", "The ", "--temperature", 0, "--max-tokens", 12,
                     "--precision", "fp32", "--device", place) for place in ("cuda", "cpu")]
    assert texts[0].returncode == 0, texts[0].stderr
    assert texts[0].stdout == texts[1].stdout and texts[0].stdout.startswith("The ")


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_allocated(program, folder):
    result = program("train", "t.txt", *SMALL, "--context", 64, "--batch-size", 500_000,
                     "--device", "cuda", "--out", "large")
    refused(result, "GPU memory", "--batch-size", "would fit")
    assert not (folder / "large").exists()


@pytest.mark.skipif(vgpu.presence.real_gpu(), reason="a real GPU has more memory than this model")
def test_generation_that_does_not_fit_names_a_remedy_it_has(folder):
    trained = run_program("andrea-train", "t.txt", *SMALL, "--d-model", 256, "--steps", 1,
                          "--device", "cpu", "--out", "wide", cwd=folder)
    assert trained.returncode == 0, trained.stderr
    full = subprocess.run(
        [sys.executable, "-m", "tests.vgpu", "--memory", "0.001", "-m",
         "andrea_numba.cli_generate", "wide", "--device", "cuda"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert full.returncode == 2, full.stderr
    assert re.search(r"^andrea-generate: error: the GPU has no [\d,]+ bytes left; --no-cache takes "
                     r"less memory, .*, and --device cpu needs none of them$", full.stderr, re.M)
