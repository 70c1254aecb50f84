"""Plots: what is drawn where; a missing matplotlib is named."""

import math

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.studies import __main__ as studies
from prompt_r1.studies import plot as plots
from prompt_r1.studies.plot import Plot, Point, Series, figure_of, rate_text

POINTS = [Point(0, 0.0, -0.1, 0.25, 50), Point(5, 0.5, 0.25, 0.75, 40), Point(10, 1.0, 0.75, 1.2, 30)]
CURVES = Plot(
    "Title", "step", "EM", [Series("one", POINTS), Series("two", POINTS, dashed=True, joined=False)]
)


def drawn(plot: Plot):
    """The axes of a plot, and the line and the ends of the intervals of each series."""
    pytest.importorskip("matplotlib")
    [axes] = figure_of(plot).axes
    intervals = [bars[2][0].get_segments() for bars in axes.containers]
    return axes, [bars[0] for bars in axes.containers], intervals


def test_means_and_intervals_are_drawn_within_0_and_1_and_two_series_stand_apart():
    axes, lines, intervals = drawn(CURVES)
    assert [list(line.get_ydata()) for line in lines] == [[0.0, 0.5, 1.0]] * 2
    for segments in intervals:
        ends = [tuple(segment[:, 1]) for segment in segments]
        assert ends == [(0.0, 0.25), (0.25, 0.75), (0.75, 1.0)]
    first, second = (list(line.get_xdata()) for line in lines)
    assert first[1] < 5 < second[1] and first[1] + second[1] == pytest.approx(10)
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("Title", "step", "EM")


def test_series_differ_by_marker_line_and_colour_and_are_in_the_legend():
    axes, [one, two], _ = drawn(CURVES)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two"]
    assert (one.get_linestyle(), two.get_linestyle()) == ("-", "None")
    assert one.get_marker() != two.get_marker() and one.get_color() != two.get_color()


def test_an_infinite_interval_ends_at_the_frame():
    """That of a single question that is half right."""
    _, _, [[segment]] = drawn(Plot("", "", "", [Series("wide", [Point(1.0, 0.5, -math.inf, math.inf, 1)])]))
    assert tuple(segment[:, 1]) == (0.0, 1.0)


def test_a_rate_is_written_with_its_interval():
    assert rate_text(Point(0, 0.95349, 0.9249, 0.9751, 9)) == "0.953 [0.92, 0.98]"


def test_a_missing_matplotlib_is_named_before_a_game_is_played(monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"the plots need matplotlib: pip install matplotlib"):
        studies.main([])
