"""Each exercise of examples/exercises.md shows the symptom that it states."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from examples.exercises import answers, with_bug
from tests.support.paths import ROOT

LINE = re.compile(r"step +(\d+): (?:reward +(\S+) loss +(\S+) KL (\S+))? ?(?:validation EM (\S+))?")


@dataclass(frozen=True)
class Printed:
    """What a run of the page printed: its numbers by step, and the columns of its tables."""

    rewards: list[float]
    losses: list[float]
    kls: list[float]
    validation: dict[int, float]
    advantages: list[float]  # eq. 16
    tokens: list[str]  # of the first turn, eq. 17
    ratios: list[float]


def read(text: str) -> Printed:
    lines = [match.groups() for match in LINE.finditer(text.replace(",", ""))]
    steps = [line for line in lines if line[1]]
    table = re.findall(r"^ *('.*'|\".*\") +(\S+) +\S+ +\S+ +\S+$", text, re.MULTILINE)
    return Printed(
        rewards=[float(line[1]) for line in steps],
        losses=[float(line[2]) for line in steps],
        kls=[float(line[3]) for line in steps],
        validation={int(line[0]): float(line[4]) for line in lines if line[4]},
        advantages=[float(number) for number in re.findall(r"advantage = +(\S+)", text)],
        tokens=[token for token, _ in table],
        ratios=[float(ratio) for _, ratio in table],
    )


# By exercise: steps to run, and the symptom. Thresholds lie between the stated and the healthy number.
SYMPTOMS: dict[int, tuple[int, Callable[[Printed], bool]]] = {
    0: (5, lambda run: run.validation[5] > 0.4 and run.kls[0] < 0.01 and run.tokens[-1] == "'<|im_end|>'"),
    1: (5, lambda run: run.validation[5] < 0.3 and run.kls[0] > 0.05 and run.kls[-1] > 1),
    2: (5, lambda run: run.kls[0] > 0.03 and run.kls[-1] > 0.2),
    3: (5, lambda run: run.rewards[0] < -0.2 and run.validation[0] < run.validation[5] + 0.05 < 0.3),
    4: (2, lambda run: set(run.losses) <= {0.0, -0.0} and set(run.ratios) == {1.0}),
    5: (1, lambda run: abs(sum(run.advantages)) > 1),
    6: (1, lambda run: run.tokens[-1] != "'<|im_end|>'"),
    7: (1, lambda run: run.rewards[0] > 0.22),
    8: (1, lambda run: not any(run.losses + run.kls + run.advantages)),
    9: (2, lambda run: not any(run.kls) and any(run.losses)),
    10: (4, lambda run: run.rewards[0] < 0 and run.kls[-1] > 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", SYMPTOMS)
def test_an_exercise_shows_its_symptom(number: int, tmp_path):
    """Number 0 is the page without a bug, which shows none of them."""
    steps, shows = SYMPTOMS[number]
    command = ["examples.exercises", str(number)] if number else ["examples.minimal"]
    run = subprocess.run(
        [sys.executable, "-m", *command, "--steps", str(steps)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = read(run.stdout)
    assert shows(printed), printed
    if not number:
        others = [name for name, (_, shows) in SYMPTOMS.items() if name and shows(printed)]
        assert not others


def test_every_exercise_changes_the_page_and_compiles():
    diffs = answers()
    assert len(diffs) == len(SYMPTOMS) - 1
    for number, diff in enumerate(diffs, start=1):
        compile(with_bug(diff), f"exercise {number}", "exec")
