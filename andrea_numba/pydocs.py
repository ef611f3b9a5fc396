"""English prose from the docstrings of the running Python's standard library.

Read from the interpreter's own source files on the user's machine, so nothing needs a download.
The files are parsed with `ast` and never imported: no code of the library runs.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from andrea_numba.errors import UserError

# Tests, generated tables, and other people's packages: little prose, or not the standard library.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings"}
    | {"ensurepip", "pydoc_data", "turtledemo", "_vendor", "__pycache__"}
)
MIN_CHARS = 40  # shorter docstrings are labels, not prose
MIN_LETTERS = 0.6  # share of letters among the visible characters of a line of prose

_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _source_files(folder: Path) -> list[Path]:
    files = (
        path
        for path in folder.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts[:-1])
    )
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _docstrings(path: Path) -> Iterator[str]:
    """Docstrings of one source file, in order of definition; none if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. invalid escapes in the parsed source
            with tokenize.open(path) as file:  # honours the file's coding line
                tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DEFINITIONS)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield text


def _is_prose(line: str) -> bool:
    visible = re.sub(r"\s", "", line)
    return sum(map(str.isalpha, visible)) >= MIN_LETTERS * len(visible)


def clean_docstring(text: str) -> str:
    """The prose of a docstring: no examples with their output, no rules, no trailing blanks."""
    lines, in_doctest = [], False
    for line in inspect.cleandoc(text).splitlines():
        line = line.rstrip()
        if line.lstrip().startswith(">>>"):
            in_doctest = True
        elif not line:
            in_doctest = False  # a blank line ends the output of an example
        if not in_doctest and _is_prose(line):
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def collect_docstrings(limit_chars: int | None = None) -> list[str]:
    """Distinct cleaned ASCII docstrings, ordered by file path and then by position in the file.

    Stops after the document with which the total reaches `limit_chars` (None: everything). The text
    depends on the running Python's version. Raises UserError if it comes without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    documents: dict[str, None] = {}  # a set that keeps its order
    size = 0
    for path in _source_files(folder):
        for raw in _docstrings(path):
            text = clean_docstring(raw)
            if len(text) < MIN_CHARS or not text.isascii() or text in documents:
                continue
            if not all(c.isprintable() or c in "\n\t" for c in text):
                continue
            documents[text] = None
            size += len(text)
            if limit_chars is not None and size >= limit_chars:
                return list(documents)
    if not documents:
        raise UserError(
            f"no docstrings under {folder}: this Python has no standard library sources; "
            "install them or train on another corpus"
        )
    return list(documents)
