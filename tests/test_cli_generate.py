"""`andrea-generate` from the command line: what it prints where, refusals and exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stored import sign

from andrea_numba import checkpoint, decoder, device
from andrea_numba.cli_generate import MAX_PROMPT_BYTES, SEPARATOR, main
from andrea_numba.config import ModelConfig, TrainConfig
from andrea_numba.initialize import initialize
from andrea_numba.parameters import ParameterTable
from andrea_numba.tokenizers import build_tokenizer

ROOT = Path(__file__).resolve().parent.parent
STARTER = str(ROOT / "bin" / "andrea-generate")
CONTEXT = 64
PRINTABLE = "".join(map(chr, range(32, 97)))  # 65 characters


def save_random_model(run: Path, tokenizer_name: str, step: int = 3) -> str:
    tokenizer = build_tokenizer(tokenizer_name, [PRINTABLE], 1)
    config = TrainConfig(model=ModelConfig(
        d_model=32, n_head=2, n_layer=2, context=CONTEXT, vocab_size=tokenizer.vocab_size))
    config.data.tokenizer = tokenizer_name
    config.run.keep = 2
    table = ParameterTable(config.model)
    weights, moments = table.zeros(), table.zeros()
    initialize(table, weights, np.random.default_rng(4))
    weights[:table.n_decay] *= 10  # sharper than a fresh model, so that its text varies
    checkpoint.save(run, step, config, tokenizer, table, weights, moments, moments, {})
    return str(run)


@pytest.fixture(scope="module")
def char_run(tmp_path_factory) -> str:
    return save_random_model(tmp_path_factory.mktemp("runs") / "char", "char")


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory) -> str:
    return save_random_model(tmp_path_factory.mktemp("runs") / "byte", "byte")


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run the program in this process, on the CPU: (exit code, stdout, stderr)."""
    # Asking for CUDA would install the virtual GPU, which takes a second for a token.
    monkeypatch.setattr(device, "cuda_problem", lambda: "not asked")

    def run(*argv: str):
        code = main(list(argv))
        out = capsys.readouterr()
        return code, out.out, out.err
    return run


def text_of(outcome) -> str:
    code, out, err = outcome
    assert code == 0, err
    return out


def assert_refused(outcome, *parts: str):
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("andrea-generate: error: ") and err.count("\n") == 1, err
    for part in parts:
        assert part in err


# ---- what comes out

def test_prompt_and_exactly_the_asked_tokens(cli, char_run):
    code, out, err = cli(char_run, "--prompt", "ONCE UPON ", "--max-tokens", "200")
    assert code == 0
    assert out.startswith("ONCE UPON ") and out.endswith("\n")
    assert len(out) == len("ONCE UPON ") + 200 + 1
    lines = err.splitlines()
    assert lines[0].startswith("device: ") and "step 3" in lines[1]
    assert lines[2].startswith("200 tokens in ") and lines[2].endswith(" tokens/s")
    short = text_of(cli(char_run, "--prompt", "ONCE UPON ", "--max-tokens", "40"))
    assert out.startswith(short.removesuffix("\n"))


def test_no_tokens_are_allowed(cli, char_run):
    assert text_of(cli(char_run, "--prompt", "A", "--max-tokens", "0")) == "A\n"
    line = text_of(cli(char_run, "--prompt", "A", "--max-tokens", "0", "--json"))
    assert json.loads(line)["tokens"] == 0


def test_greedy_text_does_not_depend_on_the_seed(cli, char_run):
    texts = {text_of(cli(char_run, "--temperature", "0", "--seed", seed)) for seed in "12"}
    assert len(texts) == 1
    others = {text_of(cli(char_run, "--temperature", "1", "--seed", seed)) for seed in "12"}
    assert len(others) == 2


def test_top_k_above_the_vocabulary_is_no_limit(cli, char_run):
    plain = text_of(cli(char_run))
    assert plain == text_of(cli(char_run, "--top-k", "10000"))
    assert plain == text_of(cli(char_run, "--top-k", "0"))
    assert plain != text_of(cli(char_run, "--top-k", "2"))


def test_no_cache_gives_the_same_text(cli, char_run, monkeypatch):
    caches = []

    class Watched(decoder.Decoder):
        def __init__(self, *model, cache=None, **options):
            caches.append(cache)
            super().__init__(*model, cache=cache, **options)

    monkeypatch.setattr(decoder, "Decoder", Watched)
    greedy = (char_run, "--temperature", "0", "--max-tokens", "200")
    assert text_of(cli(*greedy)) == text_of(cli(*greedy, "--no-cache"))
    assert [cache for cache in caches if cache is not None] == [True, False]


def test_first_of_two_samples_is_the_only_one_of_one(cli, char_run):
    one = text_of(cli(char_run, "--prompt", "A", "--seed", "7"))
    two = text_of(cli(char_run, "--prompt", "A", "--seed", "7", "--num-samples", "2"))
    first, second = two.split(f"\n{SEPARATOR}\n")
    assert first + "\n" == one
    assert second.startswith("A") and second.endswith("\n")
    assert second != one


def test_long_prompt_is_shown_in_full_with_one_notice(cli, char_run):
    prompt = (PRINTABLE * 4)[:200]
    code, out, err = cli(char_run, "--prompt", prompt, "--max-tokens", "50",
                         "--num-samples", "2")
    assert code == 0
    assert [len(part) for part in out.split(f"\n{SEPARATOR}\n")] == [250, 251]
    assert out.startswith(prompt)
    assert err.count("the prompt has 200 tokens; the model sees the last 64\n") == 1


@pytest.mark.parametrize("flags", [(), ("--prompt", "")])
def test_empty_prompt_starts_a_document(cli, char_run, flags):
    assert len(text_of(cli(char_run, "--max-tokens", "9", *flags))) == 9 + 1


def test_stop_text_is_not_shown(cli, char_run):
    whole = text_of(cli(char_run, "--seed", "3")).removesuffix("\n")
    stop = whole[20:23]
    shown = text_of(cli(char_run, "--seed", "3", "--stop", "é", "--stop", stop))
    assert shown == whole[:whole.index(stop)] + "\n"


def test_json_says_what_the_text_says(cli, char_run):
    flags = (char_run, "--prompt", "AB", "--seed", "9", "--num-samples", "2",
             "--max-tokens", "30")
    texts = text_of(cli(*flags)).removesuffix("\n").split(f"\n{SEPARATOR}\n")
    code, out, err = cli(*flags, "--json")
    assert code == 0 and err.splitlines()[-1].startswith("60 tokens in ")
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["prompt"] + r["text"] for r in records] == texts
    for index, record in enumerate(records):
        assert record["tokens_per_second"] > 0
        assert len(record["token_ids"]) == record["tokens"] == 30
        assert (record["index"], record["seed"]) == (index, 9)
        assert (record["stop_reason"], record["stop"]) == ("max_tokens", None)
        assert record["prompt_tokens"] == record["prompt_tokens_used"] == 2
    stop = records[0]["text"][5:7]
    record = json.loads(text_of(cli(*flags, "--json", "--stop", stop)).splitlines()[0])
    assert (record["stop_reason"], record["stop"]) == ("stop", stop)
    assert record["tokens"] < 30


# ---- the prompt

def test_prompt_from_a_file_and_from_stdin(cli, char_run, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfHELLO")  # with a byte order mark
    expected = text_of(cli(char_run, "--prompt", "HELLO"))
    assert text_of(cli(char_run, "--prompt-file", str(file))) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"HELLO")))
    assert text_of(cli(char_run, "--prompt-file", "-")) == expected


def test_line_ends_of_a_prompt_file_are_kept(cli, byte_run, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"a\r\nb\n")
    record = text_of(cli(byte_run, "--prompt-file", str(file), "--max-tokens", "1", "--json"))
    assert json.loads(record)["prompt"] == "a\r\nb\n"


def test_unreadable_prompts_are_refused(cli, char_run, tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes(b"caf\xe9 au lait")
    assert_refused(cli(char_run, "--prompt-file", str(file)), str(file), "0xe9", "offset 3")
    assert_refused(cli(char_run, "--prompt", "caf\udce9"), "--prompt", "0xe9", "offset 3")
    assert_refused(cli(char_run, "--prompt-file", str(tmp_path / "none")), "No such file")
    assert_refused(cli(char_run, "--prompt-file", str(tmp_path)), "directory")
    assert_refused(cli(char_run, "--prompt-file", str(file), "--prompt", "A"), "choose one")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="the system has no /dev/zero")
def test_endless_prompts_are_refused(cli, byte_run, monkeypatch):
    assert_refused(cli(byte_run, "--prompt-file", "/dev/zero"), "/dev/zero", "more than 16 MiB")
    with open("/dev/zero", "rb") as endless:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(endless))
        assert_refused(cli(byte_run, "--prompt-file", "-"), "more than 16 MiB")


def test_the_longest_prompt_is_shown_whole(cli, byte_run, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("é".encode() * (MAX_PROMPT_BYTES // 2))
    code, out, err = cli(byte_run, "--prompt-file", str(file), "--max-tokens", "0")
    assert (code, out) == (0, "é" * (MAX_PROMPT_BYTES // 2) + "\n")
    assert f"the prompt has {MAX_PROMPT_BYTES} tokens; the model sees the last 64\n" in err


def test_characters_the_model_does_not_know_are_listed(cli, char_run):
    assert_refused(cli(char_run, "--prompt", "NAïVE CAFé"), "'ï'", "position 2", "'é'",
                   "position 9")


# ---- refusals

@pytest.mark.parametrize(("flags", "said"), [
    (("--temperature", "-1"), "--temperature -1"),
    (("--temperature", "abc"), "abc"),
    (("--temperature", "nan"), "--temperature nan"),
    (("--top-k", "-5"), "--top-k -5"),
    (("--top-p", "0"), "--top-p 0"),
    (("--top-p", "1.5"), "--top-p 1.5"),
    (("--max-tokens", "-1"), "--max-tokens -1"),
    (("--num-samples", "0"), "--num-samples 0"),
    (("--repetition-penalty", "0"), "--repetition-penalty 0"),
    (("--seed", "-1"), "--seed -1"),
    (("--stop", ""), "--stop"),
    (("--device", "tpu"), "tpu"),
    (("--temprature", "1"), "--temperature"),
    (("--prompt",), "--prompt"),
])
def test_impossible_options_are_refused_in_one_line(cli, char_run, flags, said):
    assert_refused(cli(char_run, *flags), said)


def test_missing_checkpoints_are_refused(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(cli(), "runs")
    assert_refused(cli("nowhere"), "nowhere")


def test_tokenizer_of_another_model_is_refused(cli, char_run, tmp_path):
    copy = Path(shutil.copytree(char_run, tmp_path / "copy"))
    [file] = copy.glob("checkpoints/*/checkpoint.json")
    metadata = json.loads(file.read_text(encoding="utf-8"))
    metadata["tokenizer"] = {"name": "byte", "start_token": 10}
    file.write_text(json.dumps(metadata), encoding="utf-8")
    sign(file.parent)
    assert_refused(cli(str(copy)), "257", "65")


@pytest.mark.parametrize("damage", [
    lambda raw: raw[:-1], lambda raw: b"version https://example.invalid/spec/v1\n" * 3])
def test_damaged_weights_are_refused(cli, char_run, tmp_path, damage):
    copy = Path(shutil.copytree(char_run, tmp_path / "copy"))
    [file] = copy.glob("checkpoints/*/model.safetensors")
    before = file.read_bytes()
    file.write_bytes(damage(before))
    assert_refused(cli(str(copy)), str(file), f"expected {len(before)} bytes, found "
                   f"{len(damage(before))}")


def test_a_damaged_checkpoint_gives_way_to_the_one_before(cli, tmp_path):
    run = save_random_model(tmp_path / "run", "char")
    expected = text_of(cli(run, "--prompt", "A"))
    save_random_model(tmp_path / "run", "char", step=4)
    [newest] = (tmp_path / "run" / "checkpoints").glob("step-*4")
    file = newest / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    code, out, err = cli(run, "--prompt", "A")
    assert (code, out) == (0, expected)
    assert str(file) in err and "step 3" in err
    assert_refused(cli(str(newest), "--prompt", "A"), str(file))


def test_a_moved_checkpoint_needs_nothing_else(cli, char_run, tmp_path, monkeypatch):
    expected = text_of(cli(char_run, "--prompt", "A"))
    [folder] = (Path(char_run) / "checkpoints").glob("step-*")
    shutil.copytree(folder, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert text_of(cli("elsewhere", "--prompt", "A")) == expected


def test_interruption_while_reading_is_quiet(cli, monkeypatch):
    class Terminal:
        @property
        def buffer(self):
            raise KeyboardInterrupt
    monkeypatch.setattr(sys, "stdin", Terminal())
    code, out, err = cli("--prompt-file", "-")
    assert (code, out) == (130, "")
    assert err.strip() == "andrea-generate: interrupted"


# ---- as a process

# Unbuffered output would hide what the interpreter tries to write once more at its exit.
ENVIRONMENT = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}


def start(*argv: str, stdout=subprocess.PIPE) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *argv], stdout=stdout, stderr=subprocess.PIPE,
                            stdin=subprocess.DEVNULL, env=ENVIRONMENT)


def test_help_loads_no_numpy_and_no_numba():
    script = ("import sys\nfrom andrea_numba.cli_generate import main\n"
              "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
              "assert not {'numpy', 'numba', 'safetensors', 'tqdm'} & set(sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert b"--temperature" in done.stdout and b"usage: andrea-generate" in done.stdout


def test_starter_works_from_any_folder_on_an_ascii_console(byte_run, tmp_path):
    done = subprocess.run(
        [sys.executable, STARTER, byte_run, "--prompt", "naïve 🙂", "--threads", "1"],
        cwd=tmp_path, capture_output=True, env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"na?ve ?") and done.stdout.isascii()
    assert os.access(STARTER, os.X_OK)


def test_closed_pipe_ends_quietly(char_run):
    process = start(STARTER, char_run, "--prompt", "HELLO", "--max-tokens", "1000000000")
    assert process.stdout.read(5) == b"HELLO"
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait() == 0
    assert len(said.splitlines()) == 2, said  # device and checkpoint, no traceback


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_full_disk_is_said_in_one_line(char_run):
    with open("/dev/full", "wb") as full:
        process = start(STARTER, char_run, "--prompt", "HELLO", stdout=full)
    said = process.stderr.read().decode()
    assert process.wait() == 2
    assert "error: cannot write the text: No space left" in said and "Traceback" not in said
    assert said.endswith("\n") and "Exception ignored" not in said


def test_closed_streams_are_no_error(char_run):
    command = f'exec "{sys.executable}" "{STARTER}" "{char_run}" --prompt-file - <&- >&-'
    done = subprocess.run(["sh", "-c", command], capture_output=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"200 tokens in" in done.stderr and b"Traceback" not in done.stderr
    done = subprocess.run(["sh", "-c", command.removesuffix("<&- >&-") + "2>&- <&-"],
                          capture_output=True, env=ENVIRONMENT)
    assert (done.returncode, len(done.stdout)) == (0, 201)  # nothing but the text


def test_interrupt_exits_130_without_a_traceback(char_run):
    # A background job may have inherited "ignore SIGINT", hence the first line.
    script = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
              f"sys.path.insert(0, {str(ROOT)!r})\n"
              "from andrea_numba.cli_generate import main; sys.exit(main())\n")
    process = start("-c", script, char_run, "--prompt", "HELLO", "--max-tokens", "1000000000")
    assert process.stdout.read(8)[:5] == b"HELLO"  # it is writing
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in said and said.endswith(b"andrea-generate: interrupted\n")
