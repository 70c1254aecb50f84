"""A run that is complete: the same command says so, and anything that is left to do is done."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.config.yaml_files import write_yaml
from prompt_r1.environments.budget import Spending
from prompt_r1.reward import RULES, score
from prompt_r1.training.finished import finished_summary
from prompt_r1.training.results import result_of_game
from prompt_r1.training.step_metrics import game_metrics, spending
from prompt_r1.types import ScoredGame
from tests.games import GOOD, ONE_RANK, RIGHT, WRONG, game_of_turns

RULE = RULES["release"]
CONFIG = TrainConfig(**{**PRESETS["mini"], "steps": 4})


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that has saved, exported, logged and tested its last step."""
    for name in ("checkpoints/step-000002", "checkpoints/step-000004", "agent"):
        (tmp_path / name).mkdir(parents=True)
    write_yaml(CONFIG, tmp_path / "config.yaml")
    lines = [{"step": step, "reward/mean": 0.5, "em": 0.5, "format": 1.0} for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "agent/training.json").write_text(json.dumps({"step": 0}))
    (tmp_path / "test.md").write_text("a table")
    return tmp_path


def test_a_complete_run_is_summed_up_wherever_it_lies_and_however_it_is_named(run):
    for config in (CONFIG, replace(CONFIG, out=str(run), resume="never"), replace(CONFIG, data=["mini"])):
        first, _, *rest = finished_summary(run, config).splitlines()
        assert first == (
            f"{run} is finished: step 4 of 4; a larger --steps trains on, and --resume never begins a new run"
        )
        assert f"  {run}/agent: the agent of step 0, a Hugging Face folder" in rest


@pytest.mark.parametrize("missing", ["agent/training.json", "test.md", "config.yaml", "metrics.jsonl"])
def test_a_run_without_one_of_its_results_is_not_complete(run, missing):
    (run / missing).unlink()
    assert finished_summary(run, CONFIG) == ""


def test_a_run_of_other_settings_or_steps_is_not_complete(run):
    assert finished_summary(run, replace(CONFIG, steps=5)) == ""
    assert finished_summary(run, replace(CONFIG, lr=1e-3)) == ""
    (run / "checkpoints/step-000004").rmdir()
    assert finished_summary(run, CONFIG) == "", "its last step is not saved"
    (run / "checkpoints/step-000002").rmdir()
    assert finished_summary(run, CONFIG) == ""
    (run / "checkpoints/step-000004").mkdir()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:4]) + "\n")
    assert finished_summary(run, CONFIG) == "", "its last step is not logged"


def test_a_run_without_test_questions_needs_no_test(run):
    config = replace(CONFIG, test_data=())
    write_yaml(config, run / "config.yaml")
    (run / "test.md").unlink()
    assert finished_summary(run, config)


def test_the_spending_of_a_step_adds_what_earlier_parts_of_the_run_have_spent():
    before = Spending(usd=2.0, lost_usd=0.5)
    budget = SimpleNamespace(before=before, spent=Spending(calls=3, usd=2.75, lost_usd=0.75))
    pool = SimpleNamespace(budget=budget, take_metrics=lambda: {"env/paid": 3.0, "env/reused": 1.0})
    assert spending(pool, ONE_RANK) == {
        "env/usd": 2.75,
        "env/lost_usd": 0.75,
        "env/paid": 3.0,
        "env/reused": 1.0,
    }


def test_the_metrics_of_a_step_are_means_and_sums_over_its_games():
    games = [game_of_turns(GOOD, RIGHT), game_of_turns(WRONG)]
    right, wrong = (result_of_game(ScoredGame(game, score(game, rule=RULE), None)) for game in games)
    right, wrong = (
        replace(right, latencies=(1.0, 5.0), question="a"),
        replace(wrong, latencies=(2.0,), question="b"),
    )
    metrics = game_metrics([right, wrong])
    rewards = [one.reward for one in (right, wrong)]
    assert metrics["reward/format"] == sum(one.format for one in rewards) / 2
    assert metrics["reward/answer"] == sum(one.answer for one in rewards) / 2
    assert metrics["f1"] == (right.f1 + wrong.f1) / 2 and metrics["turns"] == 1.5
    assert metrics["format"] == (right.well_formed + wrong.well_formed) / 2 and metrics["games"] == 2.0
    assert metrics["tokens/game"] == (right.tokens + wrong.tokens) / 2
    assert metrics["tokens/sampled"] == right.sampled + wrong.sampled
    assert (metrics["env/calls"], metrics["env/errors"], metrics["env/latency"]) == (1.0, 0.0, 2.0)
    stops = {name: value for name, value in metrics.items() if name.startswith("stop/")}
    assert sum(stops.values()) == 1.0 and len(stops) == 5 and stops["stop/answered"] == 1.0
    assert game_metrics([])["env/latency"] == 0.0 and game_metrics([])["em"] == 0.0
