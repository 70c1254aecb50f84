"""What the replies to a game cost, from the prices to the reward, and several environments in one run."""

import json
from pathlib import Path

import pytest

import evaluate
import infer
import train
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.types import Reward, Trajectory

SETTINGS = """
    --env mini,mini-b --route 3,1 --env-price 2,8 --reward tests.training.test_game_costs:dollars
    --data mini:validation --val-data none --test-data none --device cpu --questions 2 --group-size 4
    --mini-batch 8 --max-new 80 --max-turns 3 --max-tokens 1500 --steps 1 --instruction short
"""


def dollars(game: Trajectory, paper: Reward) -> float:
    """A reward that is what the replies to a game cost."""
    return game.spent.usd


@pytest.fixture(scope="module")
def run(asking_agent, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("costs") / "run"
    train.main(["--agent", str(asking_agent), "--out", str(folder), *SETTINGS.split()])
    return folder


def test_each_game_records_what_its_replies_cost_before_it_is_scored(run):
    lines = [line for line in read_metrics(run) if line["step"] > 0]
    for line in lines:
        assert line["reward/mean"] == pytest.approx(line["game/usd"]) and line["game/usd"] > 0
    # Equal calls are paid once, by the run; each game is charged for its own.
    assert sum(line["game/usd"] * line["games"] for line in lines) >= lines[-1]["env/usd"] > 0


def test_evaluate_and_infer_play_with_the_environments_of_its_training(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = ["--agent", str(run), "--env-price", "0.1,0.4"]
    infer.main([*common, "--question", "abc def?", "--json"])
    game = json.loads(capsys.readouterr().out)
    assert game["environment"] == "mini,mini-b" and "error" not in game["stop"]
    evaluate.main([*common, "--method", "prompt-r1", "--limit", "4", "--out", "scores", "--device", "cpu"])
    answers = [json.loads(line) for line in Path("scores/predictions.jsonl").read_text("utf-8").splitlines()]
    assert len(answers) == 4 and sum(answer["usd"] for answer in answers) > 0
