"""Pinned metrics of a short run: a refactoring must not change them.

When a change is meant to change numbers (another prompt, another order of random draws), copy the new ones
from the failure. Unlike those of `tests/test_learning.py`, these hold for each rounding tried (AVX-512, AVX2,
SSE): the agent is sure of its tokens.
"""

import train
from tests import tiny
from tests.figures import check_figures

# Each metric by step. The loss is token-mean, because in the sequence mean the advantages cancel.
FIGURES = {
    "loss": [-0.141017, 0.0941324, -0.0237029],
    "kl": [4.50383e-05, 0.00021066, 0.000368954],
    "entropy": [0.210504, 0.201325, 0.197276],
    "grad_norm": [0.361982, 0.502829, 0.381219],
    "reward/mean": [-0.80625, -0.7, -0.7375],
    "em": [0.0, 0.0, 0.0],
    "turns": [1.3125, 1.3125, 1.5625],
    "games": [16, 16, 16],
    "tokens/sampled": [1217, 1259, 1370],
    "env/calls": [5, 5, 9],
}


def test_three_steps_of_a_tiny_agent_give_the_pinned_figures(tmp_path):
    agent, run = tiny.save_pinned_agent(tmp_path / "agent"), tmp_path / "run"
    settings = """
        --env mini --val-data none --test-data none --device cpu --steps 3 --questions 4 --group-size 4
        --mini-batch 8 --loss token-mean --lr 1e-4 --max-new 80 --max-turns 3 --max-tokens 900
    """
    train.main(["--agent", str(agent), "--out", str(run), *settings.split()])
    check_figures(run, FIGURES)
