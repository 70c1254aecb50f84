"""Settings as dataclass fields, and their values from flags and YAML files."""

import argparse
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml

from prompt_r1.errors import UsageError
from prompt_r1.programs.command_line import Parser, program_name

Config = TypeVar("Config")
LARGEST = 1e15  # of any setting; larger integers overflow those of torch
BOOLEANS = {"true": True, "false": False}
TYPE_NAMES: dict[object, str] = {int: "N", float: "X", bool: "true|false", str: "TEXT"}
# PyYAML raises more than its own errors: `!!int x`, `!!bool x` and `!!int ""`, or thousands of brackets.
NOT_YAML = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


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
NOT_NEGATIVE = Range(at_least=0)  # numbers, if nothing else is said
LEARNING_RATE = Range(above=0, below=1000)  # much larger ones overflow float32 inside AdamW


def setting(
    default: Any,
    help: str,
    allowed: Range | tuple[str, ...] = NOT_NEGATIVE,
    *,
    everyday: bool = False,
    identifies: bool = False,
    group: str = "",
) -> Any:
    """A field of a config: its default, its line in the help, and the numbers or the texts that it takes.

    `everyday` settings are shown by --help, the others only by --help-all, under the heading `group`.
    `identifies` marks a setting that defines the experiment: a resumed run must have the same value, and so
    must all answers in the folder of an evaluation.
    """
    choices = allowed if isinstance(allowed, tuple) else ()
    shown = {"help": help, "group": group, "everyday": everyday, "choices": choices}
    return field(default=default, metadata={**shown, "allowed": allowed, "identifies": identifies})


everyday = partial(setting, everyday=True)


def flag_of(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def settings_of(config: Any) -> list[Field[Any]]:
    """The fields of a config, or of its class, that were made by `setting`."""
    return [f for f in fields(config) if f.metadata]


def identifying_values(config: Any) -> dict[str, Any]:
    """The values of the settings that tell one experiment from another."""
    return {f.name: getattr(config, f.name) for f in settings_of(config) if f.metadata["identifies"]}


def parse_arguments(kind: type[Config], arguments: list[str]) -> Config:
    """Read a config from its flags alone. Raises UsageError for a value outside its range."""
    return kind(**given_values(kind, arguments, {}))


def given_values(
    kind: type[Any], arguments: list[str], presets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The checked values of the flags that are given; with `presets` also that of --config.

    There is a flag for each field; --help-all shows all of them by groups, --help only the everyday ones. The
    help begins with the docstring of the config, and names the values of the preset `mini` beside the
    defaults. Raises UsageError.
    """
    name, usage = program_name(), "%(prog)s [--FLAG VALUE ...]"
    # Without defaults: flags that are not given do not override a preset.
    parser = Parser(name, usage, kind.__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    if presets:
        names = "|".join([*presets, "FILE"])
        parser.add_argument("--config", default="", metavar=names, help="preset or YAML file (mini)")
    # A config's own fields first, then those that it shares with others.
    order = [name for base in kind.__mro__[:-1] for name in base.__annotations__]
    flags = {f.name: f for f in sorted(settings_of(kind), key=lambda f: order.index(f.name))}
    show_all = "--help-all" in arguments
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for f in flags.values():
        group = f.metadata["group"] if show_all else ""
        section = groups[group] = groups.get(group) or parser.add_argument_group(group)
        options: dict[str, Any] = {"metavar": "|".join(f.metadata["choices"]) or TYPE_NAMES.get(f.type)}
        if f.type is bool:
            options |= {"nargs": "?", "const": "true"}
        elif get_origin(f.type) is tuple:
            options = {"nargs": "+", "action": "extend", "metavar": "NAME"}
        shown = show_all or f.metadata["everyday"]
        help_line = _help_line(f, presets.get("mini", {})) if shown else argparse.SUPPRESS
        section.add_argument(flag_of(f.name), dest=f.name, help=help_line, **options)
    parser.add_argument("--help-all", action="help", help=f"show all {len(flags)} flags")
    given = vars(parser.parse_args(arguments))
    typed = {name: typed_value(f, given[name], flag_of(name)) for name, f in flags.items() if name in given}
    return given | typed  # --config has no field


def typed_value(f: Field[Any], value: object, name: str) -> Any:
    """The value of a field from a flag or a file. A text is converted; anything else needs the right type.

    A text and a list of texts stand for a tuple. Raises UsageError, which calls the setting `name`, for a
    value of another type, out of range or not among the choices.
    """
    kind: Any = f.type
    typed: Any = value if type(value) is kind or (kind is float and type(value) is int) else None
    if get_origin(kind) is tuple:
        parts = value if isinstance(value, list) else [value]
        typed = tuple(parts) if all(isinstance(part, str) for part in parts) else None
    elif isinstance(value, str):
        with suppress(ValueError):
            typed = BOOLEANS.get(value) if kind is bool else kind(value)
    if typed is None:
        raise UsageError(f"{name} takes {TYPE_NAMES.get(kind, 'NAME')}, not {reprlib.repr(value)}")
    if isinstance(typed, int | float):
        check_number(name, typed, f.metadata["allowed"])
        return kind(typed)
    choices = f.metadata["choices"]
    for text in typed if isinstance(typed, tuple) else [typed]:
        if choices and text not in choices:
            raise UsageError(f"{name} must be one of {', '.join(choices)}, not {text!r}")
        if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UsageError(f"{name} contains a NUL or half a character (a lone surrogate): {text!r}")
    return typed


def check_number(name: str, value: float, allowed: Range) -> None:
    """Raise UsageError for a number outside the range. `name` is that of the setting in the message."""
    if value not in allowed:
        raise UsageError(f"{name} must be {allowed}, not {reprlib.repr(value)}")


def read_mapping(path: Path) -> dict[str, object]:
    """The `key: value` lines of a YAML file. Raises UsageError for anything else."""
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except NOT_YAML as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} has no `key: value` lines")
    return {str(key): value for key, value in values.items()}


def read_yaml(path: Path, kind: type[Any], *, all_known: bool = True) -> dict[str, Any]:
    """Read the fields of a config in a YAML file. Raises UsageError; with `all_known` also for other keys."""
    values, known = read_mapping(path), {f.name: f for f in settings_of(kind)}
    unknown = sorted(values.keys() - known)
    if unknown and all_known:
        raise UsageError(f"{path}: unknown key {unknown[0]!r}; `train.py --help-all` lists the fields")
    try:
        return {name: typed_value(f, values[name], name) for name, f in known.items() if name in values}
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def write_yaml(config: Any, path: Path) -> None:
    """Write every setting of a config, so that the file alone documents the run."""
    values = {f.name: getattr(config, f.name) for f in settings_of(config)}
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), "utf-8")


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
