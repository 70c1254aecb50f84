"""Compares the metrics of a run with pinned figures."""

from pathlib import Path

import pytest

from prompt_r1.storage.run_log import read_metrics

EXACT = ("games", "tokens/sampled", "env/calls")  # counts; other metrics may differ by the rounding of a CPU


def check_figures(run: Path, pinned: dict[str, list[float]]) -> None:
    """Compare the first steps of a run with the pinned values of each metric."""
    lines = [line for line in read_metrics(run) if line["step"] > 0]
    for name, figures in pinned.items():
        got = [line[name] for line in lines[: len(figures)]]
        if name in EXACT:
            assert got == figures, name
        else:
            assert got == pytest.approx(figures, rel=1e-3, abs=1e-6), name
