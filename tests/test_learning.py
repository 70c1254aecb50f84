"""The main job, shortened: `python train.py` must learn. Two minutes: `python -m pytest -m learning`."""

import pytest

from prompt_r1.storage.run_log import read_metrics
from tests.test_entry_points import call


@pytest.mark.learning
def test_the_mini_run_learns_to_question_its_environment(tmp_path):
    done = call(tmp_path, "train.py", "--steps", "24", "--val-every", "12", seconds=600)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "runs/mini-seed0")
    before, after = lines[0], lines[-1]
    assert before["val/em"] <= 0.45 and after["val/em"] >= 0.70
    assert after["val/format"] >= 0.95
    assert max(line["engine/logprob_gap"] for line in lines[1:]) <= 1e-4
    assert "Collapse" not in done.stdout

    alone = call(
        tmp_path, "evaluate.py", "--method", "prompt-r1", "--env", "mini", "mini-mute", "--limit", "100"
    )
    with_environment, mute = (
        float(line.split("|")[5].split()[0]) for line in alone.stdout.splitlines() if "**all**" in line
    )
    assert with_environment >= 0.60 and mute <= 0.30
