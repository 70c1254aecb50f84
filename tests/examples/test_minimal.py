"""examples/minimal.py computes what train.py computes: tokens, rewards, advantages, losses and weights."""

import json
from pathlib import Path
from statistics import mean

import pytest
import torch

from examples import minimal
from prompt_r1.training.log import read_metrics
from tests.support.exports import load_tensors
from tests.support.programs import run_here


@pytest.mark.parametrize(
    ("steps", "questions"), [(1, 2), pytest.param(2, minimal.QUESTIONS, marks=pytest.mark.slow)]
)
def test_steps_on_one_page_are_those_of_the_package(
    tmp_path: Path, steps: int, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train both for some steps of the mini world, and compare every step, and the weights at the end.

    A step has two mini-batches.
    """
    mini_batch = questions * minimal.GROUP_SIZE // 2
    monkeypatch.setattr(minimal, "QUESTIONS", questions)
    monkeypatch.setattr(minimal, "MINI_BATCH", mini_batch)
    run = tmp_path / "run"
    torch.set_num_threads(1)
    line = f"--out {run} --steps {steps} --val-data none --test-data none --save-every {steps}"
    sizes = f"--questions {questions} --mini-batch {mini_batch}"
    run_here("train.py", *line.split(), *sizes.split())
    training = minimal.Training(seed=0)
    for number, metrics in enumerate(read_metrics(run)[1:], start=1):
        step = training.step(number)
        lines = (run / f"trajectories/step-{number:06d}-rank0.jsonl").read_text("utf-8").splitlines()
        for game, reward, advantage, line in zip(
            step.games, step.rewards, step.advantages, lines, strict=True
        ):
            theirs = json.loads(line)
            assert game.tokens == theirs["tokens"]
            assert "".join(str(int(own)) for own in game.sampled) == theirs["sampled"]
            assert [turn.reply for turn in game.turns] == [turn["reply"] for turn in theirs["turns"]]
            for name in ("format", "answer", "total"):
                assert getattr(reward, name) == theirs["reward"][name]
            assert advantage == theirs["advantage"]
        loss = mean(loss.total.item() for loss in step.losses)
        kl = mean((loss.weights * loss.kl).sum().item() for loss in step.losses)
        assert (loss, kl) == pytest.approx((metrics["loss"], metrics["kl"]), abs=1e-5)
    weights, theirs = training.model.state_dict(), load_tensors(run / "agent")
    differences = torch.cat([(weights[name] - theirs[name]).abs().flatten() for name in theirs])
    # AdamW moves a weight by up to 5e-4 a step, also where its gradient is hardly more than rounding.
    assert differences.mean() < 1e-7 and differences.max() < 1e-4


def test_a_step_without_a_word_problem_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With seed 5 the first step has none in its second mini-batch, and the program died."""
    monkeypatch.setattr(minimal, "QUESTIONS", 2)
    monkeypatch.setattr(minimal, "MINI_BATCH", minimal.GROUP_SIZE)
    training = minimal.Training(seed=0)
    training.questions = [question for question in training.questions if question.kind != "math"]
    minimal.show(training.step(1), training.tokenizer)
    assert "<- this game" in capsys.readouterr().out
