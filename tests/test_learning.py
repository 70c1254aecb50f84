"""`python train.py` learns, in a shortened run of two minutes: `python -m pytest -m learning`."""

import json

import pytest

from prompt_r1.training.log import read_metrics
from tests.support.programs import call

pytestmark = pytest.mark.learning


def test_the_mini_run_learns_to_question_its_environment(tmp_path):
    done = call(tmp_path, "train.py", "--steps", "24", "--save-every", "12")
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "runs/mini-seed0")
    before, after = lines[0], lines[-1]  # the first and last validation
    assert before["val/em"] <= 0.45 and after["val/em"] >= 0.70
    assert after["val/format"] >= 0.95
    assert max(line["engine/logprob_gap"] for line in lines[1:]) <= 1e-4
    assert "Alarm" not in done.stdout

    line = ["--method", "prompt-r1", "--env", "mini", "mini-mute", "--limit", "100", "--out", "results"]
    evaluation = call(tmp_path, "evaluate.py", *line)
    assert evaluation.returncode == 0, evaluation.stderr
    results = json.loads((tmp_path / "results/results.json").read_text())
    assert results["prompt-r1 (mini)"]["em"] >= 0.60 and results["prompt-r1 (mini-mute)"]["em"] <= 0.30
