"""What both programs share: how they start and answer to signals; errors become one line and an
exit code, and stdout may vanish.

`train` and `generate` are the programs themselves. Little is imported here, so that a signal is
answered to early.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from .errors import UserError, WrongKernel

MAX_LINE = 2000  # of an error, whatever text a file put into it
SMALLER_RUN = "a smaller --batch-size or model may fit"  # where memory is short
STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
SAVE = getattr(signal, "SIGUSR1", None)  # Windows has none
SAME_REQUEST = 0.03  # seconds: `timeout` signals the program, and again the group it is in


def train() -> int:
    """andrea-train; returns its exit code."""
    if SAVE:
        signal.signal(SAVE, signal.SIG_IGN)  # before training begins there is nothing to save
    return _start("andrea-train", ".cli_train")


def generate() -> int:
    """andrea-generate; returns its exit code."""
    return _start("andrea-generate", ".cli_generate")


def _start(name: str, module: str) -> int:
    def end(number: int, frame) -> None:
        if number == signal.SIGINT:
            with contextlib.suppress(OSError):
                os.write(2, f"{name}: interrupted\n".encode())
        os._exit(128 + number)

    # At once: an exception would get lost in an import, or in a callback of Numba's compiler.
    _on_signals(end)
    code = importlib.import_module(module, __package__).main()
    _on_signals(signal.SIG_DFL)  # nothing may be raised while the interpreter shuts down
    try:
        sys.stderr.flush()
    except OSError:
        _abandon(sys.stderr)
    return code


@contextlib.contextmanager
def raising_on_signals() -> Iterator[None]:
    """For what must tidy up: a signal to stop raises; a second one ends the process at once."""
    def leave(number: int) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with _answering(leave):
        yield


class StopRequest:
    """Turns the first signal to stop into `signal`, its number, and SIGUSR1 into `save`.

    A second signal to stop ends the process at once, with the exit code of a signal.
    """

    def __init__(self):
        self.signal = 0
        self.save = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        before = signal.signal(SAVE, self._save) if SAVE else None
        try:
            with _answering(self._stop):
                yield
        finally:
            if SAVE:
                signal.signal(SAVE, before)

    def _stop(self, number: int) -> None:
        self.signal = number
        with contextlib.suppress(OSError):
            os.write(2, b"\nfinishing the step and saving; once more stops at once\n")

    def _save(self, number: int, frame) -> None:
        self.save = True


@contextlib.contextmanager
def _answering(first: Callable[[int], None]) -> Iterator[None]:
    """Let `first` answer to the first signal to stop; another one ends the process."""
    stopped_at: list[float] = []

    def answer(number: int, frame) -> None:
        stopped_at.append(time.monotonic())
        if len(stopped_at) == 1:
            first(number)
        elif stopped_at[-1] - stopped_at[0] > SAME_REQUEST:
            os._exit(128 + number)

    before = _on_signals(answer)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_signals(handler) -> dict:
    """Let `handler` answer to the signals to stop; those who did so before."""
    return {number: signal.signal(number, handler) for number in STOPS
            # ignored: as SIGINT in the background of a script, and SIGHUP under nohup
            if signal.getsignal(number) != signal.SIG_IGN}


def run_program(name: str, action: Callable[[], int], smaller: str = "") -> int:
    """`action()`'s exit code; 2 and one line on stderr for what the user can correct (a disk that
    is full or closed to us included), 130 for an interrupt, 0 when the reader of stdout has had
    enough (as `head` has). `smaller` says what needs less memory."""
    # A console that cannot show a character gets another one instead.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # A stream closed by the caller (`>&-`) is None: read it as empty, write it to nowhere.
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    try:
        code = action()
        sys.stdout.flush()
        return code
    except UserError as error:
        text = "\\n".join(str(error).splitlines())
        say(f"{name}: error: {text[:MAX_LINE]}")
        return 2
    except WrongKernel as error:
        say(f"{name}: error: {error}")
        return 1
    except MemoryError as error:
        remedy = f"; {smaller}" if smaller else ""
        say(f"{name}: error: not enough memory ({error}){remedy}")
        return 2
    except BrokenPipeError:
        abandon_stdout()
        return 0
    except OSError as error:
        abandon_stdout()
        say(f"{name}: error: {error.filename or 'output'}: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        return 130


def say(text: str) -> None:
    """One line on stderr; a reader that is gone, or a full disk, does not end the program."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def abandon_stdout() -> None:
    """Write no more to stdout, for which nobody is there."""
    _abandon(sys.stdout)


def _abandon(stream) -> None:
    """Drop what is still buffered: the interpreter would try to write it at exit, and complain."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: not backed by a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
