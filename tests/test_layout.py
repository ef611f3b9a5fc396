"""The rules of the tree: what lies where, what may import what, and how long a file may get."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kernels
from kernels.registry import OPS, implementations, load_op, load_spec

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {
    ".ci", ".gitignore", "LICENSE", "README.md", "andrea_numba", "bin", "data", "kernels",
    "pyproject.toml", "tests",
}
# What tools and runs leave behind; .gitignore keeps it out of the repository.
LEFT_BEHIND = {
    ".git", ".hypothesis", ".pytest_cache", ".ruff_cache", ".venv", "__pycache__", "build", "dist",
    "runs",
}
OP_FILES = {"__init__.py", "oracle.py", "cpu.py", "gpu.py", "spec.py"}
SOURCES = sorted(
    path
    for folder in ("andrea_numba", "kernels", "data", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
PROGRAM = [p for p in SOURCES if p.relative_to(ROOT).parts[0] in ("andrea_numba", "kernels")]
PROGRAM += [path for path in sorted((ROOT / "bin").glob("*")) if path.is_file()]
KERNELS = [path for path in SOURCES if path.is_relative_to(ROOT / "kernels")]


def name_of(path):
    return str(path.relative_to(ROOT))


def lines(paths):
    """(file:line, text) of every line of the files."""
    for path in paths:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{name_of(path)}:{number}", text


def imports(path):
    """(level, module) of every import of a file; level 0 is absolute."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
            if node.level == 0:
                yield from ((0, f"{node.module}.{alias.name}") for alias in node.names)


def test_top_level_entries():
    found = {path.name for path in ROOT.iterdir() if path.suffix != ".egg-info"}
    assert found - LEFT_BEHIND == TOP_LEVEL


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_the_same_files(op):
    found = {path.name for path in (ROOT / "kernels" / op).glob("*") if path.name != "__pycache__"}
    beyond = found - OP_FILES
    assert found >= OP_FILES
    assert all(re.fullmatch(r"[cg]pu_\w+\.py", name) for name in beyond), beyond


def test_the_registry_lists_every_op():
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/oracle.py")}
    assert folders == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_one_signature_for_all_implementations(op):
    for name in load_spec(op).FUNCTIONS:
        reference = inspect.signature(getattr(load_op(op, "oracle"), name)).parameters
        for backend in implementations(op):
            if backend == "gpu" and not importlib.util.find_spec("numba_cuda"):
                continue
            parameters = inspect.signature(getattr(load_op(op, backend), name)).parameters
            assert list(parameters) == list(reference), f"{op}.{name} of {backend}"
        function = load_spec(op).FUNCTIONS[name]
        assert list(reference)[: len(function.outputs)] == list(function.outputs)
        assert [p for p in reference if p in function.arrays] == list(function.arrays)


@pytest.mark.parametrize("op", OPS)
def test_every_spec_says_all_there_is_to_say(op):
    spec, oracle = load_spec(op), load_op(op, "oracle")
    public = {
        name
        for name, value in vars(oracle).items()
        if inspect.isfunction(value) and value.__module__ == oracle.__name__ and name[0] != "_"
    }
    assert public == set(spec.FUNCTIONS) == set(getattr(kernels, op).__all__)
    assert spec.CASES and spec.BENCH_CASES and spec.TOLERANCE >= 1
    assert callable(spec.make_inputs) and (not spec.GRADIENTS or callable(spec.objective))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_stay_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_lines_stay_short():
    assert [place for place, text in lines(SOURCES + PROGRAM) if len(text) > 100] == []


@pytest.mark.parametrize("path", KERNELS, ids=name_of)
def test_kernels_imports_only_itself_relatively_and_libraries(path):
    for level, module in imports(path):
        assert level > 0 or module.split(".")[0] not in ("andrea_numba", "kernels"), module


def test_only_two_files_import_cuda():
    """What the kernels need of it, and the search for its libraries, which is to work where the
    first cannot be imported."""
    importers = [
        name_of(path)
        for path in SOURCES
        if path.is_relative_to(ROOT / "kernels") or path.is_relative_to(ROOT / "andrea_numba")
        if any(level == 0 and module.startswith(("numba.cuda", "cuda."))
               for level, module in imports(path))
    ]
    assert set(importers) <= {"kernels/common/cuda.py", "kernels/common/toolkit.py"}


def test_only_one_file_makes_a_compile_cache():
    allowed = "kernels/common/cache.py"
    plain = "cache=" + "True"
    assert [p for p, text in lines(PROGRAM) if plain in text.replace(" ", "")
            and not p.startswith(allowed)] == []
    direct = [
        name_of(path)
        for path in PROGRAM
        if path.suffix == ".py"
        if any(module in ("numba.njit", "numba.jit", "numba.vectorize", "numba.guvectorize",
                          "numba.core.caching")
               for level, module in imports(path) if level == 0)
    ]
    assert set(direct) <= {allowed}


def test_nothing_runs_code_from_data():
    """No pickle: a checkpoint must not be able to run code. No eval, no exec."""
    found = []
    for path in PROGRAM:
        if path.suffix != ".py":
            continue
        names = [module.split(".")[0] for level, module in imports(path) if level == 0]
        found += [f"{name_of(path)}: {n}" for n in names if n in ("pickle", "marshal", "shelve")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = getattr(getattr(node, "func", None), "id", None)
            if called in ("eval", "exec"):
                found.append(f"{name_of(path)}: {called}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{name_of(path)}: allow_pickle")
    # Numba keeps compiled code in pickles of its own: its cache names the errors of reading one.
    cache = ROOT / "kernels/common/cache.py"
    used = set(re.findall(r"pickle\.(\w+)", cache.read_text(encoding="utf-8")))
    assert set(found) <= {f"{name_of(cache)}: pickle"} and used <= {"UnpicklingError"}


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert kernels.__version__ == project["version"]


def test_ruff_is_clean():
    result = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT,
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
