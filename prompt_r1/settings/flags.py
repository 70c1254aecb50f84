"""Command-line flags: one for each setting of a config."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import Field
from typing import Any, TypeVar, get_origin

from prompt_r1.errors import UsageError
from prompt_r1.programs.command_line import Parser, program_name
from prompt_r1.settings.fields import about, checked_value, did_you_mean, flag_of, settings_of, type_of

Config = TypeVar("Config")
Presets = Mapping[str, Mapping[str, Any]]  # name → values by the names of their settings
METAVARS: dict[object, str] = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


def parse_arguments(kind: type[Config], arguments: list[str]) -> Config:
    """Read a config from its flags alone. Raises UsageError for a value outside its range."""
    return kind(**given_values(kind, arguments, presets={}))


def given_values(kind: type[Any], arguments: list[str], *, presets: Presets) -> dict[str, Any]:
    """The checked values of the flags that are given; with `presets` also the value of --config.

    If a flag does not exist, the error names the flag that is most like it.
    """
    parser = _parser(kind, presets, show_all="--help-all" in arguments)
    values, unknown = parser.parse_known_args(arguments)
    given = vars(values)
    flags = {flag_of(f.name) for f in settings_of(kind)}
    if presets:
        flags.add("--config")
    for word in unknown:
        name = word.partition("=")[0]
        if name.startswith("--"):
            parser.error(f"there is no flag {name}{did_you_mean(name, flags)}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for f in settings_of(kind):
        if f.name in given:
            _check_not_empty(f, given[f.name])
            given[f.name] = checked_value(f, given[f.name], flag_of(f.name))
    return given


def _check_not_empty(f: Field[Any], value: object) -> None:
    """Raise UsageError for a blank text, which is most often a variable of the shell that is not set."""
    texts = value if isinstance(value, list) else [value]
    if not all(str(text).strip() for text in texts) and not about(f).may_be_empty:
        raise UsageError(
            f"{flag_of(f.name)} is empty: give a value, or leave the flag out (is a variable unset?)"
        )


def _parser(kind: type[Any], presets: Presets, *, show_all: bool) -> Parser:
    """The parser of a config: a flag for each setting, and with `presets` the flag --config.

    The help begins with the docstring of the config. A flag that is not given has no value, not even its
    default, so that it does not override a preset.
    """
    parser = Parser(
        program_name(),
        usage="%(prog)s [--FLAG VALUE ...]",
        description=kind.__doc__,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    # argparse knows -1 as a number, but takes -1e-6 for a flag.
    parser._negative_number_matcher = re.compile(r"-(\d|\.\d|inf)")
    if presets:
        names = "|".join([*presets, "FILE"])
        parser.add_argument("--config", metavar=names, help="preset or YAML file (default: mini)")
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for f in _own_first(kind):
        heading = about(f).group if show_all else ""
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        is_shown = show_all or about(f).everyday
        help_line = _help_line(f, presets) if is_shown else argparse.SUPPRESS
        groups[heading].add_argument(flag_of(f.name), dest=f.name, help=help_line, **_form(f))
    parser.add_argument("--help-all", action="help", help=f"show all {len(settings_of(kind))} flags")
    return parser


def _own_first(kind: type[Any]) -> list[Field[Any]]:
    """The settings of a config: first its own settings, then the settings of each base class."""
    names = [name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})]
    return sorted(settings_of(kind), key=lambda f: names.index(f.name))


def _form(f: Field[Any]) -> dict[str, Any]:
    """How a flag takes its value, as arguments of `add_argument`."""
    kind = type_of(f)
    if get_origin(kind) is tuple:
        return {"nargs": "+", "action": "extend", "metavar": "NAME"}
    if kind is bool:
        return {"nargs": "?", "const": "true", "metavar": METAVARS[bool]}
    return {"metavar": "|".join(about(f).choices) or METAVARS[kind]}


def _help_line(f: Field[Any], presets: Presets) -> str:
    """The help of a setting with its values, such as "learning rate (0.0005; small: 3e-05; paper: 1e-06)".

    The first value is the default, from the first preset, which is used without --config.
    """
    text = about(f).help
    default_text = about(f).default_text
    if default_text:
        return f"{text} (default: {default_text})"
    preset_values = {name: _shown(preset.get(f.name, f.default)) for name, preset in presets.items()}
    default = next(iter(preset_values.values()), _shown(f.default))
    if not default:
        return text
    others = [f"{name}: {value}" for name, value in preset_values.items() if value not in ("", default)]
    return f"{text} ({'; '.join([default, *others])})"


def _shown(value: Any) -> str:
    """A value as one types it on a command line."""
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
