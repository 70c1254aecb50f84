"""Settings as dataclass fields: their values, and the YAML files that hold them."""

import difflib
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml

from prompt_r1.errors import UsageError
from prompt_r1.programs.files import replace_file

BOOLEANS = {"true": True, "false": False}
KINDS: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Range:
    """The values that a numeric setting may take: from `low` to `high`, both included."""

    low: float = 0
    high: float = 1e15  # Larger integers overflow in torch.

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high  # False for NaN


NOT_NEGATIVE = Range()  # A setting that names no range has this one.
AT_LEAST_1 = Range(low=1)
ABOVE_0 = Range(low=1e-9)
SEED = Range(low=-1e15)
THREADS = Range(high=1024)  # With many more, libraries crash.
LEARNING_RATE = Range(low=1e-12, high=1000)  # Much larger rates overflow float32 inside AdamW.


@dataclass(frozen=True)
class Setting:
    """A field of a config that flags and YAML files can set."""

    name: str
    type: Any  # the type of its values. A setting of `int | None` takes integers, and None is its default.
    default: Any
    help: str  # its line in the help
    range: Range  # the range of a number
    choices: tuple[str, ...] = ()  # the texts that it may be; (): any text
    everyday: bool = False  # whether --help shows it; --help-all shows all settings
    # Whether a resumed run, and all answers of an evaluation, need the same value.
    defines_experiment: bool = False
    may_be_empty: bool = False  # whether an empty text means something
    # A text that begins with this prefix names code of the user. "": every text does; None: no text does.
    code_prefix: str | None = None
    group: str = ""  # its heading in --help-all
    default_text: str = ""  # what the help says in place of the default; "": the default itself

    @property
    def takes_several(self) -> bool:
        """Whether it takes a list of texts."""
        return get_origin(self.type) is tuple

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return flag_of(self.name)

    def names_code(self, value: Any) -> bool:
        """Whether a value of the setting names code of the user, alone or in a list."""
        if self.code_prefix is None:
            return False
        texts = value if self.takes_several else value.split(",")
        return any(text and text.strip().startswith(self.code_prefix) for text in texts)

    def checked(self, value: object, name: str) -> Any:
        """The value from a flag or a file. A text is converted to the type of the setting.

        Raises UsageError if the value has another type, is out of range or is not among the choices. `name`
        is what the error calls the setting.
        """
        if self.takes_several:
            texts = value if isinstance(value, list) else [value]
            return tuple(self._checked_value(str, text, name) for text in texts)
        return self._checked_value(self.type, value, name)

    def _checked_value(self, kind: Any, value: object, name: str) -> Any:
        """A single value, converted to `kind`."""
        try:
            converted = _converted(kind, value)
        except (ValueError, KeyError):
            raise UsageError(f"{name} takes {KINDS[kind]}, not {reprlib.repr(value)}") from None
        if isinstance(converted, str):
            if self.choices and converted not in self.choices:
                raise UsageError(f"{name} must be one of {', '.join(self.choices)}, not {converted!r}")
            return converted
        check_number(name, converted, self.range)
        return converted


def _converted(kind: Any, value: object) -> Any:
    """Convert the value of a flag or a file to `kind`. Raises ValueError or KeyError.

    The value of a flag is always a text. In a file, a number may be a text, too: YAML reads 1e-6 as a text,
    because it has no point.
    """
    if kind is bool:
        return BOOLEANS[str(value).lower()]
    if kind is str and not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__}")
    return kind(str(value))


def setting(default: Any, help: str, range: Range = NOT_NEGATIVE, **others: Any) -> Any:
    """A field of a config with this default. The other arguments are those of `Setting`."""
    return field(default=default, metadata={"help": help, "range": range, **others})


everyday_setting = partial(setting, everyday=True)


def settings_of(config: Any) -> list[Setting]:
    """The settings of a config, or of its class."""
    return [Setting(f.name, _type_of(f.type), f.default, **f.metadata) for f in fields(config)]


def _type_of(annotation: Any) -> Any:
    """The type of a setting's values: `int` for `int | None`."""
    return get_args(annotation)[0] if isinstance(annotation, UnionType) else annotation


def flag_of(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


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


def check_ranges(config: Any) -> None:
    """Raise UsageError for a number in a config that is out of range. Flags and files are checked as read."""
    for entry in settings_of(config):
        value = getattr(config, entry.name)
        if entry.type in (int, float) and value is not None:
            check_number(entry.name, value, entry.range)


def check_number(name: str, value: float, allowed: Range) -> None:
    """Raise UsageError for a number outside the range. `name` is what the message calls the setting."""
    if value not in allowed:
        limits = f"from {allowed.low:g} to {allowed.high:g}"
        raise UsageError(f"{name} must be {limits}, not {reprlib.repr(value)}")


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
        return {name: known[name].checked(values[name], name) for name in known if name in values}
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


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
