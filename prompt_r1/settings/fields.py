"""Settings as dataclass fields: their values, and the YAML files that hold them."""

import difflib
import reprlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from prompt_r1.errors import UsageError
from prompt_r1.programs.files import replace_file
from prompt_r1.settings.functions import OBJECT_PREFIX

BOOLEANS = {"true": True, "false": False}
NamesCode = Literal["never", "prefixed", "always"]  # A prefixed text begins with OBJECT_PREFIX.
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Setting:
    """A field of a config that flags and YAML files can set."""

    name: str
    kind: type[Any]  # the type of its value, or of each of its values
    takes_several: bool  # whether its value is a tuple
    default: Any
    help: str  # its line in the help
    low: float  # A number may be from `low` to `high`, both included.
    high: float
    choices: tuple[str, ...]  # the texts that it may be; (): any text
    everyday: bool  # whether --help shows it; --help-all shows all settings
    defines_experiment: bool  # whether a resumed run, and all answers of an evaluation, need the same value
    may_be_empty: bool  # whether an empty text means something
    code: NamesCode  # which of its texts name code of the user
    group: str  # its heading in --help-all
    default_text: str  # what the help says in place of the default; "": the default itself

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return "--" + self.name.replace("_", "-")

    def names_code(self, value: Any) -> bool:
        """Whether a value of the setting names code of the user, alone or in a list."""
        if self.code == "never":
            return False
        prefix = OBJECT_PREFIX if self.code == "prefixed" else ""
        # The text of --env may name several environments, separated by commas.
        texts = value if self.takes_several else value.split(",")
        return any(text and text.strip().startswith(prefix) for text in texts)

    def convert(self, value: object, name: str) -> Any:
        """Convert a value of a flag or a file, or one of several values, to the type of the setting.

        The value of a flag is always a text. In a file, a number may be a text, too: YAML reads 1e-6 as a
        text, because it has no point. Raises UsageError, which calls the setting `name`.
        """
        converted: Any = value
        with suppress(KeyError, ValueError):
            if self.kind is bool:
                converted = BOOLEANS[str(value).lower()]
            elif self.kind is not str:
                converted = self.kind(str(value))
        if type(converted) is not self.kind:
            raise UsageError(f"{name} takes {KINDS[self.kind]}, not {reprlib.repr(value)}")
        self.check(converted, name)
        return converted

    def check(self, value: Any, name: str) -> None:
        """Raise UsageError for a value that is out of range or not among the choices."""
        if self.choices and value not in self.choices:
            raise UsageError(f"{name} must be one of {', '.join(self.choices)}, not {value!r}")
        is_number = self.kind in (int, float)
        # With NaN every comparison is false, so `value < self.low` would accept it.
        if is_number and not value >= self.low:
            raise UsageError(f"{name} must be at least {self.low:g}, not {reprlib.repr(value)}")
        if is_number and value > self.high:
            raise UsageError(f"{name} must be at most {self.high:g}, not {reprlib.repr(value)}")


def setting(
    default: Any,
    help: str,
    *,
    low: float = 0,
    high: float = 1e15,  # Larger integers overflow in torch.
    choices: tuple[str, ...] = (),
    everyday: bool = False,
    defines_experiment: bool = False,
    may_be_empty: bool = False,
    code: NamesCode = "never",
    group: str = "",
    default_text: str = "",
) -> Any:
    """A field of a config with this default. The other arguments are explained in `Setting`."""
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "choices": choices,
        "everyday": everyday,
        "defines_experiment": defines_experiment,
        "may_be_empty": may_be_empty,
        "code": code,
        "group": group,
        "default_text": default_text,
    }
    return field(default=default, metadata=metadata)


everyday_setting = partial(setting, everyday=True)


def settings_of(config: Any) -> list[Setting]:
    """The settings of a config, or of its class."""
    found = []
    for declared in fields(config):
        takes_several = get_origin(declared.type) is tuple
        # The kind of `tuple[str, ...]` is str. The kind of `int | None` is int, because nobody can give None.
        arguments = get_args(declared.type)
        kind: Any = arguments[0] if arguments else declared.type
        found.append(Setting(declared.name, kind, takes_several, declared.default, **declared.metadata))
    return found


def shown(value: Any) -> str:
    """A value as one types it on a command line."""
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def experiment_values(config: Any) -> dict[str, Any]:
    """The values of the settings that define an experiment, as YAML holds them: a tuple is a list."""
    values = {}
    for entry in settings_of(config):
        if entry.defines_experiment:
            value = getattr(config, entry.name)
            values[entry.name] = list(value) if isinstance(value, tuple) else value
    return values


def check_config(config: Any) -> None:
    """Raise UsageError for a value out of range in a config that Python code has made."""
    for entry in settings_of(config):
        value = getattr(config, entry.name)
        if value is not None and not entry.takes_several:
            entry.check(value, entry.name)


def read_mapping(path: Path) -> dict[str, object]:
    """The `key: value` lines of a YAML file. Raises UsageError for anything else."""
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except Exception as error:  # PyYAML raises many kinds, for example for `!!int x` or a thousand brackets.
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} has no `key: value` lines")
    return {str(key): value for key, value in values.items()}


def read_yaml(path: Path, config_class: type[Any], *, all_known: bool = True) -> dict[str, Any]:
    """The settings of a config in a YAML file. Raises UsageError, with `all_known` also for unknown keys."""
    values = read_mapping(path)
    known = {entry.name: entry for entry in settings_of(config_class)}
    unknown = sorted(values.keys() - known)
    if unknown and all_known:
        hint = did_you_mean(unknown[0], known) or "; `train.py --help-all` lists the settings"
        raise UsageError(f"{path}: unknown key {unknown[0]!r}{hint}")
    try:
        return {name: _convert_all(known[name], values[name]) for name in known if name in values}
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _convert_all(entry: Setting, value: object) -> Any:
    """The value of a setting in a file. A setting that takes several values may have one, or a list."""
    if not entry.takes_several:
        return entry.convert(value, entry.name)
    values = value if isinstance(value, list) else [value]
    return tuple(entry.convert(text, entry.name) for text in values)


def write_yaml(config: Any, path: Path) -> None:
    """Write every setting of a config to a file, so that the file is a complete record of the settings."""
    values = {entry.name: getattr(config, entry.name) for entry in settings_of(config)}
    replace_file(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: "; did you mean X?", or "" if no known name is alike."""
    names = sorted(known)
    longer = [other for other in names if other.startswith(name)]
    alike = longer or difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return f"; did you mean {alike[0]}?" if alike else ""
