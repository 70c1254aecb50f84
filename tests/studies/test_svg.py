"""Plots: where points, intervals, ticks, legends and names are drawn."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.studies import svg as drawing
from prompt_r1.studies.svg import COLOURS, Plot, Point, Series, rate_text, svg

NAMESPACE = "{http://www.w3.org/2000/svg}"
LEFT, RIGHT, FLOOR, CEILING = 66, 540, 334, 62  # pixels of x 0, the last x, y 0 and y 1


def elements(plot: Plot, tag: str) -> list[dict[str, str]]:
    """The attributes of all elements of a drawing with this tag, and their text."""
    found = ElementTree.fromstring(svg(plot)).iter(NAMESPACE + tag)
    return [{**one.attrib, "text": one.text or ""} for one in found]


def numbers(one: dict[str, str], *names: str) -> tuple[float, ...]:
    return tuple(float(one[name]) for name in names)


POINTS = [Point(0, 0.0, -0.1, 0.25, 50), Point(5, 0.5, 0.25, 0.75, 40), Point(10, 1.0, 0.75, 1.2, 30)]
CURVES = Plot(
    "Title", "step", "EM", [Series("one", POINTS), Series("two", POINTS, dashed=True, joined=False)]
)


def test_values_are_drawn_between_the_edges_of_the_frame():
    """y 0 and 1 are the lowest and highest grid line; wider intervals are cut; two series stand apart."""
    dots, boxes = elements(CURVES, "circle"), elements(CURVES, "rect")
    middle = (LEFT + RIGHT) / 2, (FLOOR + CEILING) / 2
    expected = [(LEFT, FLOOR), middle, (RIGHT, CEILING)]
    assert [numbers(dot, "cx", "cy") for dot in dots] == [(x - 2, y) for x, y in expected]
    assert [numbers(box, "x", "y") for box in boxes[:3]] == [(x + 2 - 3, y - 3) for x, y in expected]
    bars = [one for one in elements(CURVES, "line") if one.get("opacity") == ".7"]
    quarter = (FLOOR - CEILING) / 4
    ends = [(FLOOR - quarter, FLOOR), (CEILING + quarter, FLOOR - quarter), (CEILING, CEILING + quarter)]
    assert [numbers(bar, "y1", "y2") for bar in bars] == ends * 2
    assert [bar["x1"] for bar in bars[:3]] == [dot["cx"] for dot in dots] and bars[0]["x1"] == bars[0]["x2"]
    assert [bar["stroke"] for bar in bars] == [COLOURS[0]] * 3 + [COLOURS[1]] * 3


def test_a_legend_shows_the_line_of_each_series_or_the_sign_of_its_points():
    [entry] = [one for one in elements(CURVES, "line") if one.get("stroke-width") == "2.2"]
    [curve] = elements(CURVES, "polyline")
    assert "stroke-dasharray" not in curve and "stroke-dasharray" not in entry
    assert len(elements(CURVES, "rect")) == 3 + 1, "the points of the series without a line, and its sign"
    dashed = Plot("", "", "", [Series("d", POINTS, dashed=True)])
    [entry] = [one for one in elements(dashed, "line") if one.get("stroke-width") == "2.2"]
    assert elements(dashed, "polyline")[0]["stroke-dasharray"] == entry["stroke-dasharray"] == "5 4"


def test_a_point_says_its_numbers_when_it_is_pointed_at():
    titles = re.findall("<title>(.*?)</title>", svg(CURVES))
    assert titles[1:4] == [
        "one: 0 → 0.000 [0.00, 0.25], n = 50",
        "one: 5 → 0.500 [0.25, 0.75], n = 40",
        "one: 10 → 1.000 [0.75, 1.00], n = 30",
    ]
    assert rate_text(Point(0, 0.95349, 0.9249, 0.9751, 9)) == "0.953 [0.92, 0.98]"


def test_the_plot_is_as_wide_and_high_as_its_legend():
    """Long names were cut, and those of two dozen systems would stand below the edge."""
    series = [Series(f"system {number} with a long name", POINTS) for number in range(24)]
    plot = ElementTree.fromstring(svg(Plot("", "", "", series)))
    width, height = map(int, plot.get("viewBox").split()[2:])
    [last] = [one for one in plot.iter(NAMESPACE + "text") if one.text == series[-1].label]
    assert float(last.get("x")) + 7 * len(last.text) <= width and float(last.get("y")) < height


def test_an_infinite_interval_ends_at_the_frame():
    """That of a single question that is half right."""
    wide = Plot("", "", "", [Series("wide", [Point(1.0, 0.5, -math.inf, math.inf, 1)])])
    [interval] = [one for one in elements(wide, "line") if one.get("opacity")]
    assert numbers(interval, "y1", "y2") == (CEILING, FLOOR)


@given(st.floats(1, 10), st.integers(-12, 11), st.booleans())
def test_a_cost_of_any_size_has_round_and_evenly_spaced_ticks(mantissa, exponent, whole):
    """Mantissas between 5 and 10 once had no step, so that a paid evaluation ended without its tables."""
    cost = mantissa * 10.0**exponent
    cost = float(math.ceil(cost)) if whole else cost
    ticks = drawing._ticks(cost, whole=whole)
    assert 2 <= len(ticks) <= 10 and ticks[0] == 0 and ticks[-1] <= 1.03 * cost
    assert f"{ticks[1]:e}"[0] in "125"
    assert ticks == pytest.approx([number * ticks[1] for number in range(len(ticks))])


@pytest.mark.parametrize(
    ("highest", "whole", "ticks"),
    [
        (3, True, [0, 1, 2, 3]),
        (3, False, [0, 0.5, 1, 1.5, 2, 2.5, 3]),
        (8, True, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (9, True, [0, 2, 4, 6, 8]),
        (80, True, [0, 10, 20, 30, 40, 50, 60, 70, 80]),
        (99.9, False, [0, 20, 40, 60, 80, 100]),
        (1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.04, False, [0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04]),
        (320, True, [0, 50, 100, 150, 200, 250, 300]),
    ],
)
def test_ticks_are_round_and_at_most_eight_steps(highest, whole, ticks):
    assert drawing._ticks(highest, whole=whole) == pytest.approx(ticks)


def test_a_plot_without_points_or_with_points_at_0_only_is_drawn():
    for series in ([], [Series("a", [])], [Series("a", [Point(0, 0.5, 0.4, 0.6, 9)])]):
        assert elements(Plot("t", "x", "y", series), "svg")
    [dot] = elements(Plot("t", "x", "y", [Series("a", [Point(0, 0.5, 0.4, 0.6, 9)])]), "circle")
    assert numbers(dot, "cx", "cy") == (LEFT, 198)
    many = [Series(str(number), POINTS) for number in range(8)]
    assert elements(Plot("t", "x", "y", many), "polyline")[7]["stroke"] == COLOURS[0]
