"""Settings as dataclass fields, and their values from flags and YAML files."""

import argparse
import reprlib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar, get_origin

from prompt_r1.cli.command_line import Parser, program_name
from prompt_r1.errors import UsageError

Config = TypeVar("Config")
LARGEST = 1e15  # of any setting; larger integers overflow those of torch
TYPE_NAMES: dict[object, str] = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


@dataclass(frozen=True)
class Range:
    """The values that a numeric setting may take."""

    above: float = -LARGEST
    at_least: float = -LARGEST
    below: float = LARGEST

    def __contains__(self, value: float) -> bool:
        return self.above < value < self.below and value >= self.at_least  # not for NaN

    def __str__(self) -> str:
        lowest = f"above {self.above:g}" if self.above > self.at_least else f"{self.at_least:g} or more"
        return f"{lowest} and below {self.below:g}"


ANY = Range()
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)
FRACTION = Range(at_least=0, below=1)  # [0, 1)
LEARNING_RATE = Range(above=0, below=1000)  # much larger ones overflow float32 inside AdamW


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
    typed: Any = value if type(value) is f.type or (f.type is float and type(value) is int) else None
    if get_origin(f.type) is tuple:
        parts = value if isinstance(value, list) else [value]
        typed = tuple(parts) if all(isinstance(part, str) for part in parts) else None
    elif isinstance(value, str):
        typed = _from_text(f.type, value)
    if typed is None:
        raise UsageError(f"{name} takes {_values_of(f)}, not {reprlib.repr(value)}")
    if isinstance(typed, int | float):
        check_number(name, typed, f.metadata["range"])
        return float(typed) if f.type is float else typed
    for text in typed if isinstance(typed, tuple) else [typed]:
        if f.metadata["choices"] and text not in f.metadata["choices"]:
            raise UsageError(f"{name} must be one of {', '.join(f.metadata['choices'])}, not {text!r}")
        if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UsageError(f"{name} contains a NUL or half a character (a lone surrogate): {text!r}")
    return typed


def check_number(name: str, value: float, allowed: Range) -> None:
    """Raise UsageError for a number outside the range. `name` is that of the setting in the message."""
    if value not in allowed:
        raise UsageError(f"{name} must be {allowed}, not {reprlib.repr(value)}")


def identifying_values(config: Any) -> dict[str, Any]:
    """The values of the fields that tell one experiment from another."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.metadata["identifies"]}


def parse_arguments(kind: type[Config], program: str, about: str, arguments: list[str]) -> Config:
    """Read a config from its flags alone. Raises UsageError for a value outside its range."""
    return kind(**given_values(kind, new_parser(program, about), arguments))


def new_parser(program: str, about: str) -> Parser:
    """A parser whose help lists flags without a usage line for each."""
    program = program_name(program)
    # Without defaults: flags that are not given do not override a preset.
    usage = f"{program} [--FLAG VALUE ...]"
    return Parser(program, usage, about, allow_abbrev=False, argument_default=argparse.SUPPRESS)


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
    for f in flags.values():
        if show_all and f.metadata["group"]:
            section = parser.add_argument_group(f.metadata["group"])
        options: dict[str, Any] = {"metavar": "|".join(f.metadata["choices"]) or _values_of(f)}
        if f.type is bool:
            options |= {"nargs": "?", "const": "true"}
        elif get_origin(f.type) is tuple:
            options = {"nargs": "+", "action": "extend", "metavar": "NAME"}
        shown = show_all or f.metadata["everyday"]
        help_line = _help_line(f, preset or {}) if shown else argparse.SUPPRESS
        section.add_argument(flag_of(f.name), dest=f.name, help=help_line, **options)
    if has_everyday:
        parser.add_argument("--help-all", action="help", help=f"show all {len(flags)} flags")
    given = vars(parser.parse_args(arguments))
    return {
        name: typed_value(flags[name], value, flag_of(name)) if name in flags else value
        for name, value in given.items()
    }


def _help_line(f: Field[Any], preset: Mapping[str, Any]) -> str:
    """The help of a field with its default, here and in the preset."""
    text = f.metadata["help"]
    defaults = [] if "default:" in text or f.default in ("", ()) else [_shown(f.default)]
    if f.name in preset:
        defaults.append(f"mini: {_shown(preset[f.name])}")
    return f"{text} ({', '.join(defaults)})" if defaults else text


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values_of(f: Field[Any]) -> str:
    """The values of a field, as --help and error messages name them."""
    return TYPE_NAMES.get(f.type, "NAME")


def _from_text(kind: Any, text: str) -> Any:
    """The value that a text stands for; None if it has none."""
    if kind is bool:
        return {"true": True, "false": False}.get(text)
    try:
        return kind(text)
    except ValueError:
        return None
