"""andrea-train: from the command line to a run."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from . import args
from .config import PRESETS, TrainConfig, check_train
from .environment import prepare_threads
from .errors import UserError
from .program import run_program, say

DESCRIPTION = """\
Train a GPT on text. Without arguments: the preset nano on the built-in corpus, about two and a half
minutes on two cores. A run writes into one folder below runs/ (see --out). The defaults shown are
those of nano."""
EPILOG = """\
examples:
  andrea-train book.txt --tokenizer char --steps 1000
  andrea-train texts/ --preset andrea-12m --plan
  andrea-train --resume

Exit codes: 0 done, 1 a bug, 2 something to correct, 3 diverged, 130 and 143 interrupted by SIGINT
or SIGTERM; a run in training finishes its step and saves first."""

# What --resume may change; the rest is taken from the checkpoint and must agree with it.
CHANGEABLE = {"data", "val_data", "encoding", "steps", "device", "threads", "out", "resume",
              "save_every", "eval_every", "eval_tokens", "sample_every", "sample_tokens",
              "log_every", "plot"}


def make_parser() -> args.Parser:
    parser = args.Parser(prog="andrea-train", description=DESCRIPTION, epilog=EPILOG)
    start = parser.add_argument_group("Where the settings come from (flags win over these)")
    start.add_argument("--preset", choices=PRESETS, help="a named model and its training settings")
    start.add_argument("--config", metavar="FILE", help="TOML file, as --print-config writes it")
    show = parser.add_argument_group("Look without training")
    show.add_argument("--print-config", action="store_true", help="print the settings as TOML")
    show.add_argument("--plan", action="store_true",
                      help="print parameters, memory, FLOPs and estimated time")
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
    return run_program("andrea-train", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    config, given = read_config(argv)
    if given.print_config:
        print(args.to_toml(config), end="")
        return 0
    prepare_threads(config.run.threads)  # before anything imports NumPy
    from . import checkpoint, device

    chosen = device.choose(config.run.device)
    resumed = None
    if config.run.resume:
        for flag in ("preset", "config"):
            if getattr(given, flag) is not None:
                raise UserError(f"--{flag} cannot be given with --resume: the settings come from "
                                f"the checkpoint; {_changeable()}")
        resumed = checkpoint.load(checkpoint.find(config.run.out))
        folder = checkpoint.run_folder(resumed)
        config = _resumed_config(config, given, resumed)
        if resumed.step >= config.run.steps:
            say(f"{folder} is complete: {resumed.step} steps done; "
                f"go on with --resume --steps N, N above {resumed.step}")
            return 0
    elif config.run.out and any(Path(config.run.out).glob("*")):
        remedy = (", or --resume to go on with the run in it"
                  if any(Path(config.run.out).glob("checkpoints/step-*")) else "")
        raise UserError(f"--out {config.run.out} is not empty; give a new folder{remedy}")
    return _run(config, chosen, resumed, given.plan)


def _run(config: TrainConfig, chosen, resumed, only_plan: bool) -> int:
    import numba

    from kernels.common.cache import cache_folder

    from . import checkpoint, plan, plot
    from .corpora import open_corpus
    from .run import Run, check_writable, free_folder, timed
    from .trainer import Trainer, warm_up

    say(chosen.line)
    if config.run.out and not resumed:
        check_writable(Path(config.run.out))
    corpus = open_corpus(config.data, config.model.context, resumed and resumed.tokenizer)
    dataset = corpus.dataset
    if resumed:
        folder = checkpoint.run_folder(resumed)
    else:
        folder = Path(config.run.out) if config.run.out else free_folder(corpus.name)
        if not only_plan:
            check_writable(folder)
    for notice in dataset.notices:
        say(notice)
    _fix_vocabulary(config, dataset.tokenizer)
    if resumed and resumed.state["fingerprint"] != dataset.fingerprint:
        raise UserError(f"the text is not the one {resumed.path.parent.parent} was trained on; "
                        "resume with the same data")
    if resumed and resumed.tokenizer.to_dict() != dataset.tokenizer.to_dict():
        raise UserError(f"the data were tokenised in another way than those of "
                        f"{resumed.path.parent.parent}; resume with the same data")
    plan.check_fits(config)
    if not cache_folder().exists():
        say("compiling kernels for this machine: once, up to a minute")
    seconds = timed(lambda: warm_up(chosen.ops, config.model))
    layer, threads = numba.threading_layer(), numba.get_num_threads()
    say(f"kernels ready in {seconds:.1f} s; {threads} thread{'s' * (threads > 1)} ({layer})")
    if layer == "workqueue":
        say("warning: Numba found no OpenMP (libgomp) and no TBB; its own thread pool is slower")
    if only_plan:
        print(plan.report(config, chosen.ops))
        return 0
    if config.log.plot and not plot.available():
        say(plot.HINT)
    trainer = Trainer(config, chosen.ops, dataset, resumed)
    m = config.model
    if config.optimizer.warmup > config.run.steps / 2:
        say(f"the warm-up of {config.optimizer.warmup} steps takes more than half of the "
            f"{config.run.steps}; --warmup sets it")
    say(f"{corpus.name}: {len(dataset.train):,} tokens to train on, {len(dataset.val):,} to "
        f"validate; {trainer.table.count:,} parameters; {trainer.tokens_per_step:,} tokens a step "
        f"({config.run.batch_size} × {m.context}, accumulated {config.run.grad_accum} ×)")
    code = Run(trainer, corpus, folder, resumed).train()
    if code == 0:
        print(f"andrea-generate {shlex.quote(str(folder))}", flush=True)
    return code


def _fix_vocabulary(config: TrainConfig, tokenizer) -> None:
    """Set a vocabulary left open to the tokenizer's; refuse one that is too small for it."""
    model = config.model
    if not model.vocab_size:
        model.vocab_size = tokenizer.vocab_size
    elif model.vocab_size < tokenizer.vocab_size:
        raise UserError(f"--vocab-size {model.vocab_size} is too small: the {tokenizer.name} "
                        f"tokenizer has {tokenizer.vocab_size} ids here; give at least that, or 0")


def _changeable() -> str:
    flags = sorted("--" + n.replace("_", "-") for n in CHANGEABLE - {"data", "out", "resume"})
    return f"a resumed run may change only the place of its text and {', '.join(flags)}"


def _resumed_config(config: TrainConfig, given, resumed) -> TrainConfig:
    """The checkpoint's config with the changes that a resumed run may make."""
    merged = resumed.config
    for name, part in args.sections(config).items():
        kept = getattr(merged, name)
        for field in dataclasses.fields(part):
            if vars(given).get(field.name) in (None, []):
                continue
            value = getattr(part, field.name)
            if field.name in CHANGEABLE:
                setattr(kept, field.name, value)
            elif value != getattr(kept, field.name):
                flag = "--" + field.name.replace("_", "-")
                raise UserError(f"{flag} {value} differs from the {getattr(kept, field.name)} of "
                                f"{resumed.path.parent.parent}; {_changeable()}")
    return merged


if __name__ == "__main__":
    sys.exit(main())
