"""Run a program on the virtual GPU: `python -m tests.vgpu [options] script.py|-m module ...`.

The exit code is the program's; 70 if it ended with a VirtualGPUError, whose report is printed.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from . import VirtualGPUError, install
from .options import CHOICES

EXIT_CODE = 70  # EX_SOFTWARE


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if (int(major), int(minor or 0)) not in CHOICES["cc"]:
        raise ValueError(text)
    return int(major), int(minor or 0)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m tests.vgpu", description=__doc__)
    flag = argparse.BooleanOptionalAction
    add = result.add_argument
    add("--cc", type=_capability, default=(9, 0), help="compute capability, such as 12.0")
    add("--race", action=flag, default=True, help="report races in shared memory")
    add("--global-race", action=flag, default=False, help="report races in global memory")
    add("--lazy-streams", action=flag, default=False, help="run queued work as late as possible")
    add("--leak-check", action=flag, default=False, help="list unfreed memory at the end")
    add("--execute", action=flag, default=True, help="--no-execute: launches return at once")
    add("--approx", choices=CHOICES["approx"], default="nominal")
    add("--schedule", choices=CHOICES["schedule"], default="lowest")
    add("--seed", type=int, default=0, help="of --schedule random")
    add("--chunk", type=int, default=32768, help="lanes simulated together")
    add("-m", dest="module", action="store_true", help="the program is a module")
    add("program", help="a script, or a module with -m")
    add("arguments", nargs=argparse.REMAINDER)
    return result


def main(arguments: list[str] | None = None) -> None:
    """Install the device, then run the program as `python` would."""
    options = vars(parser().parse_args(arguments))
    program, module = options.pop("program"), options.pop("module")
    sys.argv = [program, *options.pop("arguments")]
    install(**options)
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
            runpy.run_path(program, run_name="__main__")
    except VirtualGPUError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
