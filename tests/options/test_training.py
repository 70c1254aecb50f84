"""The flags of the update's options reach a training."""

import pytest

import train
from prompt_r1.storage.run_log import read_metrics
from tests.support import tiny

SETTINGS = """
    --env mini --val-data none --test-data none --device cpu --steps 1 --questions 4 --group-size 4
    --mini-batch 8 --loss token-mean --lr 1e-4 --max-new 80 --max-turns 3 --max-tokens 900
"""
# Each with the flags that it is compared with.
OPTIONS = {
    "--advantages group-mean-batch-std": "",
    "--advantages no-std": "",
    "--drop-even-groups": "",
    "--clip 1e-6 --clip-high 1": "--clip 1e-6",
    "--clip 1e-6 --ratio sequence": "--clip 1e-6",
}


@pytest.mark.slow
def test_every_option_changes_the_gradient_or_the_clipping_of_the_same_games(tmp_path):
    agent, steps = tiny.save_pinned_agent(tmp_path / "agent"), {}
    for number, flags in enumerate([*OPTIONS, *set(OPTIONS.values())]):
        run = tmp_path / str(number)
        train.main(["--agent", str(agent), "--out", str(run), *SETTINGS.split(), *flags.split()])
        steps[flags] = read_metrics(run)[-1]
    for flags, others in OPTIONS.items():
        got, without = steps[flags], steps[others]
        assert got["reward/mean"] == without["reward/mean"] and got["update/skipped"] == 0
        assert any(got[name] != without[name] for name in ("grad_norm", "clip_frac")), flags
