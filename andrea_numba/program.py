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
from collections.abc import Callable, Iterator

from .errors import UserError, WrongKernel

MAX_LINE = 2000  # of an error, whatever text a file put into it
SMALLER_RUN = "a smaller --batch-size or model may fit"  # where memory is short


def train() -> int:
    """andrea-train; returns its exit code."""
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
    return code


@contextlib.contextmanager
def raising_on_signals() -> Iterator[None]:
    """For what must tidy up: SIGINT and SIGTERM raise; a second one ends the process at once."""
    def leave(number: int, frame) -> None:
        _on_signals(signal.SIG_DFL)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = _on_signals(leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_signals(handler) -> dict:
    """Let `handler` answer to SIGINT and SIGTERM; those who did so before."""
    return {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) != signal.SIG_IGN}  # as in the background of a script


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
        text = str(error).replace("\n", "\\n")
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
    """Drop what is still buffered: the interpreter would try to write it at exit, and complain."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: not backed by a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
