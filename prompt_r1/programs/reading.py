"""Check what was read from files and requests that others may have written."""

import functools
import json
from dataclasses import fields
from types import UnionType
from typing import Any, TypeGuard, get_args, get_origin

MAX_AMOUNT = 1e15  # Above, sums of tokens would lose precision.
MAX_NUMBER = 1e300  # A larger integer may overflow a float.


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value from a file is a number that can be computed with."""
    return type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]


def check_values(read: Any) -> None:
    """Raise ValueError if a dataclass that was made from a file holds values of other types than its fields.

    Integers are counts and steps, from 0 to MAX_AMOUNT. Other numbers are finite. A reward may be negative.
    """
    record: Any = type(read)
    for name, kinds in _kinds_of(record).items():
        value = getattr(read, name)
        if not any(_is_value_of(kind, value) for kind in kinds):
            raise ValueError(f"{name} is {value!r:.50}")


def _is_value_of(kind: object, value: object) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value <= MAX_AMOUNT
    if kind is float:
        return is_finite_number(value)
    return type(value) is kind


@functools.cache  # A journal has a million lines, and the types are the same for each.
def _kinds_of(record: Any) -> dict[str, tuple[object, ...]]:
    """The types of each field of a dataclass (of `int | None`, both), without the types of their items."""
    kinds = {}
    for field in fields(record):
        if isinstance(field.type, UnionType):
            kinds[field.name] = get_args(field.type)
        else:
            kinds[field.name] = (get_origin(field.type) or field.type,)
    return kinds


def json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Anything else, such as a list or a text that was cut short, gives {}."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
