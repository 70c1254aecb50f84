"""`python -m prompt_r1.report RUN --live` writes the page when the run has a new step, and ends with it."""

import json

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.report.__main__ import main
from prompt_r1.report.live import FILE, follow
from tests.report.pages import data_of


def train(run, step: int, *, steps: int = 2) -> None:
    """What a training adds to its run folder with a step."""
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(f"steps: {steps}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward/mean": 0.1}) + "\n")


def test_the_page_follows_the_steps_and_reloads_until_the_last_one(tmp_path):
    run, said, seen, waits = tmp_path / "run", [], [], []
    run.mkdir()
    path = run / FILE

    def sleep(seconds: float) -> None:
        """The time between two looks at the run: it trains a step, or not."""
        waits.append(seconds)
        if path.exists():
            data = data_of(path)
            seen.append((data["runs"][0]["step"], data["live"], path.stat().st_mtime_ns))
        if len(seen) != 2:  # once nothing happens
            train(run, len(seen) - (len(seen) > 2))

    follow(run, out=None, games=100, say=said.append, sleep=sleep)
    assert [(step, live) for step, live, _ in seen] == [(0, 10), (1, 10), (1, 10)]
    assert min(waits) == waits[0] == 1.0, "it looks every second, or less often after a slow page"
    assert seen[1][2] == seen[2][2]  # without a new step the page is not written again
    data = data_of(path)
    assert data["runs"][0]["step"] == 2 and data["live"] == 0
    assert said[0].startswith("Waiting for the first step") and "open it in a browser" in said[1]
    assert "The last step, 2, is logged" in said[2]


def test_ctrl_c_leaves_a_page_that_no_longer_reloads(tmp_path):
    train(tmp_path / "run", 1)

    def interrupted(seconds: float) -> None:
        assert data_of(tmp_path / "run" / FILE)["live"] == 10
        raise KeyboardInterrupt

    follow(tmp_path / "run", out=None, games=100, say=lambda text: None, sleep=interrupted)
    assert not data_of(tmp_path / "run" / FILE).get("live")


def test_live_takes_one_run_that_exists(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        main([str(tmp_path / "nowhere"), "--live"])
    with pytest.raises(UsageError, match="--live follows one run"):
        main([str(tmp_path), str(tmp_path), "--live"])
    with pytest.raises(UsageError, match=r"--out .*: give the name of a file"):
        main([str(tmp_path), "--out="])  # was reported as a bug of ours
