"""Run a program on the virtual GPU: `python -m tests.vgpu [options] script.py|-m module ...`.

The exit code is the program's; 70 if it ended with a VirtualGPUError, whose report is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import linecache
import os
import runpy
import sys
import traceback

from . import Options, VirtualGPUError, install
from .options import CHOICES

EXIT_CODE = 70  # EX_SOFTWARE


def _capability(text: str) -> tuple[int, int]:
    choices = {f"{major}.{minor}": (major, minor) for major, minor in CHOICES["cc"]}
    if text not in choices:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}")
    return choices[text]


def _gibibytes(text: str) -> int:
    return int(float(text) * 2**30)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog=f"python -m {__package__}",
                                     description=__doc__)
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
    add("--memory", type=_gibibytes, default=4 << 30, metavar="GIB", help="device memory")
    add("-m", dest="module", action="store_true", help="the program is a module")
    add("program", help="a script, or a module with -m")
    add("arguments", nargs=argparse.REMAINDER)
    return result


def main(arguments: list[str] | None = None) -> None:
    """Install the device, then run the program as `python` would."""
    command_line = parser()
    options = vars(command_line.parse_args(arguments))
    program, module = options.pop("program"), options.pop("module")
    sys.argv = [program, *options.pop("arguments")]
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(program)))
    try:
        Options().update(options)
    except ValueError as error:
        command_line.error(str(error))
    try:
        install(**options)
        if not (_module_exists(program) if module else os.path.exists(program)):
            command_line.error(f"there is no {'module' if module else 'file'} {program}")
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except VirtualGPUError as error:
        print(error, file=sys.stderr)
        if error.source is None and (place := _place(error)) is not None:
            print(f'  raised in File "{place[0]}", line {place[1]}\n'
                  f"    {linecache.getline(*place).strip()}", file=sys.stderr)
        sys.exit(EXIT_CODE)


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _place(error: VirtualGPUError) -> tuple[str, int] | None:
    """File and line of the program's innermost frame on the way to an error."""
    from .device import of_program

    places = [(frame.f_code.co_filename, line)
              for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((place for place in reversed(places) if of_program(place[0])), None)


if __name__ == "__main__":
    main()
