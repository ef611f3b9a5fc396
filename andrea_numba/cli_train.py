"""andrea-train: from the command line to a run."""

from __future__ import annotations

import sys

from . import program

if __name__ == "__main__":  # signals are answered to before the rest is imported
    sys.exit(program.train())

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from . import args, checkpoint_files
from .config import PRESETS, TrainConfig, check_train
from .environment import prepare_threads
from .errors import UserError
from .lock import RunLock
from .program import SMALLER_RUN, raising_on_signals, run_program, say

DESCRIPTION = """\
Train a GPT on text. Without arguments: the preset nano on the built-in corpus, about two and a half
minutes on two cores. A run writes into one folder below runs/ (see --out). The defaults shown are
those of nano."""
EPILOG = """\
examples:
  andrea-train book.txt --tokenizer char --steps 1000
  andrea-train texts/ --preset andrea-12m --plan
  andrea-train --resume
  andrea-train letters.txt --init-from runs/book --lr 1e-4 --min-lr 1e-5

Exit codes: 0 done, 1 a bug, 2 something to correct, 3 diverged, 4 the last state could not be
saved; 129, 130 and 143 interrupted by SIGHUP, SIGINT or SIGTERM: a run in training finishes its
step and saves first, a second signal ends it at once. SIGUSR1 saves, and training goes on."""

# What --resume may change; the rest is taken from the checkpoint and must agree with it.
CHANGEABLE = {"data", "val_data", "encoding", "steps", "device", "precision", "graph", "threads",
              "out", "resume", "save_every", "keep", "on_divergence", "max_skips", "eval_every",
              "eval_tokens", "sample_every", "sample_tokens", "log_every", "plot"}


def make_parser() -> args.Parser:
    parser = args.Parser(prog="andrea-train", description=DESCRIPTION, epilog=EPILOG)
    start = parser.add_argument_group("Where the settings come from (flags win over these)")
    start.add_argument("--preset", choices=PRESETS, help="a named model and its training settings")
    start.add_argument("--config", metavar="FILE", help="TOML file, as --print-config writes it")
    show = parser.add_argument_group("Look without training")
    show.add_argument("--print-config", action="store_true", help="print the settings as TOML")
    show.add_argument("--plan", action="store_true",
                      help="print parameters, memory, FLOPs and estimated time")
    show.add_argument("--show-tokens", metavar="TEXT",
                      help="print the tokens of a text: id and piece, one a line")
    show.add_argument("--doctor", action="store_true",
                      help="print what is installed, where CUDA was looked for, and why --device "
                           "auto takes what it takes")
    args.add_options(parser, TrainConfig(), positional="data")
    return parser


def read_config(argv: Sequence[str] | None) -> tuple[TrainConfig, object]:
    """Defaults, then preset, then file, then flags; and the parsed flags themselves."""
    given = make_parser().parse(argv)
    config = TrainConfig()
    if given.preset:
        args.apply(config, PRESETS[given.preset], f"--preset {given.preset}")
    if given.config is not None:
        args.apply(config, args.read_toml(given.config), f"--config {given.config}")
    args.apply_flags(config, given)
    check_train(config)
    return config, given


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    return run_program("andrea-train", lambda: _main(argv), SMALLER_RUN)


def _main(argv: Sequence[str] | None) -> int:
    config, given = read_config(argv)
    if given.print_config:
        print(args.to_toml(config), end="")
        return 0
    prepare_threads(_threads(config, given))  # before anything imports NumPy
    if given.doctor:
        from . import doctor

        doctor.report()
        return 0
    if config.run.resume:
        return _resume(config, given)
    folder = Path(config.run.out) if config.run.out else None
    if folder:
        from .run import check_new

        check_new(folder)
    return _run(config, given, folder, _initial(config, given))


def _initial(config: TrainConfig, given):
    """For --init-from: the model, whose shape and tokenizer the config takes over; else None."""
    if not config.run.init_from:
        return None
    from .interchange import open_model, with_context
    from .tokenizers import read_special_tokens

    initial = open_model(config.run.init_from, say)
    flags = vars(given)
    if flags.get("context", initial.model.context) != initial.model.context:
        initial = with_context(initial, flags["context"])
    own = dataclasses.asdict(initial.model)
    if initial.tokenizer is None:
        say(f"{initial.path} names no tokenizer: --tokenizer {config.data.tokenizer} is taken")
    else:
        own["tokenizer"] = config.data.tokenizer = initial.tokenizer.name
        read_special_tokens(initial.tokenizer, config.data.special_tokens)
    for name, value in own.items():
        if flags.get(name, value) != value:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {flags[name]} differs from the {value} of {initial.path}; "
                            "leave it out, or begin without --init-from")
    config.model = dataclasses.replace(initial.model)
    return initial


def _threads(config: TrainConfig, given) -> int:
    """--threads; of a run to be resumed those it had, unless others are given."""
    if config.run.resume and "threads" not in vars(given):
        stored = TrainConfig()
        with contextlib.suppress(UserError):  # it comes again when the checkpoint is loaded
            args.apply(stored, checkpoint_files.read_config(config.run.out) or {}, "")
            check_train(stored)
            return stored.run.threads
    return config.run.threads


def _resume(config: TrainConfig, given) -> int:
    from . import checkpoint
    from .run import finished

    for flag in ("preset", "config"):
        if getattr(given, flag) is not None:
            raise UserError(f"--{flag} cannot be given with --resume: the settings come from the "
                            f"checkpoint; {_changeable()}")
    found = checkpoint.find(config.run.out)
    resumed = checkpoint.newest(config.run.out, say)
    folder = checkpoint.run_folder(resumed)
    out = config.run.out or str(folder)
    config = _resumed_config(config, given, resumed.config, folder)
    if resumed.step > config.run.steps or (resumed.step == config.run.steps
                                           and finished(folder, resumed.step)):
        say(f"{folder} is complete: {resumed.step} steps done; "
            f"go on with --resume --steps N, N above {resumed.step}")
        return 0
    with contextlib.nullcontext() if given.plan else RunLock(folder):
        if checkpoint.find(out) != found:
            raise UserError(f"{folder} has changed meanwhile: another andrea-train went on with "
                            "it; start again")
        best = resumed.state.get("best")
        if not given.plan and isinstance(best, dict) and best.get("step") == resumed.step:
            checkpoint.mark_best(folder, resumed.step)  # a kill may have come just before
        return _run(config, given, folder, resumed)


def _run(config: TrainConfig, given, folder: Path | None, loaded) -> int:
    """Train in `folder`, or for None in a new one below runs/; or only plan. `loaded` is what is
    resumed, or what --init-from names, or None."""
    from . import device

    run = config.run
    chosen = device.choose(run.device, run.precision, run.graph)
    say(chosen.line)
    with chosen.memory.queue():
        return _on_device(config, given, chosen, folder, loaded)


def _on_device(config: TrainConfig, given, chosen, folder: Path | None, loaded) -> int:
    from . import checkpoint, plan
    from .parameters import ParameterTable
    from .run import check_writable

    with raising_on_signals():
        corpus = _open_data(config, loaded)
    if given.show_tokens is not None:
        _show_tokens(corpus.dataset.tokenizer, given.show_tokens)
        return 0
    if not given.plan:
        check_writable(folder or Path("runs"))
        checkpoint.check_space(folder or Path("runs"), ParameterTable(config.model))
        checkpoint.check_tokenizer(config, corpus.dataset.tokenizer)
    plan.check_fits(config, chosen.memory)
    _load_kernels(chosen, config)
    if given.plan:
        print(plan.report(config, chosen.ops, chosen.memory))
        return 0
    with raising_on_signals():
        return _train(config, chosen, corpus, folder, loaded)


def _open_data(config: TrainConfig, loaded):
    """The corpus; sets a vocabulary left open, and checks that a resumed run keeps its text."""
    from .corpora import open_corpus

    tokenizer = loaded and loaded.tokenizer
    corpus = open_corpus(config.data, config.model.context, tokenizer,
                         config.model.vocab_size)
    dataset, model = corpus.dataset, config.model
    for notice in dataset.notices:
        say(notice)
    if config.run.resume and loaded.state["fingerprint"] != dataset.fingerprint:
        raise UserError(f"the text is not the one {loaded.path} was trained on; resume with the "
                        "same data")
    if tokenizer and tokenizer.to_dict() != dataset.tokenizer.to_dict():
        raise UserError(f"the text was tokenised in another way than that of {loaded.path}; give "
                        "the text itself, not its tokens")
    needed = dataset.tokenizer.vocab_size
    if not model.vocab_size:
        model.vocab_size = needed
    elif model.vocab_size < needed:
        raise UserError(f"--vocab-size {model.vocab_size} is too small: the "
                        f"{dataset.tokenizer.name} tokenizer has {needed} ids here; give at least "
                        "that, or 0")
    return corpus


def _show_tokens(tokenizer, text: str) -> None:
    for token in tokenizer.encode(text).tolist():
        piece = tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")
        print(f"{token}\t{json.dumps(piece, ensure_ascii=False)}")


def _load_kernels(chosen, config: TrainConfig) -> None:
    """Compile, or read from the cache, every kernel in use; says how long it took."""
    import numba

    from . import plan
    from .start import load_kernels

    ready = f"kernels ready in {load_kernels(chosen, config.model, config.run.batch_size):.1f} s"
    if chosen.name != "cpu":
        say(ready)
        plan.check_fits(config, chosen.memory)  # again: scratch memory and code are in place now
        return
    layer, threads = numba.threading_layer(), numba.get_num_threads()
    say(f"{ready}; {threads} thread{'s' * (threads > 1)} ({layer})")
    if layer == "workqueue":
        say("warning: Numba found no OpenMP (libgomp) and no TBB; its own thread pool is slower")


def _train(config: TrainConfig, chosen, corpus, folder: Path | None, loaded) -> int:
    from . import plot
    from .run import Run
    from .trainer import Trainer

    if config.log.plot and not plot.available():
        say(plot.HINT)
    resumed = loaded if config.run.resume else None
    trainer = Trainer(config, chosen.ops, corpus.dataset, resumed, chosen.memory,
                      weights=loaded and loaded.weights)
    run, dataset = config.run, corpus.dataset
    if config.optimizer.warmup > run.steps / 2:
        say(f"the warm-up of {config.optimizer.warmup} steps takes more than half of the "
            f"{run.steps}; --warmup sets it")
    say(f"{corpus.name}: {len(dataset.train):,} tokens to train on, {len(dataset.val):,} to "
        f"validate, of {dataset.tokenizer.vocab_size:,} kinds; {trainer.table.count:,} parameters; "
        f"{trainer.tokens_per_step:,} tokens a step ({run.batch_size} × {config.model.context}, "
        f"accumulated {run.grad_accum} ×)")
    training = Run(trainer, corpus, folder, resumed)
    code = training.train()
    if code == 0:
        print(f"andrea-generate {shlex.quote(str(training.folder))}", flush=True)
    return code


def _changeable() -> str:
    flags = sorted("--" + n.replace("_", "-") for n in CHANGEABLE - {"data", "out", "resume"})
    return f"a resumed run may change only the place of its text and {', '.join(flags)}"


def _resumed_config(config: TrainConfig, given, kept: TrainConfig, folder: Path) -> TrainConfig:
    """`kept`, the checkpoint's config, with the changes that a resumed run may make."""
    for name, part in args.sections(config).items():
        section = getattr(kept, name)
        for field in dataclasses.fields(part):
            if vars(given).get(field.name) in (None, []):
                continue
            value, old = getattr(part, field.name), getattr(section, field.name)
            if field.name in CHANGEABLE:
                setattr(section, field.name, value)
            elif value != old:
                flag = "--" + field.name.replace("_", "-")
                raise UserError(f"{flag} {value} differs from the {old} of {folder}; "
                                f"{_changeable()}")
    return kept
