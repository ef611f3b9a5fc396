"""`andrea-generate --score`: every token once, in bytes that compare, on stdout as data."""
# Fixtures of another file are named again where they are used:
# ruff: noqa: F811

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from helpers import TEXT, run_program
from test_cli_generate import (  # noqa: F401
    ENVIRONMENT,
    STARTER,
    assert_refused,
    byte_run,
    char_run,
    cli,
    text_of,
)

from andrea_numba import checkpoint
from andrea_numba.decoder import Decoder
from andrea_numba.parameters import ParameterTable
from kernels.registry import op_table

CONTEXT = 64


@pytest.fixture
def file(tmp_path):
    (tmp_path / "a.txt").write_text("naïve " + TEXT[:200], encoding="utf-8")
    return tmp_path / "a.txt"


def scores(out):
    """[(log p, id, text)] of the lines of stdout."""
    rows = [line.split("\t") for line in out.splitlines()]
    return [(float(log_p), int(token), json.loads(text)) for log_p, token, text in rows]


def test_every_token_once_and_as_the_decoder_says(cli, byte_run, file):
    """In windows of the context, each begun with the token before it."""
    code, out, err = cli(byte_run, "--score", str(file))
    assert code == 0
    rows = scores(out)
    raw = file.read_bytes()
    assert [token for _, token, _ in rows] == list(raw)
    loaded = checkpoint.load(checkpoint.find(byte_run))
    p = ParameterTable(loaded.model).views(loaded.weights)
    decoder = Decoder(loaded.model, p, op_table("cpu"))
    before = [10, *raw]
    for i, (log_p, token, _) in enumerate(rows):
        start = i // CONTEXT * CONTEXT
        logits = (decoder.prefill(np.array(before[i:i + 1])) if i == start
                  else decoder.step(before[i])).astype(np.float64)
        expected = logits[token] - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        assert log_p == pytest.approx(expected, abs=1e-4)
    nats = -sum(log_p for log_p, _, _ in rows)
    assert err.splitlines()[-1] == (
        f"{len(raw)} tokens, {len(raw)} bytes; loss {nats / len(raw):.4f} nats per token, "
        f"perplexity {math.exp(nats / len(raw)):.4g}, "
        f"{nats / len(raw) / math.log(2):.4f} bits per byte")


def test_json_says_the_same(cli, byte_run, file):
    rows = scores(text_of(cli(byte_run, "--score", str(file))))
    *lines, last = map(json.loads, text_of(cli(byte_run, "--score", str(file), "--json"))
                       .splitlines())
    assert [(r["log_p"], r["id"], r["text"]) for r in lines] == rows
    summary = last["summary"]
    assert summary["tokens"] == summary["bytes"] == len(rows)
    assert summary["loss"] == pytest.approx(-sum(r[0] for r in rows) / len(rows), abs=1e-5)
    assert summary["perplexity"] == pytest.approx(math.exp(summary["loss"]))


def test_bytes_count_where_tokens_are_characters(cli, char_run, tmp_path):
    (tmp_path / "a.txt").write_text("HELLO WORLD" * 20)
    out = text_of(cli(char_run, "--score", str(tmp_path / "a.txt"), "--json"))
    summary = json.loads(out.splitlines()[-1])["summary"]
    assert summary["tokens"] == summary["bytes"] == 220
    assert summary["bits_per_byte"] == pytest.approx(summary["loss"] / math.log(2))


def test_a_single_character_is_a_text(cli, char_run, tmp_path):
    (tmp_path / "a.txt").write_text("A")
    assert len(text_of(cli(char_run, "--score", str(tmp_path / "a.txt"))).splitlines()) == 1


def test_what_cannot_be_scored(cli, char_run, tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"")
    assert_refused(cli(char_run, "--score", str(file)), "is empty")
    file.write_text("A" * 100 + "é", encoding="utf-8")
    assert_refused(cli(char_run, "--score", str(file)), "'é'", "position 100")
    file.write_bytes(b"A\xff")
    assert_refused(cli(char_run, "--score", str(file)), "0xFF at offset 1")
    assert_refused(cli(char_run, "--score", str(tmp_path / "none")), "no such file")
    assert_refused(cli(char_run, "--score", ""), "--score")
    assert_refused(cli(char_run, "--score", "a", "--prompt", "A"), "--prompt and --score")


def test_a_reader_that_has_enough(byte_run, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT * 40)
    process = subprocess.Popen([sys.executable, STARTER, byte_run, "--score", "a.txt"],
                               cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait() == 0 and "Traceback" not in said


def test_exported_models_score_alike(byte_run, file, tmp_path):
    """Through the programs: exported, and scored from the folder."""
    result = run_program("andrea-generate", byte_run, "--export", "folder", cwd=tmp_path)
    assert result.returncode == 0 and result.stdout == "", result.stderr
    outs = [run_program("andrea-generate", source, "--score", file, "--device", "cpu",
                        cwd=tmp_path).stdout for source in (byte_run, "folder")]
    assert outs[0] == outs[1] != ""
