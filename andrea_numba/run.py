"""The training loop: steps, log lines, validations, samples, checkpoints and signals."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shlex
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import args, plot
from .checkpoint import Checkpoint, SaveFailed
from .checkpoint_files import nearest_existing
from .corpora import Corpus
from .errors import UserError
from .evaluate import Score, bits_per_byte
from .generate import generate_text
from .initialize import expected_first_loss
from .lock import NAME as LOCK
from .lock import RunLock
from .log import Console, EventLog, read_events
from .memory import HostMemory
from .metrics import byte_size, duration, peak_memory
from .program import StopRequest
from .sampler import Sampling
from .trainer import Diverged, StepResult, Trainer, generator
from .watch import Best, diversity, least_diversity

EXIT_DIVERGED = 3
EXIT_NOT_SAVED = 4
PROGRESS_SECONDS = 20  # between lines of a long validation
# A young model writes anything; what would steer a terminal is shown as the mark for unknown.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
SAMPLING = Sampling(temperature=0.5, top_k=0, top_p=1.0, repetition_penalty=1.0)


class Stopped(Exception):
    """A signal asks the run to end."""


class Run:
    """One call of `andrea-train`: a trainer, its folder, and what it says on the way."""

    def __init__(self, trainer: Trainer, corpus: Corpus, folder: Path | None,
                 resumed: Checkpoint | None = None):
        """`folder` None: a new one below runs/, named like the corpus. That of a resumed run is
        locked by the caller, a new one here."""
        self.trainer, self.corpus, self.folder = trainer, corpus, folder
        self.config = trainer.config
        self.run_id = resumed.state["run_id"] if resumed else uuid.uuid4().hex[:12]
        self._resumed = resumed
        self._stop = StopRequest()
        self._console = Console()
        self._saved_step = resumed.step if resumed else -1
        self._logged = (trainer.step_count, trainer.seconds)  # at the last log line
        self._saved_best = trainer.best
        self._looks = ((self.config.eval.eval_every, "run.eval", self._evaluate),
                       (self.config.eval.sample_every, "run.sample", self._sample))

    def train(self) -> int:
        """Run to the last step; returns the program's exit code."""
        with contextlib.ExitStack() as held:
            held.enter_context(self._stop.listening())
            # What is not finite is looked for, and said, by the trainer itself.
            held.enter_context(np.errstate(over="ignore", invalid="ignore"))
            if self._resumed is None:
                self.folder = self.folder or _new_folder(self.corpus.name)
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(RunLock(self.folder))
                check_new(self.folder)  # again: another run may have come first
            return self._train()

    def _train(self) -> int:
        trainer, config = self.trainer, self.config
        log_path = self.folder / "log.jsonl"
        self._log = EventLog(log_path, self.run_id, self._resumed.step if self._resumed else None)
        self._console = Console(config.run.steps, trainer.step_count)
        self._log.write("run.start", trainer.step_count, config=args.to_dict(config),
                        parameters=trainer.table.count, corpus=self.corpus.name,
                        resumed=self._resumed is not None)
        try:
            code, reason = self._to_the_end()
            self._log.write("run.end", trainer.step_count, reason=reason, seconds=trainer.seconds,
                            peak_memory=peak_memory())
            return code
        finally:
            self._console.close()
            self._log.close()
            if config.log.plot and plot.available():
                self._plot(log_path)

    def _to_the_end(self) -> tuple[int, str]:
        """Train; exit code of the program and the reason why it ends."""
        trainer = self.trainer
        try:
            try:
                self._steps()
                code, reason = 0, "finished"
            except Stopped:
                self.save()
                code, reason = 128 + self._stop.signal, "interrupted"
        except Diverged as error:
            last = (f"the checkpoint of step {self._saved_step} is unharmed"
                    if self._saved_step >= 0 else "no checkpoint was written yet")
            self._say(f"diverged at {error}; {last}. Lower --lr, lengthen --warmup or set --clip")
            return EXIT_DIVERGED, "diverged"
        if self._saved_step != trainer.step_count:
            last = (f"the newest checkpoint is of step {self._saved_step}"
                    if self._saved_step >= 0 else "there is no checkpoint")
            self._say(f"{reason} after step {trainer.step_count}, which could not be saved; {last}")
            return EXIT_NOT_SAVED, "not saved"
        if reason == "interrupted":
            self._say(f"interrupted after step {trainer.step_count}; go on with: "
                      f"andrea-train --resume --out {shlex.quote(str(self.folder))}")
        return code, reason

    def _steps(self) -> None:
        trainer, steps = self.trainer, self.config.run.steps
        if self._resumed and 0 < trainer.step_count < steps:
            self._look_again()
        while trainer.step_count < steps:
            self._heed_stop()
            trainer.advance()
            self._after_step()
        self._heed_stop()
        self._finish()

    def _heed_stop(self) -> None:
        if self._stop.signal:
            raise Stopped

    def _say(self, text: str) -> None:
        self._console.line(text)

    def _due(self, every: int) -> bool:
        return bool(every) and self.trainer.step_count % every == 0

    def _look_again(self) -> None:
        """Do what was due at the step of the checkpoint, and was cut short by a signal."""
        for every, event, look in self._looks:
            if self._due(every) and not self._done_before(event):
                look()

    def _done_before(self, event: str, **values: int) -> bool:
        """Whether the log of the resumed run has such an event, with these values, at this step."""
        wanted = {"step": self.trainer.step_count, **values}
        return self._resumed is not None and any(
            all(e.get(name) == value for name, value in wanted.items())
            for e in read_events(self.folder / "log.jsonl", event))

    def _after_step(self) -> None:
        config, trainer = self.config, self.trainer
        step = trainer.step_count
        last = step == config.run.steps
        # The only place where training waits for a GPU's figures.
        waited = last or step == 1 or step % config.log.log_every == 0
        result = trainer.wait() if waited else None
        self._tell_news()
        if result and not result.skipped:
            self._log_step(result)
        else:
            self._console.step()
        if last:
            return
        for every, _, look in self._looks:
            if self._due(every):
                look()
        if (self._due(config.run.save_every) or self._stop.save
                or trainer.best != self._saved_best):
            self._stop.save = False
            self.save()

    def _tell_news(self) -> None:
        for result, text in self.trainer.news:
            self._say(text)
            if result.skipped:
                self._log.write("run.loss", result.step, loss=result.loss, lr=result.lr,
                                grad_norm=result.grad_norm, skipped=True)
        self.trainer.news.clear()

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

    def _evaluate(self, last: bool = False) -> None:
        """Score the first part of the validation text, at the last step then all of it."""
        dataset, step = self.trainer.dataset, self.trainer.step_count
        if not len(dataset.val):
            return
        part = self.config.eval.eval_tokens
        targets = len(dataset.val) - 1
        total = targets if last or not part else min(part, targets)
        evaluator = self.trainer.evaluator(self._progress(total))
        score = evaluator.score(part)
        self._compare_with_best(score)
        if last:
            self.save()  # before what may take long
            score += evaluator.rest(part)
        bits = bits_per_byte(score.loss, targets, dataset.val_bytes)
        self._say(f"validation at step {step}: loss {score.loss:.4f} nats per token, "
                  f"{bits:.4f} bits per byte ({score.tokens:,} tokens)")
        record = {"loss": score.loss, "bits_per_byte": bits, "tokens": score.tokens}
        if last and self.corpus.source_entropy is not None:
            record |= self._distance_to_source(self.corpus.source_entropy)
        self._log.write("run.eval", step, **record)
        if not math.isfinite(score.loss):
            raise Diverged(f"step {step}: validation loss {score.loss:g}")

    def _progress(self, total: int) -> Callable[[int], None]:
        """What a validation of `total` tokens calls with the size of each batch: it is cut short
        by a signal, and says now and then how far it is."""
        started = said = time.monotonic()
        done = 0

        def progress(tokens: int) -> None:
            nonlocal said, done
            self._heed_stop()
            now = time.monotonic()
            if done and now - said >= PROGRESS_SECONDS:
                said = now
                left = (now - started) * (total / done - 1)
                self._say(f"validation: {done:,} of {total:,} tokens, ETA {duration(left)}")
            done += tokens

        return progress

    def _compare_with_best(self, score: Score) -> None:
        """Note the lowest loss so far; it is saved when all of this step is done."""
        best = self.trainer.best
        if best is None or best.tokens != score.tokens or score.loss < best.loss:
            self.trainer.best = Best(self.trainer.step_count, score.loss, score.tokens)

    def _distance_to_source(self, entropy: float) -> dict[str, float]:
        """For generated text: how far the model is from the law that made it, per character."""
        dataset = self.trainer.dataset
        evaluator = self.trainer.evaluator(self._progress(len(dataset.val) - 1))
        score = evaluator.score_with_context()
        value = score.loss * (len(dataset.val) - 1) / dataset.val_characters
        self._say(f"nats per character, half a window or more read: val {value:.3f}, the text's "
                  f"own entropy {entropy:.3f}, {value - entropy:.3f} to go")
        return {"nats_per_character": value, "source_entropy": entropy,
                "distance": value - entropy}

    def _sample(self) -> None:
        trainer, step, length = (self.trainer, self.trainer.step_count,
                                 self.config.eval.sample_tokens)
        if not length:
            return
        rng = generator(self.config.run.seed, "sample", step)
        sample = generate_text(trainer.decoder(), trainer.dataset.tokenizer, "", length, SAMPLING,
                               rng, on_text=lambda piece: self._heed_stop())
        self._say(f"--- sample at step {step}\n{sample.text.translate(CONTROLS)}\n---")
        found = diversity(sample.tokens)
        usual = least_diversity(trainer.dataset.train, length)
        self._log.write("run.sample", step, text=sample.text, diversity=found,
                        diversity_of_text=usual)
        if trainer.repetition.add(found, usual, step / self.config.run.steps):
            self._say(f"warning: samples repeat themselves: {100 * found:.0f} % of the 4-token "
                      f"sequences at step {step} are distinct, {100 * usual:.0f} % in the most "
                      f"repetitive part of the text; average loss {trainer.average.value:.4f}")

    def save(self) -> bool:
        """Write a checkpoint of the current step, unless there is one; whether there is one now.

        A failure is said, and the next save is another try. Raises Diverged, leaving the older
        checkpoints in place, when any value is not finite.
        """
        trainer, step = self.trainer, self.trainer.step_count
        new_best = trainer.best != self._saved_best
        if step == self._saved_step and not new_best:
            return True
        trainer.check_finite()
        try:
            path = trainer.save(self.folder, self.run_id, best=new_best)
        except SaveFailed as error:
            trainer.best = self._saved_best
            self._say(f"warning: step {step} is not saved: {error}")
            return False
        self._saved_step, self._saved_best = step, trainer.best
        self._log.write("run.checkpoint", step, path=os.path.relpath(path, self.folder),
                        best=new_best)
        return True

    def _finish(self) -> None:
        trainer = self.trainer
        if not self._done_before("run.eval", tokens=len(trainer.dataset.val) - 1):
            self._evaluate(last=True)
        self.save()
        if not self._done_before("run.sample"):
            self._sample()
        kind = "memory" if isinstance(trainer.memory, HostMemory) else "host memory"
        self._say(f"done: {trainer.step_count} steps, {duration(trainer.seconds)} in steps, "
                  f"peak {kind} {byte_size(peak_memory())}; log and checkpoint in {self.folder}")

    def _plot(self, log_path: Path) -> None:
        try:
            plot.write_curves(log_path, self.folder / "curves.png")
        except OSError as error:
            self._say(f"warning: curves.png is not written: {error.strerror or error}")


def finished(folder: Path, step: int) -> bool:
    """Whether the run in `folder` came to its end at `step`, its last validation included; also
    true of a run without a log."""
    log = folder / "log.jsonl"
    return not log.exists() or any(end["step"] == step and end.get("reason") == "finished"
                                   for end in read_events(log, "run.end"))


def check_new(folder: Path) -> None:
    """Raise UserError when `folder` holds anything that a new run might spoil."""
    check_writable(folder)
    if folder.is_dir() and {path.name for path in folder.iterdir()} - {LOCK}:
        remedy = (", or --resume to go on with the run in it"
                  if any(folder.glob("checkpoints/step-*")) else "")
        raise UserError(f"--out {folder} is not empty; give a new folder{remedy}")


def check_writable(folder: Path) -> None:
    """Raise UserError when `folder` cannot become a run's folder; writes nothing."""
    existing = nearest_existing(folder)
    if not existing.is_dir():
        raise UserError(f"--out {folder}: {existing.absolute()} is not a folder; give another")
    if not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {existing.absolute()}; give a folder with --out")


def _new_folder(name: str) -> Path:
    """Make runs/NAME, or the first of runs/NAME-2, runs/NAME-3 … that does not exist."""
    for number in itertools.count(1):
        folder = Path("runs") / (f"{name}-{number}" if number > 1 else name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
