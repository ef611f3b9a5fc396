"""Random inputs, which must give a right result or one line: options, settings, texts, tokens.

`python -m tests.fuzz_inputs [EXAMPLES]` tries that many of each kind (default 20000, of whole
programs a hundredth); a short form is a test. Anything raised but UserError fails.
"""

from __future__ import annotations

from andrea_numba.environment import prepare_threads

if __name__ == "__main__":
    prepare_threads(1)  # before NumPy is imported; whole programs run in this process

import contextlib
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st

from andrea_numba import cli_generate, cli_train
from andrea_numba.args import to_dict, to_toml
from andrea_numba.config import LARGEST, TrainConfig
from andrea_numba.data import load_token_file, open_sources, prepare, write_token_file
from andrea_numba.errors import UserError
from andrea_numba.sources import Document

EXAMPLES = 20_000
PHASES = [Phase.explicit, Phase.generate]  # of what is slow: to find, and not to simplify
FLAGS = sorted({flag for action in cli_train.make_parser()._actions for flag in
                action.option_strings} - {"--help", "-h"})
GENERATE_FLAGS = ["--" + name.replace("_", "-") for name in asdict(cli_generate.GenerateConfig())]

def mostly(usual: st.SearchStrategy, other: st.SearchStrategy) -> st.SearchStrategy:
    return st.integers(0, 9).flatmap(lambda n: other if n == 7 else usual)


names = st.text(st.characters(exclude_characters="\0"), max_size=12)  # as a shell can give them
numbers = st.one_of(st.integers(), st.floats(), st.sampled_from(
    [0, 1, 2, 7, 30, 1000, LARGEST, LARGEST + 1, 0.5, 1.0, 1e-3, 1e308, 5e-324]))
values = st.one_of(numbers.map(str), names, st.sampled_from(
    ["", "-", "--", "auto", "cpu", "byte", "char", "cosine", "nano", "1_0", "１２", "1e3",
     "9" * 5000, "/dev/null", ".", "\udce9", "stories"]))
encodings = mostly(st.just("utf-8"), st.sampled_from([
    "utf-8-sig", "latin-1", "utf-16", "utf-16-be", "utf-32", "utf-7", "gb18030", "shift_jis",
    "cp1252", "idna", "hz", "hex", "?"]))
# Bytes that are often text, or nearly so.
contents = mostly(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=20,
            max_size=200).map(str.encode),
    st.one_of(st.binary(max_size=300), st.tuples(
        st.text("ab \r\n\ufeffé😀", max_size=200),
        st.sampled_from(["utf-8", "utf-16", "utf-16-be", "utf-32"])).map(
            lambda pair: pair[0].encode(pair[1]))))


def _argv(flags: list[str]) -> st.SearchStrategy[list[str]]:
    option = st.tuples(st.one_of(st.sampled_from(flags), names.map("--".__add__)), values)
    return st.lists(st.one_of(
        option.map(list), option.map(lambda pair: ["=".join(pair)]), values.map(lambda v: [v])),
        max_size=5).map(lambda parts: [*itertools.chain(*parts)])


def train_options(argv: list[str], folder: Path) -> None:
    """What is accepted can be printed and read back."""
    config, _ = cli_train.read_config(argv)
    (folder / "c.toml").write_text(to_toml(config), encoding="utf-8")
    assert cli_train.read_config(["--config", str(folder / "c.toml")])[0] == config


def generate_options(argv: list[str], folder: Path) -> None:
    cli_generate._parse(argv)


def toml(content: bytes, folder: Path) -> None:
    (folder / "c.toml").write_bytes(content)
    cli_train.read_config(["--config", str(folder / "c.toml")])


def _toml_texts() -> st.SearchStrategy[bytes]:
    known = to_dict(TrainConfig())
    scalars = st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.dates(),
                        st.datetimes(), st.sampled_from([10**400, "a\0b", "auto", "char"]))
    anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
    section = st.one_of(st.sampled_from([*known, "head_dim", "__class__"]), st.text(max_size=6))
    key = st.one_of(st.sampled_from([k for part in known.values() for k in part]),
                    st.text(max_size=6))

    def written(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(written, value))}]"
        if isinstance(value, str | bool):
            return json.dumps(value)
        return value.isoformat() if hasattr(value, "isoformat") else str(value)

    right = st.sampled_from([(part, k) for part in known for k in known[part]]).map(
        lambda place: f"{place[0]}.{place[1]} = {written(known[place[0]][place[1]])}")
    line = mostly(right, st.one_of(
        section.map(lambda s: f"[{json.dumps(s)}]"), st.text(max_size=9), st.tuples(
            key, anything).map(lambda pair: f"{json.dumps(pair[0])} = {written(pair[1])}")))
    return st.lists(line, max_size=8).map(lambda lines: "\n".join(lines).encode("utf-8", "replace"))


def texts(case: tuple, folder: Path) -> None:
    """What is accepted comes back as Python's own codec reads it."""
    content, encoding, tokenizer, fraction, context = case
    (folder / "t.txt").write_bytes(content)
    data = prepare(open_sources([str(folder / "t.txt")], encoding), tokenizer, fraction, context,
                   folder / "cache")
    ids = np.concatenate([data.train[:], data.val[:]])
    assert data.tokenizer.decode(ids) == content.decode(encoding).removeprefix("\ufeff")


def json_lines(content: bytes, folder: Path) -> None:
    (folder / "t.jsonl").write_bytes(content)
    read = ["".join(d.chunks()) for d in open_sources([str(folder / "t.jsonl")])]
    lines = content.decode().removeprefix("\ufeff").split("\n")
    assert read == [text for line in lines if line.strip() and (text := json.loads(line)["text"])]


def _json_texts() -> st.SearchStrategy[bytes]:
    value = st.recursive(st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5)),
                         lambda inner: st.lists(inner, max_size=2), max_leaves=3)
    record = st.fixed_dictionaries({"text": mostly(st.text(), value)}, optional={"id": value})
    line = mostly(record.map(json.dumps), st.one_of(value.map(json.dumps), st.text(max_size=9)))
    return mostly(st.lists(line, max_size=5).map(
        lambda lines: "\n".join(lines).encode("utf-8", "replace")), contents)


def token_files(edits: list[tuple], folder: Path) -> None:
    """What is accepted holds ids of its vocabulary, and is text."""
    path = folder / "t.tokens"
    write_token_file(path, [Document.from_text("a", "some text é"), Document.from_text("b", "b")],
                     "char")
    raw = bytearray(path.read_bytes())
    for position, length, new in edits:
        start = position % len(raw)
        raw[start:start + length] = new
    path.write_bytes(raw)
    data = load_token_file(path, 0.3, 2)
    assert np.max(data.train[:]) < data.tokenizer.vocab_size
    data.tokenizer.decode(data.train[:])


def _one_line(program: Callable, argv: list[str]) -> None:
    """Run a program in this process; UserError if it says in one line why it cannot."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = program(argv)
    errors = [line for line in said.getvalue().splitlines() if "error: " in line]
    assert code in (0, 2, 3) and len(errors) == (code == 2), said.getvalue()
    assert "Traceback" not in said.getvalue()
    if errors:
        raise UserError(errors[0])


def train_runs(case: tuple, folder: Path) -> None:
    content, chosen = case
    with tempfile.TemporaryDirectory(dir=folder) as own:
        (Path(own) / "t.txt").write_bytes(content * 12)
        options = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
        _one_line(cli_train.main, [str(Path(own) / "t.txt"), "--out", str(Path(own) / "run"),
                                   "--device", "cpu", *options])
        if (Path(own) / "run" / "checkpoints").exists():  # else it diverged before the first
            _one_line(cli_generate.main, [str(Path(own) / "run"), "--max-tokens", "20",
                                          "--device", "cpu"])


def _settings(**choices: list) -> st.SearchStrategy[dict]:
    """A value for each option, mostly the first one listed."""
    return st.fixed_dictionaries({name: mostly(st.just(listed[0]), st.sampled_from(listed))
                                  for name, listed in choices.items()})


TRAIN_SETTINGS = _settings(
    d_model=[8, 12, 1], n_head=[1, 2, 3], n_layer=[1, 2], context=[7, 1, 16], batch_size=[3, 1],
    grad_accum=[1, 2], steps=[3, 1], warmup=[2, 0, 1000], lr=[1e-3, 1e3, 1e-30], min_lr=[0, 1e-30],
    clip=[1, 0, 1e-30], schedule=["cosine", "linear", "constant", "wsd"], beta1=[0.9, 0],
    beta2=[0.99, 0], weight_decay=[0.1, 0, 1e6], tokenizer=["byte", "char"], keep=[1, 3],
    val_fraction=[0.1, 0, 0.9], eval_every=[1, 0], eval_tokens=[9, 0, 1], sample_every=[1, 0],
    sample_tokens=[5, 0], log_every=[1, 9], save_every=[1, 0], vocab_size=[0, 300, 5],
    seed=[0, LARGEST], encoding=["utf-8", "latin-1"], on_divergence=["stop", "skip"])
GENERATE_SETTINGS = _settings(
    temperature=[1, 0, 1e-300, 1e300], top_k=[0, 1, LARGEST], top_p=[1, 1e-300, 0.5],
    repetition_penalty=[1, 1e-300, 1e300], num_samples=[1, 2], seed=[0, LARGEST],
    stop=["e", "é", "\n\n"])


def generate_runs(case: tuple, folder: Path) -> None:
    content, chosen = case
    run = folder / "model"
    if not run.exists():
        (folder / "m.txt").write_text("The cat sat on the mat.\n" * 20)
        _one_line(cli_train.main, [
            str(folder / "m.txt"), "--out", str(run), "--d-model", "8", "--n-head", "1",
            "--n-layer", "1", "--context", "8", "--steps", "1", "--sample-tokens", "0",
            "--tokenizer", "char", "--device", "cpu"])
    (folder / "prompt").write_bytes(content)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    _one_line(cli_generate.main, [str(run), "--prompt-file", str(folder / "prompt"),
                                  "--max-tokens", "12", "--device", "cpu", *options])


prompts = mostly(st.text("The catsonm.\n", max_size=40).map(str.encode), contents)
TARGETS: dict[str, tuple[Callable, st.SearchStrategy, int]] = {
    "train_options": (train_options, _argv(FLAGS), 1),
    "generate_options": (generate_options, _argv(GENERATE_FLAGS), 1),
    "toml": (toml, mostly(_toml_texts(), contents), 1),
    "texts": (texts, st.tuples(contents, encodings, st.sampled_from(["byte", "char"]),
                               st.floats(0, 0.9), st.integers(1, 9)), 1),
    "json_lines": (json_lines, _json_texts(), 1),
    "token_files": (token_files, st.lists(st.tuples(
        st.integers(0, 400), st.integers(0, 9), st.binary(max_size=9)), max_size=4), 1),
    "train_runs": (train_runs, st.tuples(contents, TRAIN_SETTINGS), 100),
    "generate_runs": (generate_runs, st.tuples(prompts, GENERATE_SETTINGS), 100),
}


def fuzz(name: str, examples: int) -> tuple[int, int]:
    """Try `examples` inputs of a kind; how many were right, and how many refused in one line."""
    check, strategy, cost = TARGETS[name]
    right, refused = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        @settings(max_examples=examples, deadline=None, database=None,
                  phases=PHASES if cost > 1 else list(Phase),
                  suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet)
        @given(strategy)
        def run(value):
            nonlocal right, refused
            try:
                check(value, Path(folder))
                right += 1
            except UserError as error:
                assert str(error).strip()
                refused += 1

        run()
    return right, refused


def main() -> None:
    examples = int(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES
    for name, (_, _, cost) in TARGETS.items():
        start = time.perf_counter()
        right, refused = fuzz(name, max(1, examples // cost))
        print(f"{name}: {right} right, {refused} refused in one line, "
              f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
