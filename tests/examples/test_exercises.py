"""Each exercise of examples/exercises.md shows its symptom in the first step of training."""

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pytest
import torch

from examples.exercises import answers, with_bug
from examples.minimal import GROUP_SIZE
from tests.support.paths import ROOT


@dataclass(frozen=True)
class Seen:
    """What the first step shows."""

    reward: float
    losses: list[float]
    kl: float
    group_sums: list[float]  # of the advantages of each group
    last_token: str  # of the first turn
    ratios: set[float]  # of the second mini-batch


def first_step(page: Path) -> Seen:
    """Run the first step of a page."""
    torch.set_num_threads(1)
    training = runpy.run_path(str(page), run_name="page")["Training"](seed=0)
    step = training.step(1)
    game, second = step.games[0], step.losses[1]
    end = [*game.sampled, False].index(False, game.sampled.index(True))
    starts = range(0, len(step.games), GROUP_SIZE)
    return Seen(
        reward=mean(reward.total for reward in step.rewards),
        losses=[loss.total.item() for loss in step.losses],
        kl=mean((loss.weights * loss.kl).sum().item() for loss in step.losses),
        group_sums=[sum(step.advantages[start : start + GROUP_SIZE]) for start in starts],
        last_token=training.tokenizer.decode([game.tokens[end - 1]]),
        ratios=set(second.ratio[second.weights > 0].tolist()),
    )


# By exercise. Thresholds lie between the stated and the healthy number.
SYMPTOMS: dict[int, Callable[[Seen], bool]] = {
    1: lambda seen: seen.kl > 0.05 and seen.reward > 0.1,
    2: lambda seen: 0.03 < seen.kl < 0.09,
    3: lambda seen: seen.reward < -0.2,
    4: lambda seen: seen.ratios == {1.0} and max(map(abs, seen.losses)) < 1e-6,
    5: lambda seen: max(map(abs, seen.group_sums)) > 1,
    6: lambda seen: seen.last_token != "<|im_end|>",
    7: lambda seen: seen.reward > 0.22,
    8: lambda seen: not any(seen.losses) and not any(seen.group_sums),
    9: lambda seen: seen.kl == 0 and any(seen.losses),
    10: lambda seen: seen.reward < 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("number", SYMPTOMS)
def test_an_exercise_shows_its_symptom(number, tmp_path):
    page = tmp_path / "page.py"
    page.write_text(with_bug(answers()[number - 1]), "utf-8")
    seen = first_step(page)
    assert SYMPTOMS[number](seen), seen


@pytest.mark.slow
def test_the_page_without_a_bug_shows_no_symptom():
    seen = first_step(ROOT / "examples/minimal.py")
    assert not [number for number, shows in SYMPTOMS.items() if shows(seen)], seen


def test_every_exercise_changes_the_page_and_compiles():
    diffs = answers()
    assert len(diffs) == len(SYMPTOMS)
    for number, diff in enumerate(diffs, start=1):
        compile(with_bug(diff), f"exercise {number}", "exec")
