"""Fields of the settings: default, help line, range."""

import math
import reprlib
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_origin

from prompt_r1.errors import UsageError


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
    methods: tuple[str, ...] | None = None,
    group: str = "",
) -> Any:
    """A field of a config: its default, its line in the help, and the values it takes.

    `everyday` settings are shown by --help, the others only by --help-all, where `group` is the heading of
    this field and those that follow it. `identifies` marks a setting that defines the experiment: a resumed
    run must have the same value, and the answers of an evaluation are reused only with the same value.
    `methods` are those compared methods whose answers depend on this field (None: all, if it `identifies`).
    """
    metadata: dict[str, Any] = {"help": help, "range": range, "choices": choices, "group": group}
    metadata |= {"everyday": everyday, "identifies": identifies, "methods": methods}
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def type_name(f: Field[Any]) -> str:
    """The type of a field, as --help and error messages name it."""
    if get_origin(f.type) is tuple:
        return "NAME"
    names: dict[object, str] = {int: "N", float: "X", bool: "true|false"}
    return names.get(f.type, "TEXT")


def typed_value(f: Field[Any], value: object) -> Any:
    """The value of a field, from a file. A text is read as on the command line; others need the right type.

    A text and a list of texts stand for a tuple. Raises UsageError for a value of another type, out of range
    or not among the choices.
    """
    if get_origin(f.type) is tuple:
        parts = value if isinstance(value, list) else [value]
        typed: Any = tuple(parts) if all(isinstance(part, str) for part in parts) else None
    elif isinstance(value, str):
        typed = _from_text(f.type, value)
    elif f.type is float and type(value) is int:
        typed = value  # checked before it is converted: it may be too large for a float
    else:
        typed = value if type(value) is f.type else None
    if typed is None:
        hint = "; write it in quotes" if type_name(f) in ("NAME", "TEXT") else ""
        raise UsageError(f"{f.name} takes {type_name(f)}, not {reprlib.repr(value)}{hint}")
    _check_value(f, typed)
    return float(typed) if f.type is float else typed


def _from_text(kind: Any, text: str) -> Any:
    """The value that a text has on the command line; None if it has none."""
    if kind is bool:
        return {"true": True, "false": False}.get(text)
    try:
        return kind(text)
    except ValueError:
        return None


def check_ranges(config: Any) -> None:
    """Raise UsageError for a value outside the range or the choices of its field."""
    for f in fields(config):
        _check_value(f, getattr(config, f.name))


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
        raise UsageError(f"{name} must be below {allowed.below:g}, not {value}")
    largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST_FLOAT
    if abs(value) > largest:
        raise UsageError(f"{name} must be at most {largest:.0e}, not {reprlib.repr(value)}")


def identifying_values(config: Any) -> dict[str, Any]:
    """The values of the fields that tell one experiment from another."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.metadata["identifies"]}
