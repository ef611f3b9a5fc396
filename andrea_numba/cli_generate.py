"""`andrea-generate`: continue a text with a trained model.

stdout carries the text (or JSON) alone; everything said about it goes to stderr. NumPy and Numba
are imported inside functions, after the thread settings and not at all for `--help`.
"""

from __future__ import annotations

import sys

from . import program

if __name__ == "__main__":  # signals are answered to before the rest is imported
    sys.exit(program.generate())

import contextlib
import json
import time
from collections.abc import Sequence

from . import args
from .config import GenerateConfig, check_limits
from .environment import prepare_threads
from .errors import UserError
from .program import abandon_stdout, raising_on_signals, run_program, say

PROGRAM = "andrea-generate"
SMALLER = "--no-cache takes less memory, a smaller model too"
MAX_PROMPT_BYTES = 1 << 24
SEPARATOR = "-" * 40  # the line between two samples
TOGETHER = 8  # samples that a CPU draws at the same time: each weight is read once for all
DESCRIPTION = "Continue a text with a trained model."
EPILOG = """\
examples:
  andrea-generate --prompt "Once upon a time"
  andrea-generate runs/stories --temperature 0 --max-tokens 50
  andrea-generate --prompt-file letter.txt --num-samples 3 --json > samples.jsonl
  andrea-generate runs/stories --score book.txt > tokens.tsv
  andrea-generate runs/stories --export gpt2-folder

--score writes a line for each token (log p in nats, id, text as a JSON string), with --json an
object, and says loss, perplexity and bits per byte at the end, with --json in a last object too.

A prompt that begins with a dash needs the form --prompt=-TEXT.
Exit codes: 0 done, 2 something to correct, 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    return run_program(PROGRAM, lambda: _main(argv), SMALLER)


def _main(argv: Sequence[str] | None) -> int:
    config = _parse(argv)
    prompt = _read_prompt(config)
    prepare_threads(config.threads)
    _generate(config, prompt)
    return 0


def _parse(argv: Sequence[str] | None) -> GenerateConfig:
    config = GenerateConfig()
    parser = args.Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EPILOG)
    args.add_options(parser, config, positional="checkpoint")
    args.apply_flags(config, parser.parse(argv))
    check_limits(config)
    tasks = [name for name in ("prompt", "prompt_file", "score", "export")
             if getattr(config, name) is not None]
    if len(tasks) > 1:
        first, second = ("--" + name.replace("_", "-") for name in tasks[:2])
        raise UserError(f"{first} and {second} are both given: choose one")
    if "" in (config.score, config.export):
        raise UserError("--score and --export need a name; an empty one was given")
    if "" in config.stop:
        raise UserError("--stop '': an empty text is found everywhere; leave --stop out instead")
    return config


def _read_prompt(config: GenerateConfig) -> str:
    """The prompt as text; line ends stay as they are, a file's byte order mark is dropped."""
    if config.prompt_file is None:
        # What the shell gave that is not UTF-8 arrives escaped, and is refused below.
        return _decoded((config.prompt or "").encode("utf-8", "surrogateescape"), "--prompt")
    source = f"--prompt-file {config.prompt_file}"
    try:
        with (contextlib.nullcontext(sys.stdin.buffer) if config.prompt_file == "-"
              else open(config.prompt_file, "rb")) as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)  # a device or a pipe may have no end
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}") from None
    if len(raw) > MAX_PROMPT_BYTES:
        raise UserError(f"{source}: more than {MAX_PROMPT_BYTES >> 20} MiB; the model sees only "
                        "the end of a prompt, so give that")
    return _decoded(raw, source).removeprefix("\ufeff")


def _decoded(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: byte {raw[error.start]:#04x} at offset {error.start} is not "
                        "valid UTF-8; convert the prompt to UTF-8") from None


def _generate(config: GenerateConfig, prompt: str) -> None:
    from . import device, interchange
    from .decoder import Decoder
    from .generate import prompt_ids
    from .memory import HOST
    from .optimizer import as_operands
    from .parameters import ParameterTable
    from .score import Scorer, open_text, write_scores
    from .start import load_kernels
    from .tokenizers import read_special_tokens

    loaded = interchange.open_model(config.checkpoint, say)
    if config.export is not None:
        with raising_on_signals():
            notices = interchange.export(loaded, config.export)
        for line in (*notices, f"{loaded.path}, step {loaded.step}, written to {config.export}"):
            say(line)
        return
    model, tokenizer, weights = loaded.model, loaded.tokenizer, loaded.weights
    if tokenizer is None:
        raise UserError(f"{loaded.path} names no tokenizer, so it cannot read or write text; it "
                        "can be trained (--init-from) and exported")
    read_special_tokens(tokenizer, config.special_tokens)
    ids = prompt_ids(tokenizer, prompt)
    if config.score is not None:
        text = open_text(config.score, tokenizer)
        for notice in text.notices:
            say(notice)
    chosen = device.choose(config.device, config.precision, config.graph, SMALLER)
    stored = config.weights if chosen.memory is HOST else ""
    if config.weights != "fp32" and not stored:
        raise UserError(f"--weights {config.weights} is for a CPU that computes in fp32, not for "
                        f"{chosen.line}; use --device cpu --precision fp32")
    say(chosen.line)
    say(f"checkpoint {loaded.path}, step {loaded.step}")
    if len(ids) > model.context:
        say(f"the prompt has {len(ids)} tokens; the model sees the last {model.context}")
    with chosen.memory.queue():
        if config.max_tokens:
            load_kernels(chosen, model, 1, training=config.score is not None, stored=stored)
        weights = chosen.memory.put(weights)
        p = ParameterTable(model).views(weights, as_operands(chosen.memory, weights))
        if config.score is not None:
            scorer = Scorer(model, p, chosen.ops, chosen.memory)
            say(write_scores(text, scorer, config.json, _write))
            return
        batch = min(config.num_samples, TOGETHER) if stored and config.cache else 1
        decoder = Decoder(model, p, chosen.ops, cache=config.cache, memory=chosen.memory,
                          stored=stored, batch=batch)
        del loaded, weights, p  # the decoder has a copy on a CPU
        _write_samples(config, prompt, decoder, batch, tokenizer)


def _write_samples(config: GenerateConfig, prompt: str, decoder, batch: int, tokenizer) -> None:
    from .generate import generate_texts
    from .sampler import Sampling, sample_rng

    sampling = Sampling(config.temperature, config.top_k, config.top_p,
                        config.repetition_penalty)
    total_tokens, total_seconds = 0, 0.0
    for first in range(0, config.num_samples, batch):
        indices = range(first, min(first + batch, config.num_samples))
        if not config.json:
            _write(_heading(first, prompt))
        start = time.perf_counter()
        results = generate_texts(
            decoder, tokenizer, prompt, config.max_tokens, sampling,
            [sample_rng(config.seed, index) for index in indices], config.stop,
            None if config.json else _write)
        seconds = time.perf_counter() - start
        total_tokens += sum(len(result.tokens) for result in results)
        total_seconds += seconds
        for index, result in zip(indices, results, strict=True):
            if config.json:
                _write(_as_json(config, prompt, index, result, seconds))
            elif index > first:  # the first was written as it came
                _write(_heading(index, prompt) + result.text)
    if not config.json:
        _write("\n")
    if total_tokens:
        say(f"{total_tokens} tokens in {total_seconds:.2f} s, "
            f"{total_tokens / total_seconds:,.0f} tokens/s")


def _heading(index: int, prompt: str) -> str:
    return f"\n{SEPARATOR}\n" * (index > 0) + prompt


def _as_json(config: GenerateConfig, prompt: str, index: int, result, seconds: float) -> str:
    return json.dumps({  # escapes all but ASCII, so no console can spoil it
        "prompt": prompt,
        "text": result.text,
        "tokens": len(result.tokens),
        "token_ids": result.tokens,
        "stop_reason": "max_tokens" if result.stopped_by is None else "stop",
        "stop": result.stopped_by,
        "prompt_tokens": result.prompt_tokens,
        "prompt_tokens_used": result.prompt_tokens_used,
        "seed": config.seed,
        "index": index,
        "tokens_per_second": round(len(result.tokens) / seconds, 1),
    }) + "\n"


def _write(text: str) -> None:
    """Put text on stdout at once."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise UserError(f"cannot write the text: {error.strerror}") from None
