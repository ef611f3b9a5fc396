"""What can be configured: dataclasses whose fields become flags, TOML keys and checkpoint entries.

Every field is made by `option`, which carries its one-line help and the values it may take, so the
command line, the TOML reader, `--print-config` and the validation all read the same table.
This module imports neither numpy nor numba: `--help` must answer at once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .errors import UserError

LARGEST = 10**12  # of any whole number
VOCABULARY_MULTIPLE = 128  # embedding rows are padded to this, so that every matmul has even edges


def option(default: Any, help: str, *, choices=None, at_least=None, above=None, at_most=None,
           below=None):
    """A dataclass field with its help text and the values it accepts."""
    limits = {"choices": choices, "at_least": at_least, "above": above, "at_most": at_most,
              "below": below}
    metadata = {"help": help, **{k: v for k, v in limits.items() if v is not None}}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    """The network's shape."""

    d_model: int = option(128, "width of the residual stream", at_least=1, at_most=65536)
    n_head: int = option(4, "attention heads; must divide --d-model", at_least=1)
    n_layer: int = option(4, "transformer blocks", at_least=1, at_most=1000)
    context: int = option(128, "tokens the model can see at once", at_least=1,
                          at_most=1 << 24)
    vocab_size: int = option(0, "token ids the model knows, and harris and bpe make; 0 = as many "
                             "as the tokenizer has", at_least=0, at_most=1 << 24)
    tied: bool = option(True, "the output head shares the token embedding table")
    bias: bool = option(True, "linear layers have biases")
    norm_affine: bool = option(True, "LayerNorms have a learned gain and offset")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up, the excess never predicted."""
        return math.ceil(self.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@dataclass
class DataConfig:
    """What to read."""

    data: list[str] = option(["stories"], "text files, .jsonl files with a `text` field, folders "
                             "of *.txt, *.md and *.jsonl, one token file, or the built-in corpora: "
                             "stories, pydocs")
    val_data: list[str] = option([], "validate on this file or folder instead of the last part "
                                 "of the text; may be given several times")
    tokenizer: str = option("byte", "how text becomes token ids: byte, char, harris (morphemes of "
                            "the text), bpe, or a tokenizer.json")
    special_tokens: bool = option(False, "names of the tokenizer's special tokens in the text, as "
                                  "<|endoftext|>, become their ids (bpe, tokenizer.json)")
    encoding: str = option("utf-8", "encoding of the text files")
    val_fraction: float = option(0.1, "last part of the text kept for validation; 0 = none",
                                 at_least=0.0, at_most=0.9)


@dataclass
class RunConfig:
    """How long, how much at a time, where."""

    batch_size: int = option(4, "sequences in one forward and backward pass", at_least=1)
    grad_accum: int = option(1, "passes whose gradients make one update", at_least=1,
                             at_most=65536)
    steps: int = option(5500, "optimizer updates", at_least=1)
    seed: int = option(1337, "seed of initialisation, data order and samples", at_least=0)
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    precision: str = option("auto", "of the operands of products; bf16 needs a GPU or avx512_bf16, "
                            "auto is bf16 on a GPU", choices=("auto", "fp32", "bf16"))
    graph: bool = option(True, "replay the steps of a GPU as CUDA graphs")
    threads: int = option(0, "CPU threads; 0 = all cores", at_least=0, at_most=1024)
    out: str = option("", "folder of the run; default runs/DATA, numbered when taken")
    init_from: str = option("", "begin with the weights of this run, GPT-2 folder of transformers "
                            "or legacy ANDREA file; the model's shape and tokenizer are its own")
    resume: bool = option(False, "continue the run in --out, or the newest run without --out")
    save_every: int = option(1000, "steps between checkpoints; 0 = only at the end", at_least=0)
    keep: int = option(1, "newest checkpoints that stay, beside the best one", at_least=1)
    on_divergence: str = option("stop", "when a loss or gradient is not finite; skip = leave that "
                                "update out", choices=("stop", "skip"))
    max_skips: int = option(10, "updates left out in a row before the run stops after all",
                            at_least=1)
    overfit_one_batch: bool = option(False, "train on the first batch alone: loss must go to 0")


@dataclass
class OptimizerConfig:
    """AdamW, its learning-rate schedule and gradient clipping."""

    lr: float = option(2e-3, "peak learning rate", above=0.0, at_most=1e6)
    min_lr: float = option(2e-5, "learning rate at the last step", at_least=0.0)
    warmup: int = option(100, "steps of linear warm-up of the rate", at_least=0)
    schedule: str = option("cosine", "decay after the warm-up; wsd = constant, then linear over "
                           "the last fifth", choices=("cosine", "linear", "constant", "wsd"))
    weight_decay: float = option(0.1, "decoupled decay of matrices (embeddings included)",
                                 at_least=0.0)
    beta1: float = option(0.9, "decay of the first moment", at_least=0.0, below=1.0)
    beta2: float = option(0.99, "decay of the second moment", at_least=0.0, below=1.0)
    eps: float = option(1e-8, "added to the root of the second moment", at_least=1e-30)
    clip: float = option(1.0, "largest global gradient norm; 0 = no clipping", at_least=0.0)


@dataclass
class EvalConfig:
    """Looking at the model while it trains."""

    eval_every: int = option(1000, "steps between validations; 0 = only at the end", at_least=0)
    eval_tokens: int = option(65536, "validation tokens scored on the way; 0 = all (the last "
                              "validation always scores all)", at_least=0)
    sample_every: int = option(1000, "steps between samples of text; 0 = only at the end",
                               at_least=0)
    sample_tokens: int = option(300, "length of a sample; 0 = no samples", at_least=0,
                                at_most=10_000)


@dataclass
class LogConfig:
    """What to print and draw."""

    log_every: int = option(100, "steps between log lines", at_least=1)
    plot: bool = option(False, "draw loss, gradient norm and learning rate (curves.png)")


@dataclass
class TrainConfig:
    """Everything `andrea-train` can be told, by section."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)


@dataclass
class GenerateConfig:
    """Everything `andrea-generate` can be told."""

    checkpoint: str = option("", "checkpoint or run folder, GPT-2 folder of transformers, or "
                             "legacy ANDREA file; default: the newest run below runs/")
    prompt: str | None = option(None, "text to continue; empty = start of a document")
    prompt_file: str | None = option(None, "read the prompt from a file; - = standard input")
    special_tokens: bool = option(False, "names of the tokenizer's special tokens in the prompt or "
                                  "the text of --score become their ids")
    max_tokens: int = option(200, "tokens to generate", at_least=0)
    temperature: float = option(0.8, "0 = greedy; higher = more varied", at_least=0.0)
    top_k: int = option(0, "sample from the k likeliest tokens; 0 = all", at_least=0)
    top_p: float = option(1.0, "sample from the likeliest tokens of this total probability",
                          above=0.0, at_most=1.0)
    repetition_penalty: float = option(1.0, "divide the score of tokens in the window by this",
                                       above=0.0)
    stop: list[str] = option([], "end a sample before this text; may be given several times")
    num_samples: int = option(1, "samples to write, each from its own random stream", at_least=1)
    seed: int = option(1337, "seed of the random streams", at_least=0)
    cache: bool = option(True, "keep keys and values of the tokens already read")
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    precision: str = option("auto", "of the operands of products; bf16 needs a GPU or avx512_bf16, "
                            "auto is bf16 on a GPU", choices=("auto", "fp32", "bf16"))
    weights: str = option("fp32", "as what a CPU keeps and reads the matrices: smaller is faster",
                          choices=("fp32", "bf16", "int8"))
    graph: bool = option(True, "replay the steps of a GPU as CUDA graphs")
    threads: int = option(0, "CPU threads; 0 = all cores", at_least=0, at_most=1024)
    json: bool = option(False, "one JSON object a sample, or a token of --score, on stdout")
    score: str | None = option(None, "instead of generating: log p of every token of this text "
                               "file, with perplexity and bits per byte")
    export: str | None = option(None, "instead of generating: write a new folder that transformers "
                                "loads as GPT-2, or a legacy ANDREA file if the name ends in .bin")


def _andrea(d_model: int, n_head: int, n_layer: int, vocab_size: int) -> dict:
    # Peak rate, warm-up and beta2 of the published runs (andrea-120m, second training).
    return {
        "model": {"d_model": d_model, "n_head": n_head, "n_layer": n_layer, "context": 1024,
                  "vocab_size": vocab_size},
        "run": {"batch_size": 8, "steps": 200_000, "save_every": 100},
        "optimizer": {"lr": 3e-4, "min_lr": 3e-5, "warmup": 2000, "beta2": 0.999},
        "eval": {"eval_every": 1000, "sample_every": 100},
        "log": {"log_every": 10},
    }


PRESETS: dict[str, dict[str, dict]] = {
    "nano": {},  # the defaults above
    "andrea-12m": _andrea(384, 12, 6, 2305),
    "andrea-120m": _andrea(768, 12, 12, 8449),
    "andrea-480m": _andrea(1536, 24, 16, 8449),
    "gpt2-124m": _andrea(768, 12, 12, 50257),
}


def sections(config: Any) -> dict[str, Any]:
    """The named parts of a config: its dataclass members, or the config itself when flat."""
    parts = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    nested = {name: part for name, part in parts.items() if dataclasses.is_dataclass(part)}
    return nested or {"generate": config}


def check_limits(config: Any) -> None:
    """Raise UserError for the first field whose value is outside its documented limits."""
    for part in sections(config).values():
        for field in dataclasses.fields(part):
            value, limits = getattr(part, field.name), field.metadata
            flag = "--" + field.name.replace("_", "-")
            if isinstance(value, int) and value > LARGEST:
                raise UserError(f"{flag}: must be at most {LARGEST:,}")
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{flag} {value}: must be a finite number")
            if "choices" in limits and value not in limits["choices"]:
                raise UserError(f"{flag} {value}: must be one of {', '.join(limits['choices'])}")
            if "at_least" in limits and value < limits["at_least"]:
                raise UserError(f"{flag} {value}: must be at least {limits['at_least']}")
            if "above" in limits and value <= limits["above"]:
                raise UserError(f"{flag} {value}: must be above {limits['above']}")
            if "below" in limits and value >= limits["below"]:
                raise UserError(f"{flag} {value}: must be below {limits['below']}")
            if "at_most" in limits and value > limits["at_most"]:
                raise UserError(f"{flag} {value}: must be at most {limits['at_most']}")


def check_train(config: TrainConfig) -> None:
    """Raise UserError for values that are impossible, alone or together."""
    check_limits(config)
    model, optimizer = config.model, config.optimizer
    if model.d_model % model.n_head:
        fits = [str(n) for n in range(1, model.d_model + 1) if model.d_model % n == 0]
        raise UserError(f"--d-model {model.d_model} cannot be split into --n-head {model.n_head} "
                        f"heads of equal width; head counts that fit: {', '.join(fits)}")
    if optimizer.min_lr > optimizer.lr:
        raise UserError(f"--min-lr {optimizer.min_lr:g} is above the peak --lr {optimizer.lr:g}; "
                        "give a floor at or below the peak")
