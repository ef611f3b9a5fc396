"""The small cases that must come out right: where each is tested, and tests of those without one.

`CASES` has a row for each case of the list that runs on a CPU: its number, what it is, and its
tests. The rows that are missing (B05, B41, B43, B46, B47, B49, B82) need a GPU, virtual or real.
"""

import ast
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, TEXT, TINY, dataset, events, tiny_config

from andrea_numba import checkpoint
from andrea_numba.cli_train import main
from andrea_numba.trainer import Trainer
from kernels.registry import op_table

CASES = {
    "B01": ("CPU asked for: not a word of CUDA", "test_cli_train.test_a_run_from_text_to_files",
            "test_device.test_cpu_and_help_never_import_cuda"),
    "B02": ("CUDA asked for without a GPU",
            "test_device.test_cuda_without_a_gpu_fails_soon_and_leaves_nothing"),
    "B04": ("a driver that is not there", "test_cli_train.test_auto_device_says_why_in_one_line"),
    "B07": ("an empty file", "test_cli_train.test_refused_data"),
    "B08": ("windows of 4, 5 and 6 tokens", "test_loader.test_too_few_tokens_are_refused",
            "test_loader.test_every_window_is_possible_and_the_last_token_is_a_target"),
    "B10": ("a byte that is not UTF-8", "test_cli_train.test_refused_data"),
    "B11": ("a byte order mark", "test_data.test_a_byte_order_mark_changes_nothing"),
    "B13": ("CR LF", "test_data.test_text_comes_through_unchanged"),
    "B14": ("CR alone", "test_data.test_text_comes_through_unchanged"),
    "B16": ("ids up to 65,535", "test_token_file.test_ids_survive_in_the_width_they_need"),
    "B17": ("id 65,536", "test_token_file.test_ids_survive_in_the_width_they_need"),
    "B19": ("special strings in a text", "test_data.test_text_comes_through_unchanged",
            "test_cases.test_special_strings_are_text"),
    "B20": ("memory of a large text", "test_large_text.test_memory_stays_bounded"),
    "B22": ("NaN in a gradient", "test_trainer.test_a_bad_gradient_stops_before_the_update",
            "test_divergence.test_a_run_stops_and_keeps_its_checkpoint"),
    "B23": ("a rate of 1000", "test_cases.test_a_rate_far_too_high_ends_the_run"),
    "B25": ("clipping", "test_trainer.test_clipping_scales_to_the_norm"),
    "B26": ("8 sequences, split", "test_trainer.test_accumulation_does_not_change_the_step"),
    "B28": ("5 sequences as 2 + 2 + 1", "test_trainer.test_uneven_batches_count_by_their_targets"),
    "B29": ("the first step of AdamW",
            "kernels/test_adamw.test_the_first_step_has_the_size_of_the_rate"),
    "B31": ("decay alone", "test_trainer.test_decay_reaches_matrices_alone"),
    "B32": ("the first step of a warm-up", "test_schedule.test_warm_up_then_decay",
            "test_cases.test_the_first_step_of_a_warm_up_changes_weights"),
    "B34": ("the last rate is the floor", "test_schedule.test_last_step_is_at_the_floor"),
    "B35": ("the first loss", "test_model.test_first_loss_of_small_vocabularies"),
    "B37": ("three equal logits of 1000",
            "kernels/test_cross_entropy.test_three_equal_logits_are_a_third_each"),
    "B38": ("two equal logits of 1e8",
            "kernels/test_cross_entropy.test_two_equal_logits_of_1e8"),
    "B40": ("odd sizes", "test_model.test_cpu_loss_and_every_gradient_match_the_oracle"),
    "B44": ("no float64 in CUDA kernels",
            "kernels/test_gpu_compile.test_every_kernel_on_every_architecture"),
    "B50": ("killed while saving", "test_faults.test_kill_at_any_moment"),
    "B52": ("a weights file cut short", "test_checkpoint.test_damage_is_named_in_one_line",
            "test_cli_generate.test_damaged_weights_are_refused"),
    "B53": ("a text in the place of weights", "test_checkpoint.test_damage_is_named_in_one_line",
            "test_cli_generate.test_damaged_weights_are_refused"),
    "B55": ("interrupted", "test_cli_resume.test_a_signal_saves_and_resume_gives_the_same_run"),
    "B56": ("interrupted twice", "test_signals.test_a_second_signal_ends_at_once"),
    "B58": ("50 + 50 steps are 100", "test_trainer.test_resume_is_the_same_run"),
    "B59": ("resume of nothing", "test_cli_train.test_refused_options",
            "test_cases.test_resume_of_nothing_makes_nothing"),
    "B61": ("resume of what is complete", "test_cli_resume.test_resume_of_a_finished_run_says_so"),
    "B62": ("resume with a new character", "test_cli_resume.test_resume_refuses_other_text"),
    "B64": ("temperature 0", "test_cli_generate.test_greedy_text_does_not_depend_on_the_seed"),
    "B65": ("top-k above the vocabulary",
            "test_cli_generate.test_top_k_above_the_vocabulary_is_no_limit"),
    "B67": ("impossible options of sampling",
            "test_cli_generate.test_impossible_options_are_refused_in_one_line"),
    "B68": ("unknown characters in a prompt",
            "test_cli_generate.test_characters_the_model_does_not_know_are_listed"),
    "B70": ("a prompt longer than the context",
            "test_cli_generate.test_long_prompt_is_shown_in_full_with_one_notice"),
    "B71": ("a text longer than the context",
            "test_cli_generate.test_prompt_and_exactly_the_asked_tokens"),
    "B73": ("padded ids", "test_generate.test_untrained_model_never_says_a_padded_token"),
    "B74": ("the key-value cache", "test_cli_generate.test_no_cache_gives_the_same_text"),
    "B76": ("two samples",
            "test_cli_generate.test_first_of_two_samples_is_the_only_one_of_one"),
    "B77": ("a log in a file", "test_cases.test_a_log_in_a_file_is_plain_lines",
            "test_cli_resume.test_lines_appear_while_it_runs"),
    "B79": ("misspelt options", "test_cli_train.test_refused_options",
            "test_cli_train.test_a_rate_in_scientific_notation_is_accepted"),
    "B80": ("heads that do not fit", "test_cli_train.test_refused_options"),
    "B83": ("a table used twice", "test_model.test_oracle_gradient_is_the_slope_of_the_loss",
            "test_model.test_tied_gradient_is_the_sum_of_both_uses",
            "test_parameters.test_unique_parameters_are_exact",
            "test_checkpoint.test_files_are_plain_and_complete"),
}


@pytest.mark.parametrize("number", CASES)
def test_every_case_has_its_tests(number):
    for name in CASES[number][1:]:
        module, function = name.rsplit(".", 1)
        source = (ROOT / "tests" / f"{module}.py").read_text(encoding="utf-8")
        assert function in {node.name for node in ast.walk(ast.parse(source))
                            if isinstance(node, ast.FunctionDef)}, name


@pytest.fixture
def run(text, monkeypatch):
    """andrea-train in this process, in the folder `text`: its exit code."""
    monkeypatch.chdir(text)
    return lambda *arguments: main([*map(str, (*arguments, *TINY))])


def test_a_rate_far_too_high_ends_the_run(run, text, capsys):
    assert run("t.txt", "--lr", 1000, "--steps", 50, "--clip", 0, "--save-every", 1,
               "--out", "r") == 3
    [line] = [line for line in capsys.readouterr().err.splitlines() if "diverged" in line]
    assert "at step " in line and "loss " in line and "learning rate " in line
    assert np.isfinite(checkpoint.load(checkpoint.find("r")).weights).all()


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_special_strings_are_text(run, text, tokenizer):
    (text / "s.txt").write_text((TEXT + "<|endoftext|><s></s>") * 10)
    assert run("s.txt", "--tokenizer", tokenizer, "--steps", 2, "--out", "r") == 0
    assert [e["step"] for e in events(text / "r", "run.loss")] == [1, 2]


def test_the_first_step_of_a_warm_up_changes_weights(tmp_path):
    config = tiny_config(warmup=10, steps=100)
    trainer = Trainer(config, op_table("cpu"), dataset(config, tmp_path))
    before = trainer.weights.copy()
    trainer.step()
    assert (trainer.weights != before).any()


def test_resume_of_nothing_makes_nothing(run, text):
    before = sorted(text.rglob("*"))
    assert run("t.txt", "--resume", "--out", "nosuch") == 2
    assert sorted(text.rglob("*")) == before


def test_a_log_in_a_file_is_plain_lines(text):
    with open(text / "log", "wb") as log:
        done = subprocess.run(
            [sys.executable, ROOT / "bin" / "andrea-train", "t.txt", "--steps", "50",
             "--log-every", "1", *map(str, TINY)], cwd=text, stdout=log, stderr=log)
    assert done.returncode == 0
    written = (text / "log").read_bytes()
    assert b"\r" not in written and b"\x1b" not in written
    assert sum(line.startswith(b"step ") for line in written.splitlines()) == 50
