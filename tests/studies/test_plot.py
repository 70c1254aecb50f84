"""Plots: what is drawn where; a missing matplotlib is named."""

import math

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.studies import __main__ as studies
from prompt_r1.studies import study
from prompt_r1.studies.study import Point, Series, Study, figure_of


def test_an_infinite_interval_ends_at_the_frame():
    """That of a single question that is half right."""
    pytest.importorskip("matplotlib")
    wide = Series("wide", [Point(1.0, 0.5, -math.inf, math.inf, 1)])
    [axes] = figure_of(Study("", "", "", "", [wide], "", ())).axes
    [segment] = axes.containers[0][2][0].get_segments()
    assert tuple(segment[:, 1]) == (0.0, 1.0)


def test_a_rate_is_written_with_its_interval():
    assert str(Point(0, 0.95349, 0.9249, 0.9751, 9)) == "0.953 [0.92, 0.98]"


def test_a_missing_matplotlib_is_named_before_a_game_is_played(monkeypatch):
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"the plots need matplotlib: pip install matplotlib"):
        studies.main([])
