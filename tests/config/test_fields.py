"""The declared fields and their ranges."""

import pytest

from prompt_r1.config.fields import Range, check_number
from prompt_r1.errors import UsageError


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (Range(above=0), (1e-9, 1e14), (0, -1, 10**15, 1e30, float("inf"), float("nan"))),
        (Range(at_least=2), (2,), (1, 1.999)),
        (Range(at_least=0, below=1), (0, 0.999), (1, -1e-9)),
        (Range(), (-1e14,), (-(10**15), -1e30, float("-inf"))),
    ],
)
def test_the_bounds_of_a_range_are_meant_as_they_are_called(allowed, inside, outside):
    for value in inside:
        check_number("--x", value, allowed)
    for value in outside:
        with pytest.raises(UsageError, match="--x must be "):
            check_number("--x", value, allowed)
