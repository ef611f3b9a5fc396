"""The training loop: steps, log lines, validations, samples, checkpoints and signals."""

from __future__ import annotations

import math
import os
import shlex
import signal
import uuid
from pathlib import Path

import numpy as np

from . import args, plot
from .checkpoint import Checkpoint
from .corpora import Corpus
from .errors import UserError
from .evaluate import bits_per_byte
from .generate import generate_text
from .initialize import expected_first_loss
from .log import Console, EventLog
from .memory import HostMemory
from .metrics import byte_size, duration, peak_memory
from .sampler import Sampling
from .trainer import Diverged, StepResult, Trainer, generator

EXIT_DIVERGED = 3
# A young model writes anything; what would steer a terminal is shown as the mark for unknown.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
SAMPLING = Sampling(temperature=0.5, top_k=0, top_p=1.0, repetition_penalty=1.0)


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a flag; the second one ends the program at once."""

    def __init__(self):
        self.signal = 0

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._handle)
                        for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _handle(self, number: int, frame) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nfinishing the step and saving; once more stops at once\n")

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Run:
    """One call of `andrea-train`: a trainer, its folder, and what it says on the way."""

    def __init__(self, trainer: Trainer, corpus: Corpus, folder: Path,
                 resumed: Checkpoint | None = None):
        self.trainer, self.corpus, self.folder = trainer, corpus, folder
        self.config = trainer.config
        self.run_id = resumed.state["run_id"] if resumed else uuid.uuid4().hex[:12]
        self._resumed = resumed
        self._console = Console()
        self._saved_step = resumed.step if resumed else -1
        self._logged = (trainer.step_count, trainer.seconds)  # at the last log line

    def train(self) -> int:
        """Run to the last step; returns the program's exit code."""
        steps, trainer = self.config.run.steps, self.trainer
        self.folder.mkdir(parents=True, exist_ok=True)
        log_path = self.folder / "log.jsonl"
        self._log = EventLog(log_path, self.run_id, self._resumed.step if self._resumed else None)
        self._console = Console(steps, trainer.step_count)
        self._log.write("run.start", trainer.step_count, config=args.to_dict(self.config),
                        parameters=trainer.table.count, corpus=self.corpus.name,
                        resumed=self._resumed is not None)
        try:
            # What is not finite is looked for, and said, by the trainer itself.
            with StopRequest() as stop, np.errstate(over="ignore", invalid="ignore"):
                while trainer.step_count < steps and not stop.signal:
                    trainer.advance()
                    self._after_step()
                self.save()
            if trainer.step_count < steps:
                self._say(f"interrupted after step {trainer.step_count}; go on with: "
                          f"andrea-train --resume --out {shlex.quote(str(self.folder))}")
                self._log.write("run.end", trainer.step_count, reason="interrupted")
                return 128 + stop.signal
            self._console.close()
            self._finish()
            return 0
        except Diverged as error:
            last = (f"the checkpoint of step {self._saved_step} is unharmed"
                    if self._saved_step >= 0 else "no checkpoint was written yet")
            self._say(f"diverged at {error}; {last}. Lower --lr, lengthen --warmup or set --clip")
            self._log.write("run.end", trainer.step_count, reason="diverged")
            return EXIT_DIVERGED
        finally:
            self._console.close()
            self._log.close()
            if self.config.log.plot and plot.available():
                plot.write_curves(log_path, self.folder / "curves.png")

    def _say(self, text: str) -> None:
        self._console.line(text)

    def _after_step(self) -> None:
        config, step = self.config, self.trainer.step_count
        last = step == config.run.steps
        if last or step == 1 or step % config.log.log_every == 0:
            # The only place where training waits for a GPU's figures.
            self._log_step(self.trainer.wait())
        else:
            self._console.step()
        for every, action in ((config.eval.eval_every, self._evaluate),
                              (config.eval.sample_every, self._sample),
                              (config.run.save_every, self.save)):
            if every and step % every == 0 and not last:
                action()

    def _log_step(self, result: StepResult) -> None:
        steps = self.config.run.steps
        if result.step == 1:
            expected = expected_first_loss(self.config.model)
            self._say(f"first loss {result.loss:.3f}; {expected:.3f} is expected of a fresh model")
        first, seconds = self._logged
        step_seconds = (self.trainer.seconds - seconds) / (result.step - first)
        self._logged = (result.step, self.trainer.seconds)
        rate = self.trainer.tokens_per_step / step_seconds
        average = self.trainer.average.value
        self._console.step(
            f"step {result.step}/{steps} {100 * result.step / steps:.1f}%  "
            f"loss {result.loss:.4f} (average {average:.4f})  norm {result.grad_norm:.2f}  "
            f"lr {result.lr:.2e}  {1000 * step_seconds:.0f} ms  {rate:,.0f} tok/s  "
            f"ETA {duration((steps - result.step) * step_seconds)}")
        self._log.write("run.loss", result.step, loss=result.loss, loss_average=average,
                        grad_norm=result.grad_norm, lr=result.lr, tokens_per_second=rate)

    def _evaluate(self, whole: bool = False) -> None:
        """Score the validation text, or its first part; says and logs the result."""
        dataset, step = self.trainer.dataset, self.trainer.step_count
        if not len(dataset.val):
            return
        score = self.trainer.evaluator().score(0 if whole else self.config.eval.eval_tokens)
        bits = bits_per_byte(score.loss, len(dataset.val) - 1, dataset.val_bytes)
        self._say(f"validation at step {step}: loss {score.loss:.4f} nats per token, "
                  f"{bits:.4f} bits per byte ({score.tokens:,} tokens)")
        record = {"loss": score.loss, "bits_per_byte": bits, "tokens": score.tokens}
        if whole and self.corpus.source_entropy is not None:
            record |= self._distance_to_source(self.corpus.source_entropy)
        self._log.write("run.eval", step, **record)
        if not math.isfinite(score.loss):
            raise Diverged(f"step {step}: validation loss {score.loss:g}")

    def _distance_to_source(self, entropy: float) -> dict[str, float]:
        """For generated text: how far the model is from the law that made it, per character."""
        dataset = self.trainer.dataset
        score = self.trainer.evaluator().score_with_context()
        value = score.loss * (len(dataset.val) - 1) / dataset.val_characters
        self._say(f"nats per character, half a window or more read: val {value:.3f}, the text's "
                  f"own entropy {entropy:.3f}, {value - entropy:.3f} to go")
        return {"nats_per_character": value, "source_entropy": entropy,
                "distance": value - entropy}

    def _sample(self) -> None:
        trainer, step = self.trainer, self.trainer.step_count
        if not self.config.eval.sample_tokens:
            return
        rng = generator(self.config.run.seed, "sample", step)
        sample = generate_text(trainer.decoder(), trainer.dataset.tokenizer, "",
                               self.config.eval.sample_tokens, SAMPLING, rng)
        self._say(f"--- sample at step {step}\n{sample.text.translate(CONTROLS)}\n---")
        self._log.write("run.sample", step, text=sample.text)

    def save(self) -> None:
        """Write a checkpoint of the current step, unless there is one.

        Raises Diverged, leaving the older checkpoint in place, when any value is not finite.
        """
        trainer, step = self.trainer, self.trainer.step_count
        if step == self._saved_step:
            return
        trainer.check_finite()
        path = trainer.save(self.folder, self.run_id)
        self._saved_step = step
        self._log.write("run.checkpoint", step, path=os.path.relpath(path, self.folder))

    def _finish(self) -> None:
        self._evaluate(whole=True)
        self._sample()
        trainer, (_, seconds) = self.trainer, self._logged  # the last step was logged
        kind = "memory" if isinstance(trainer.memory, HostMemory) else "host memory"
        self._say(f"done: {trainer.step_count} steps, {duration(seconds)} in steps, "
                  f"peak {kind} {byte_size(peak_memory())}; log and checkpoint in {self.folder}")
        self._log.write("run.end", trainer.step_count, reason="finished", seconds=seconds,
                        peak_memory=peak_memory())


def check_writable(folder: Path) -> None:
    """Raise UserError when `folder` cannot become a run's folder; writes nothing."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"--out {folder}: {existing.absolute()} is not a folder; give another")
    if not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {existing.absolute()}; give a folder with --out")


def free_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3 … that does not exist."""
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder
