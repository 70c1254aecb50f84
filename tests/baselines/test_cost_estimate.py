"""`evaluate.py --dry-run`: no real evaluation in `mini-advice` spends more."""

import json
import re
from pathlib import Path

import pytest

import evaluate
from prompt_r1.baselines.make import AgentCache
from prompt_r1.config.yaml_files import GAME_FILE
from prompt_r1.evaluation.predictions import read_predictions
from prompt_r1.types import Completion
from tests import tiny
from tests.echo_agent import EchoAgent

METHODS = (
    "direct", "cot", "cot-few-shot", "self-consistency", "opro", "textgrad", "gepa", "untrained", "best-of-n",
    "prompt-r1",
)  # fmt: skip
SMALL = """
    --opro-steps 2 --opro-per-step 2 --opro-train 4 --textgrad-epochs 1 --textgrad-updates 2 --optimize-val 5
    --gepa-calls 18 --gepa-batch 4 --shots 2 --env mini-advice --data mini mini:ood --seed 0 --limit 6
    --env-price 0.15,0.60 --device cpu
"""
GAME = "instruction: short\nmax_turns: 4\nmax_tokens: 2000\nmax_new: 500\nenv: mini-advice\nagent: agent\n"


class GreedyEchoAgent(EchoAgent):
    """The agent with the interface of an evaluation."""

    async def generate(self, tokens: list[int], *, top_p: float = 1.0, **settings) -> Completion:
        return await super().generate(tokens, **settings)


def spent_by_method(folder: Path) -> dict[str, list[float]]:
    """Method → calls before the answers, calls of the answers, and all tokens and dollars."""
    noted = json.loads((folder / "preparation.json").read_text("utf-8"))
    prepared = {name.split(" (")[0]: ledger for name, ledger in noted.items()}
    predictions = read_predictions(folder / "predictions.jsonl")
    spent = {}
    for method in METHODS:
        before = prepared.get(method, dict.fromkeys(("task_calls", "optimizer_calls", "usd"), 0))
        own = [one for one in predictions if one.system.method == method]
        tokens = sum(one.spent.tokens for one in own)
        spent[method] = [
            before["task_calls"] + before["optimizer_calls"],
            sum(one.spent.calls for one in own),
            tokens + before.get("tokens_in", 0) + before.get("tokens_out", 0),
            sum(one.spent.usd for one in own) + before["usd"],
        ]
    spent["together"] = [sum(column) for column in zip(*spent.values(), strict=True)]
    return spent


def printed_rows(table: str) -> dict[str, list[float]]:
    """Method → the numbers of its row."""
    rows = {}
    for line in table.splitlines()[1:]:
        label, *cells = re.split(" {2,}", line)
        rows[label.split(" (")[0]] = [float(cell.replace(",", "")) for cell in cells]
    return rows


@pytest.mark.parametrize(
    "budget", ["0", pytest.param("30", marks=pytest.mark.slow), pytest.param("3", marks=pytest.mark.slow)]
)
def test_an_evaluation_spends_at_most_the_estimate(tmp_path, monkeypatch, capsys, budget):
    """Calls, tokens and dollars. A budget of 3 calls is less than the first prompt of a search takes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(AgentCache, "load", lambda *_: GreedyEchoAgent())
    (tiny.save_agent(tmp_path / "agent") / GAME_FILE).write_text(GAME, "utf-8")
    line = [*SMALL.split(), "--agent", "agent", "--out", "out", "--optimize-calls", budget, "--method"]
    evaluate.main([*line, *METHODS, "--dry-run"])
    assert not Path("out").exists()
    estimate = printed_rows(capsys.readouterr().out)
    evaluate.main([*line, *METHODS])
    spent = spent_by_method(Path("out"))
    assert estimate.keys() == spent.keys()
    for method, numbers in spent.items():
        for most, number in zip(estimate[method], numbers, strict=True):
            assert number <= most, (method, numbers, estimate[method])
    for method in ("direct", "cot"):  # nothing about their calls is uncertain
        assert estimate[method][:2] == spent[method][:2]
