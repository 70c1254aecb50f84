"""A training with a choice of environments and charged costs, and its agent in the other programs."""

import json
from pathlib import Path

import pytest

import evaluate
import infer
import train
from prompt_r1.options.routes import route_instruction
from prompt_r1.protocol import INSTRUCTIONS
from prompt_r1.storage.run_log import read_metrics
from tests import tiny

pytestmark = pytest.mark.slow  # it trains an agent that asks
SETTINGS = """
    --env mini,mini-small --route agent --env-price 2,8 0.1,0.4 --cost-weight 0.5 --rule release
    --val-data none --test-data none --device cpu --questions 4 --group-size 4 --mini-batch 16
    --max-new 80 --max-turns 3 --max-tokens 1500 --steps 2 --instruction short
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("routes")
    told = f"{INSTRUCTIONS['short']}\n{route_instruction('mini,mini-small', ('2,8', '0.1,0.4'))}"
    agent = tiny.save_asking_agent(folder / "agent", told=told)
    train.main(["--agent", str(agent), "--out", str(folder / "run"), *SETTINGS.split()])
    return folder / "run"


def test_each_game_records_what_its_replies_cost(run):
    """This agent knows no names: all its prompts go to the first environment."""
    lines = [line for line in read_metrics(run) if line["step"] > 0]
    for line in lines:
        assert line["env/unaddressed"] == line["env/1:mini/paid"] + line["env/1:mini/reused"] > 0
        assert line["env/2:mini-small/paid"] == 0
    # Equal calls are paid once, by the run; each game is charged for its own.
    assert sum(line["game/usd"] * line["games"] for line in lines) >= lines[-1]["env/usd"] > 0
    cost = next((run / "trajectories").glob("step-000001-*")).read_text("utf-8").splitlines()[0]
    assert "stop" in json.loads(cost)


def test_evaluate_and_infer_play_the_game_of_its_training(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = ["--agent", str(run), "--env-price", "0.1,0.4", "2,8"]
    infer.main([*common, "--question", "abc def?", "--json"])
    game = json.loads(capsys.readouterr().out)
    assert game["environment"] == "mini,mini-small" and "error" not in game["stop"]
    evaluate.main([*common, "--method", "prompt-r1", "--limit", "4", "--out", "scores", "--device", "cpu"])
    answers = [json.loads(line) for line in Path("scores/predictions.jsonl").read_text("utf-8").splitlines()]
    assert len(answers) == 4 and sum(answer["usd"] for answer in answers) > 0
