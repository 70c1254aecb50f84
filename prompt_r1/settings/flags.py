"""Command-line flags: one for each setting of a config."""

import argparse
from collections.abc import Mapping
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.programs.command_line import Parser, program_name
from prompt_r1.settings.fields import Setting, did_you_mean, settings_of, shown

Preset = Mapping[str, Any]  # values by the names of their settings
METAVARS = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


def given_values(
    config_class: type[Any], arguments: list[str], *, presets: Mapping[str, Preset] = {}
) -> dict[str, Any]:
    """The values of the flags that are given, by the names of their settings; with `presets` also --config.

    Raises UsageError for a value that its setting may not have. If a flag does not exist, the error names the
    flag that is most like it.
    """
    parser = _parser(config_class, presets, show_all="--help-all" in arguments)
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            parser.error(f"{name!r} belongs to no flag: does a text with blanks need quotes?")
        flags = [setting.flag for setting in settings_of(config_class)] + (["--config"] if presets else [])
        parser.error(f"there is no flag {name}{did_you_mean(name, flags)}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(values).items()}


def _parser(config_class: type[Any], presets: Mapping[str, Preset], *, show_all: bool) -> Parser:
    """The parser of a config: a flag for each setting, and with `presets` the flag --config.

    The help begins with the docstring of the config. A flag that is not given has no value, not even its
    default, so that it does not override a preset.
    """
    parser = Parser(
        program_name(),
        usage="%(prog)s [--FLAG VALUE ...]",
        description=config_class.__doc__,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    if presets:
        names = "|".join([*presets, "FILE"])
        parser.add_argument("--config", metavar=names, help="preset or YAML file (default: mini)")
    # First the settings of the class itself, then the settings of each base class.
    order = [name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})]
    settings = sorted(settings_of(config_class), key=lambda setting: order.index(setting.name))
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for setting in settings:
        heading = setting.group if show_all else ""
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        is_shown = show_all or setting.everyday
        help_line = _help_line(setting, presets) if is_shown else argparse.SUPPRESS
        _add_flag(groups[heading], setting, help_line)
    parser.add_argument("--help-all", action="help", help=f"show all {len(settings)} flags")
    return parser


def _add_flag(group: argparse._ActionsContainer, setting: Setting, help_line: str) -> None:
    """Add the flag of a setting, which converts each of its texts."""

    def convert(text: str) -> Any:
        if not text.strip() and not setting.may_be_empty:
            raise UsageError(
                f"{setting.flag} is empty: give a value, or leave the flag out (is a variable unset?)"
            )
        return setting.convert(text, setting.flag)

    metavar = "|".join(setting.choices) or METAVARS[setting.kind]
    form: dict[str, Any] = {"metavar": metavar}
    if setting.takes_several:
        form = {"metavar": "NAME", "nargs": "+", "action": "extend"}
    elif setting.kind is bool:  # The flag alone means true.
        form = {"metavar": metavar, "nargs": "?", "const": "true"}
    group.add_argument(setting.flag, dest=setting.name, type=convert, help=help_line, **form)


def _help_line(setting: Setting, presets: Mapping[str, Preset]) -> str:
    """The help of a setting with its values, such as "learning rate (0.0005; small: 3e-05; paper: 1e-06)".

    The first value is the default, from the first preset, which is used without --config.
    """
    if setting.default_text:
        return f"{setting.help} (default: {setting.default_text})"
    preset_values = {
        name: shown(preset.get(setting.name, setting.default)) for name, preset in presets.items()
    }
    default = next(iter(preset_values.values()), shown(setting.default))
    if not default:
        return setting.help
    others = [f"{name}: {value}" for name, value in preset_values.items() if value not in ("", default)]
    return f"{setting.help} ({'; '.join([default, *others])})"
