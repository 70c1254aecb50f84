"""The study of options: its curves, its table, and what it trains."""

import argparse
import json
from pathlib import Path

import pytest

from prompt_r1.cli.command_line import train_config
from prompt_r1.errors import UsageError
from prompt_r1.metrics.statistics import wilson
from prompt_r1.studies import __main__ as studies
from prompt_r1.studies import options
from prompt_r1.studies.options import VARIANTS, Curve, options_plot, options_table, pooled, read_curve
from prompt_r1.studies.programs import add_seeds


def write_run(folder: Path, em: dict[int, float]) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "env/paid": 5, "env/reused": 2}
        | ({"val/em": em[step], "val/n": 10} if step in em else {})
        for step in range(max(em) + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def test_a_curve_counts_the_calls_up_to_each_step(tmp_path):
    write_run(tmp_path / "run", {0: 0.1, 2: 0.9, 4: 0.8})
    curve = read_curve(tmp_path / "run")
    assert (curve.em, curve.questions) == ({0: 0.1, 2: 0.9, 4: 0.8}, 10)
    assert curve.calls == {0: 7, 1: 14, 2: 21, 3: 28, 4: 35}
    assert curve.learned() == 2
    assert Curve({0: 0.1, 2: 0.89}, 10, {}).learned() is None


def test_the_table_pools_the_seeds_and_states_each():
    curves = {
        "default": {0: Curve({0: 0.2, 4: 0.9}, 10, {4: 100}), 1: Curve({0: 0.1, 4: 0.7}, 10, {4: 50})},
        "other": {0: Curve({0: 0.2, 4: 1.0}, 10, {4: 10}), 1: Curve({0: 0.1, 4: 1.0}, 10, {4: 20})},
    }
    low, high = wilson(16, 20)
    header, _, default, other = options_table(curves).splitlines()
    assert [cell.strip() for cell in header.split("|")[2:5]] == ["val EM at the end", "seed 0", "seed 1"]
    cells = [cell.strip() for cell in default.split("|")[1:-1]]
    assert cells == ["default", f"0.800 [{low:.2f}, {high:.2f}]", "0.90", "0.70", "0.475", "4, never", "75"]
    assert other.split("|")[6].strip() == "4, 4"
    assert pooled(curves["default"], 0).mean == pytest.approx(0.15)
    plot = options_plot(curves)
    assert [series.label for series in plot.series] == ["default", "other"]
    assert [(point.x, point.n) for point in plot.series[0].points] == [(0, 20), (4, 20)]


def test_variants_of_the_same_colour_differ_in_their_dashes():
    """A bug: the first and the eighth variant had the same line."""
    curves = {f"variant {number}": {0: Curve({0: 0.2}, 10, {})} for number in range(8)}
    assert [series.dashed for series in options_plot(curves).series] == [False] * 7 + [True]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_flags_of_every_variant_are_ones_that_train_py_takes(name):
    words = [str(word) for flag, values in VARIANTS[name].items() for word in (flag, *values)]
    train_config(words)


def test_the_command_trains_each_variant_and_seed_beside_the_default(tmp_path, monkeypatch, capsys):
    trained = []

    def train(folder, steps, flags):
        trained.append((folder.name, steps, dict(flags)))
        write_run(folder, {0: 0.1, steps: 0.9})

    monkeypatch.setattr(options, "train", train)
    monkeypatch.setitem(VARIANTS, "sharp", {"--clip": [0.5]})
    words = ["options", "sharp", "--seeds", "0", "1", "--steps", "2", "--jobs", "1", "--out", str(tmp_path)]
    studies.main(words)
    assert [(name, steps) for name, steps, _ in trained] == [
        ("default-seed0", 2), ("sharp-seed0", 2), ("default-seed1", 2), ("sharp-seed1", 2)
    ]  # fmt: skip
    shared = {"--seed": [1], "--val-every": [4], "--test-data": ["none"]}
    assert [flags for *_, flags in trained[2:]] == [shared, {**shared, "--clip": [0.5]}]
    assert "| sharp " in capsys.readouterr().out
    assert "| sharp " in (tmp_path / "options.md").read_text("utf-8")
    assert "sharp" in (tmp_path / "options.svg").read_text("utf-8")


def test_runs_of_different_lengths_are_compared_at_the_steps_that_all_have(tmp_path, monkeypatch):
    """A bug: a default of 40 steps beside a variant of 16 ended in a KeyError."""
    monkeypatch.setattr(options, "train", lambda folder, steps, flags: None)
    write_run(tmp_path / "default-seed0", {0: 0.1, 4: 0.8, 8: 0.95})
    write_run(tmp_path / "default-seed1", {0: 0.2, 4: 0.9})
    curves = options.train_variants(["default"], tmp_path, [0, 1], steps=4, val_every=4, jobs=1)
    assert [curve.em for curve in curves["default"].values()] == [{0: 0.1, 4: 0.8}, {0: 0.2, 4: 0.9}]
    assert "| default | 0.850" in options_table(curves)


def test_an_unknown_variant_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no variant 'blunt'; the variants are default"):
        studies.main(["options", "blunt", "--out", str(tmp_path)])


@pytest.mark.parametrize("study", ["options", "failures", "routes", "comparison"])
def test_a_negative_seed_is_refused(study, tmp_path):
    with pytest.raises(UsageError, match=r"--seeds must be 0 \(none\) or more, not -1"):
        studies.main([study, "--seeds", "-1", "--out", str(tmp_path)])


def test_a_seed_that_is_given_twice_counts_once():
    """A bug: two trainings of `studies options --seeds 0 0` ran at once in one folder."""
    parser = argparse.ArgumentParser()
    add_seeds(parser)
    assert parser.parse_args(["--seeds", "2", "0", "2"]).seeds == [2, 0]
    assert parser.parse_args([]).seeds == [0, 1, 2]
