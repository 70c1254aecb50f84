"""Settings as dataclass fields, and their values from flags and YAML files."""

import argparse
import math
import reprlib
import textwrap
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar, get_origin

from prompt_r1.cli.command_line import Parser, program_name
from prompt_r1.errors import UsageError

Config = TypeVar("Config")


@dataclass(frozen=True)
class Range:
    """The values that a numeric setting may take. None: no bound."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None


ANY = Range()
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)
FRACTION = Range(at_least=0, below=1)  # [0, 1)
LEARNING_RATE = Range(above=0, below=1000)  # much larger ones overflow float32 inside AdamW
LARGEST_INTEGER, LARGEST_FLOAT = 10**15, 1e30  # of any setting: the 64 bits of torch, and its float32


def setting(
    default: Any,
    help: str,
    *,
    range: Range = ANY,
    choices: tuple[str, ...] = (),
    everyday: bool = False,
    identifies: bool = False,
    group: str = "",
) -> Any:
    """A field of a config: its default, its line in the help, and the values it takes.

    `everyday` settings are shown by --help, the others only by --help-all, where `group` is the heading of
    this field and those that follow it. `identifies` marks a setting that defines the experiment: a resumed
    run must have the same value, and so must all answers in the folder of an evaluation.
    """
    metadata: dict[str, Any] = {"help": help, "range": range, "choices": choices, "group": group}
    metadata |= {"everyday": everyday, "identifies": identifies}
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def typed_value(f: Field[Any], value: object, name: str) -> Any:
    """The value of a field from a flag or a file. A text is converted; anything else needs the right type.

    A text and a list of texts stand for a tuple. Raises UsageError, which calls the setting `name`, for a
    value of another type, out of range or not among the choices.
    """
    typed: Any = value if type(value) is f.type else None
    if get_origin(f.type) is tuple:
        parts = value if isinstance(value, list) else [value]
        typed = tuple(parts) if all(isinstance(part, str) for part in parts) else None
    elif isinstance(value, str):
        typed = _from_text(f.type, value)
    elif f.type is float and type(value) is int:
        typed = value  # checked before it is converted: it may be too large for a float
    if typed is None:
        hint = "; write it in quotes" if _type_name(f) in ("NAME", "TEXT") else ""
        raise UsageError(f"{name} takes {_type_name(f)}, not {reprlib.repr(value)}{hint}")
    _check_value(f, typed)
    return float(typed) if f.type is float else typed


def check_ranges(config: Any) -> None:
    """Raise UsageError for a value outside the range or the choices of its field."""
    for f in fields(config):
        _check_value(f, getattr(config, f.name))


def check_number(name: str, value: float, allowed: Range) -> None:
    """Raise UsageError for a number outside the range. `name` is that of the setting in the message."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} must be a finite number, not {value}")
    if allowed.above is not None and not value > allowed.above:
        raise UsageError(f"{name} must be above {allowed.above:g}, not {value}")
    if allowed.at_least is not None and not value >= allowed.at_least:
        none = " (none)" if allowed.at_least == 0 else ""
        raise UsageError(f"{name} must be {allowed.at_least:g}{none} or more, not {value}")
    if allowed.below is not None and not value < allowed.below:
        raise UsageError(f"{name} must be below {allowed.below:g}, not {reprlib.repr(value)}")
    largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST_FLOAT
    if abs(value) > largest:
        raise UsageError(f"{name} must be at most {largest:.0e}, not {reprlib.repr(value)}")


def identifying_values(config: Any) -> dict[str, Any]:
    """The values of the fields that tell one experiment from another."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.metadata["identifies"]}


def parse_arguments(kind: type[Config], program: str, about: str, arguments: list[str]) -> Config:
    """Read a config from its flags alone. Raises UsageError for a value outside its range."""
    return kind(**given_values(kind, new_parser(program, about), arguments))


def new_parser(program: str, about: str) -> Parser:
    """A parser whose help lists flags without a usage line for each."""
    program = program_name(program)
    return Parser(
        program,
        f"{program} [--FLAG VALUE ...]",
        about,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # so that flags which are not given do not override a preset
        formatter_class=lambda prog: _HelpFormatter(prog, max_help_position=24, width=80),
    )


def given_values(
    kind: type[Any], parser: Parser, arguments: list[str], *, preset: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The checked values of the flags that are given, and those of the parser's own arguments.

    There is a flag for each field; --help-all shows all of them by groups, --help only the everyday ones. A
    config without everyday fields has only --help, which shows every flag. The help names the values of
    `preset` beside the defaults. Raises UsageError.
    """
    # A config's own fields first, then those that it shares with others.
    order = [name for base in kind.__mro__[:-1] for name in base.__annotations__]
    flags = {f.name: f for f in sorted(fields(kind), key=lambda f: order.index(f.name))}
    has_everyday = any(f.metadata["everyday"] for f in flags.values())
    show_all = not has_everyday or "--help-all" in arguments
    section: argparse._ActionsContainer = parser
    sections: dict[str, argparse._ActionsContainer] = {}
    for f in flags.values():
        if show_all and (group := f.metadata["group"]):
            section = sections.get(group) or parser.add_argument_group(group)
            sections[group] = section
        shown = show_all or f.metadata["everyday"]
        values = "|".join(f.metadata["choices"]) or _type_name(f)
        options: dict[str, Any] = {"dest": f.name, "metavar": values}
        if f.type is bool and not f.default:
            options = {"dest": f.name, "action": "store_true"}
        elif get_origin(f.type) is tuple:
            options |= {"nargs": "+", "action": "extend", "metavar": "NAME"}
        help_line = _help_line(f, preset or {}) if shown else argparse.SUPPRESS
        section.add_argument(flag_of(f.name), help=help_line, **options)
    if has_everyday:
        parser.add_argument("--help-all", action="help", help=f"show all {len(flags)} flags")
    given = vars(parser.parse_args(arguments))
    return {
        name: typed_value(flags[name], value, flag_of(name)) if name in flags else value
        for name, value in given.items()
    }


class _HelpFormatter(argparse.HelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Shorten "NAME [NAME ...]" to "NAME ..."."""
        if action.nargs == "+":
            return f"{action.metavar} ..."
        return super()._format_args(action, default_metavar)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Break lines between words only: names such as prompt-r1 and --env-price stay whole."""
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _help_line(f: Field[Any], preset: Mapping[str, Any]) -> str:
    """The help of a field with its default, here and in the preset."""
    help_line, choices = f.metadata["help"], f.metadata["choices"]
    if get_origin(f.type) is tuple and not all(choice in help_line for choice in choices):
        help_line += f": {', '.join(choices)}"
    if f.type is bool and not f.default:
        return help_line
    defaults = [] if "default:" in help_line else [_shown(f.default)]
    if f.name in preset:
        defaults.append(f"mini: {_shown(preset[f.name])}")
    shown = ", ".join(filter(None, defaults))
    return f"{help_line} ({shown})" if shown else help_line


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return " ".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _type_name(f: Field[Any]) -> str:
    """The type of a field, as --help and error messages name it."""
    if get_origin(f.type) is tuple:
        return "NAME"
    names: dict[object, str] = {int: "N", float: "X", bool: "true|false"}
    return names.get(f.type, "TEXT")


def _from_text(kind: Any, text: str) -> Any:
    """The value that a text stands for; None if it has none."""
    if kind is bool:
        return {"true": True, "false": False}.get(text)
    try:
        return kind(text)
    except ValueError:
        return None


def _check_value(f: Field[Any], value: object) -> None:
    flag, choices = flag_of(f.name), f.metadata["choices"]
    if isinstance(value, int | float):
        check_number(flag, value, f.metadata["range"])
    for text in value if isinstance(value, tuple) else [value]:
        if not isinstance(text, str):
            continue
        if choices and text not in choices:
            raise UsageError(f"{flag} must be one of {', '.join(choices)}, not {text!r}")
        if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UsageError(f"{flag} contains a NUL or half a character (a lone surrogate): {text!r}")
