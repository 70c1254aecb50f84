"""The commands of docs/using.md, up to its Python section, run as they are printed, in one folder."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from prompt_r1.spending import Spending
from prompt_r1.types import Question, Reward, Trajectory
from tests.support.paths import ROOT
from tests.support.ports import free_ports

PAGE = (ROOT / "docs/using.md").read_text("utf-8").split("## From Python")[0]


def test_the_reward_of_the_page_that_counts_dollars_prefers_cheap_right_games_to_dear_ones_to_wrong_ones():
    [code] = re.findall(r"cat > my_price.py <<'END'\n(.*?)END\n", PAGE, re.DOTALL)
    names: dict[str, Callable[[Trajectory, Reward], float]] = {}
    exec(code, names)

    def reward(usd: float, total: float) -> float:
        game = Trajectory(Question("q", "bridge", "Who?", ("Bob",)), spent=Spending(usd=usd))
        return names["thrifty"](game, Reward(1.0, 0.0, total))

    rewards = [reward(*game) for game in ((0.0, 1.0), (4e-4, 1.0), (9.0, 1.0), (0.0, 0.0), (0.0, -0.5))]
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) == 5
    assert rewards[0] == 1.0 and reward(9.0, -0.5) == -0.5


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(tmp_path):
    for name in ("train.py", "evaluate.py", "prompt_r1"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 7
    script = "\n".join(blocks).replace("8123", str(*free_ports(1)))
    paths = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-m", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": paths, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = ["my-questions", "my-model", "my-llm", "my-object", "my-game", "my-metric", "my-price"]
    for run in runs:
        lines = (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()
        assert len(lines) >= 2, run
    assert "prompt-r1" in done.stdout
