"""The README's commands run as printed, and its lists match the tree."""

import re
import shlex

import pytest
from helpers import ROOT, TEXT, run_program

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block_after(heading: str) -> list[str]:
    """Lines of the first code block after a heading."""
    return re.search(rf"## {heading}.*?```\n(.*?)```", README, re.S)[1].splitlines()


def test_first_five_minutes(tmp_path):
    (tmp_path / "my.txt").write_text(TEXT * 3)
    for command in block_after("The first five minutes on your own text"):
        program, *arguments = shlex.split(command)
        assert program.startswith(".venv/bin/")
        result = run_program(program.removeprefix(".venv/bin/"), *arguments, cwd=tmp_path)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
    assert (tmp_path / "runs" / "mine" / "log.jsonl").exists()


def test_every_file_has_its_line():
    table = README[README.index("## Every file"):]
    listed = set(re.findall(r"^\| `([^`]+)` \|", table, re.M))
    files = {str(p.relative_to(ROOT)) for folder in ("andrea_numba", "bin", "data")
             for p in (ROOT / folder).rglob("*")
             if p.is_file() and "__pycache__" not in p.parts and p.name != "README.md"}
    files |= {str(p.relative_to(ROOT)) for p in (ROOT / "kernels").glob("*")
              if p.suffix == ".py"}
    files |= {str(p.relative_to(ROOT)) for p in (ROOT / "kernels" / "common").glob("*.py")}
    files = {f for f in files if not f.endswith("__init__.py")}
    assert files == {f for f in listed if not f.endswith("/")}


def test_ci_runs_the_readme_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in script and "test-command" in script
    assert "pytest" in re.search(r"<!-- test-command -->\n```\n(.*?)```", README, re.S)[1]


@pytest.mark.parametrize("word", ["/root", "/work", "/tmp", "TODO"])
def test_no_machine_paths(word):
    for path in [*ROOT.glob("*.md"), *ROOT.rglob("*/README.md")]:
        if ".venv" not in path.parts:
            assert word not in path.read_text(encoding="utf-8"), path
