"""Check what was read from files and requests that others may have written."""

import json
from dataclasses import fields
from typing import Any, TypeGuard

MAX_AMOUNT = 1e15  # Above, sums of tokens would lose precision.
MAX_NUMBER = 1e300  # A larger integer may overflow a float.


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value from a file is a number that can be computed with."""
    return type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]


def check_values(made_from_file: Any) -> None:
    """Raise ValueError if a dataclass that was made from a file holds values of other types than its fields.

    Integers are counts, from 0 to MAX_AMOUNT. Other numbers are finite.
    """
    for field in fields(made_from_file):
        value = getattr(made_from_file, field.name)
        if not _is_value_of(field.type, value):
            raise ValueError(f"{field.name} is {value!r:.50}")


def _is_value_of(kind: object, value: object) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value <= MAX_AMOUNT
    if kind is float:
        return is_finite_number(value)
    return type(value) is kind


def json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Anything else, such as a list or a text that was cut short, gives {}."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
