"""From dataclasses to a command line: flags, `--help`, TOML files and `--print-config`.

Order of precedence, weakest first: field defaults, `--preset`, `--config FILE`, flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from .config import LARGEST, sections
from .errors import UserError

MAX_TOML_BYTES = 1 << 20


class Parser(argparse.ArgumentParser):
    """An argparse parser that never abbreviates and raises UserError instead of exiting."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                         **kwargs)

    def error(self, message: str):
        if message.endswith("expected one argument"):
            message += " (a value that begins with a dash is given as --option=VALUE)"
        raise UserError(f"{message}; see {self.prog} --help")

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        namespace, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            raise UserError(self._unknown(unknown[0]))
        return namespace

    def _unknown(self, given: str) -> str:
        if not given.startswith("-"):
            return f"unexpected argument {given}; see {self.prog} --help"
        name = given.split("=")[0]
        flags = [flag for action in self._actions for flag in action.option_strings]
        return f"unknown option {name}{_nearest(name, flags)}; see {self.prog} --help"


def _nearest(given: str, names: Sequence[str]) -> str:
    def likeness(name: str) -> float:
        # To the whole name, or to its beginning: --bach is meant to be --batch-size.
        starts = (name, name[:len(given) + 1])
        return max(difflib.SequenceMatcher(None, given, start).ratio() for start in starts)

    best = max(names, key=likeness)
    return f" (did you mean {best}?)" if likeness(best) > 0.6 else ""


def _element_type(hint: Any) -> type:
    """int for int, str for `str | None`, str for list[str]."""
    arguments = [t for t in get_args(hint) if t is not type(None)]
    return arguments[0] if arguments else hint


def add_options(parser: Parser, config: Any, positional: str) -> None:
    """One flag per field of every section of `config`; `positional` is given without a flag."""
    several = any(isinstance(getattr(p, positional, None), list) for p in sections(config).values())
    parser.usage = f"%(prog)s [{positional.upper()}{' ...' if several else ''}] [options]"
    for part in sections(config).values():
        group = parser.add_argument_group((type(part).__doc__ or "").rstrip("."))
        hints = get_type_hints(type(part))
        for field in dataclasses.fields(part):
            default = getattr(part, field.name)
            text = field.metadata["help"].replace("%", "%%")
            if default not in (None, "", [], False):
                shown = " ".join(default) if isinstance(default, list) else default
                text += f" (default: {shown})"
            common = {"default": argparse.SUPPRESS, "help": text}
            flag = "--" + field.name.replace("_", "-")
            kind = hints[field.name]
            if field.name == positional:
                many = isinstance(default, list)
                group.add_argument(field.name, nargs="*" if many else "?",
                                   metavar=positional.upper(), **common)
            elif kind is bool:
                action = argparse.BooleanOptionalAction if default else "store_true"
                group.add_argument(flag, action=action, **common)
            elif isinstance(default, list):
                group.add_argument(flag, action="append", metavar="TEXT", **common)
            else:
                choices = field.metadata.get("choices")
                metavar = "{" + ",".join(choices) + "}" if choices else None
                group.add_argument(flag, type=_element_type(kind), choices=choices,
                                   metavar=metavar or _element_type(kind).__name__.upper(),
                                   **common)


def apply(config: Any, values: dict[str, dict[str, Any]], origin: str) -> None:
    """Set fields of a sectioned config from {section: {field: value}}, checking names and types."""
    parts = sections(config)
    for section, fields in values.items():
        owner = next((n for n, p in parts.items() if section in get_type_hints(type(p))), None)
        if section not in parts and owner:
            raise UserError(f"{origin}: {section} belongs in the section [{owner}]")
        if section in parts and not isinstance(fields, dict):
            raise UserError(f"{origin}: {section} is a section: write [{section}], its keys below")
        if section not in parts:
            raise UserError(f"{origin}: unknown section [{section}]{_nearest(section, list(parts))}"
                            f"; sections are {', '.join(parts)}")
        part = parts[section]
        hints = get_type_hints(type(part))
        for name, value in fields.items():
            if name not in hints:
                raise UserError(f"{origin}: unknown key {name} in [{section}]"
                                f"{_nearest(name, list(hints))}")
            setattr(part, name, _checked(value, hints[name], f"{origin}: {section}.{name}"))


def _checked(value: Any, hint: Any, where: str) -> Any:
    kind = _element_type(hint)
    if any(isinstance(v, str) and "\0" in v for v in (value if type(value) is list else [value])):
        raise UserError(f"{where} is {value!r:.100}; expected text without U+0000")
    if kind is float and type(value) is int and abs(value) <= LARGEST:
        return float(value)
    if get_origin(hint) is list:
        if isinstance(value, list) and all(type(v) is kind for v in value):
            return list(value)
        raise UserError(f"{where} is {value!r:.100}; expected a list such as [{value!r:.100}]")
    if type(value) is not kind:
        raise UserError(f"{where} is {value!r:.100}; expected {getattr(kind, '__name__', kind)}")
    return value


def apply_flags(config: Any, namespace: argparse.Namespace) -> None:
    """Set every field that was given on the command line (options without defaults)."""
    given = vars(namespace)
    for part in sections(config).values():
        for field in dataclasses.fields(part):
            # An empty positional list means that it was not given.
            if field.name in given and given[field.name] != []:
                setattr(part, field.name, given[field.name])


def read_toml(path: str) -> dict[str, Any]:
    """The contents of a TOML file, or a UserError naming the file and the place."""
    file = Path(path)
    try:
        if not stat.S_ISREG(file.stat().st_mode) or file.stat().st_size > MAX_TOML_BYTES:
            raise UserError(f"--config {file.absolute()}: not a TOML file of settings")
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"--config {file.absolute()}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of digits, of depth
        raise UserError(f"--config {path}: not a TOML file: {error}") from None


def to_toml(config: Any) -> str:
    """The config as TOML with each field's help as a comment; `read_toml` reads it back."""
    lines = []
    for name, part in sections(config).items():
        lines.append(f"[{name}]")
        for field in dataclasses.fields(part):
            # JSON and TOML agree on numbers, booleans, flat lists, and strings but for DEL.
            value = json.dumps(getattr(part, field.name), ensure_ascii=False)
            value = value.replace("\x7f", "\\u007f")
            if any("\ud800" <= c <= "\udfff" for c in value):  # bytes the shell gave
                raise UserError(f"{name}.{field.name} is {value:.100}, which is not UTF-8 and has "
                                "no form in TOML; rename the file")
            lines.append(f"{field.name} = {value}  # {field.metadata['help']}")
        lines.append("")
    return "\n".join(lines)


def to_dict(config: Any) -> dict[str, dict[str, Any]]:
    """{section: {field: value}} for JSON; `apply` reads it back."""
    return {name: dataclasses.asdict(part) for name, part in sections(config).items()}
