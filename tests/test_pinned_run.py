"""The figures of short runs, as they were when these tests were written.

A change that should change no number must leave these as they are. Where numbers are meant to change (another
prompt, another order of random draws), take the new ones from the failure. `tests/test_learning.py` holds the
same for `python train.py`.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import train
from prompt_r1.storage.run_log import read_metrics
from tests import tiny

COUNTS = ("games", "tokens/sampled", "env/calls")  # exact; other figures may differ by another CPU's rounding

# By step. The loss is the mean over tokens: over games the advantages would cancel.
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


def check_figures(run: Path, pinned: dict[str, list[float]]) -> None:
    """Compare the first steps of a run with pinned figures."""
    lines = [line for line in read_metrics(run) if line["step"] > 0]
    for name, figures in pinned.items():
        got = [line[name] for line in lines[: len(figures)]]
        if name in COUNTS:
            assert got == figures, name
        else:
            assert got == pytest.approx(figures, rel=1e-3, abs=1e-6), name


def pinned_agent(folder: Path) -> Path:
    """The asking agent as it was learnt on one machine: learnt again on another, it would differ."""
    tiny.save_agent(folder)
    weights = load_file(Path(__file__).parent / "asking_agent.safetensors")  # bfloat16, to be a small file
    exact = {name: value.float() for name, value in weights.items()}
    save_file(exact, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_three_steps_of_a_tiny_agent_give_the_pinned_figures(tmp_path):
    agent, run = pinned_agent(tmp_path / "agent"), tmp_path / "run"
    line = ["--agent", agent, "--env", "mini", "--out", run, "--device", "cpu", "--steps", 3]
    line += ["--val-data", "none", "--test-data", "none", "--questions", 4, "--group-size", 4]
    line += ["--mini-batch", 8, "--loss", "token-mean", "--lr", "1e-4"]
    line += ["--max-new", 80, "--max-turns", 3, "--max-tokens", 900]
    train.main(list(map(str, line)))
    check_figures(run, FIGURES)
