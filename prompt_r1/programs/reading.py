"""Check what was read from files and requests that others may have written."""

import functools
import json
from dataclasses import fields
from typing import Any, TypeGuard, get_origin

MAX_AMOUNT = 1e15  # Above, sums of tokens would lose precision.
MAX_NUMBER = 1e300  # A larger integer may overflow a float.


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value from a file is a number that can be computed with."""
    return type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]


def check_values(read: Any) -> None:
    """Raise ValueError if a dataclass that was made from a file holds values of other types than its fields.

    Integers are counts and steps, from -1 to MAX_AMOUNT. Other numbers are finite. A reward may be negative.
    """
    record: Any = type(read)
    for name, kind in _kinds_of(record).items():
        value = getattr(read, name)
        if kind is int:
            is_right = type(value) is int and -1 <= value <= MAX_AMOUNT
        elif kind is float:
            is_right = is_finite_number(value)
        else:
            is_right = type(value) is kind
        if not is_right:
            raise ValueError(f"{name} is {value!r:.50}")


@functools.cache  # A journal has a million lines, and the types are the same for each.
def _kinds_of(record: Any) -> dict[str, object]:
    """The type of each field of a dataclass, without the types of its items."""
    return {field.name: get_origin(field.type) or field.type for field in fields(record)}


def json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Anything else, such as a list or a text that was cut short, gives {}."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
