"""What both programs share: errors become one line and an exit code, and stdout may vanish."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable

from .errors import UserError, WrongKernel

MAX_LINE = 2000  # of an error, whatever text a file put into it


def run_program(name: str, action: Callable[[], int]) -> int:
    """`action()`'s exit code; 2 and one line on stderr for what the user can correct (a disk that
    is full or closed to us included), 130 for an interrupt, 0 when the reader of stdout has had
    enough (as `head` has)."""
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
        say(f"{name}: error: not enough memory ({error}); a smaller model or --batch-size may fit")
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
