"""Proposition 2: reinforcement learning makes the agent guide the environment better (eqs 34-39).

Nothing is played: validation games and sampled games of every step are in the run folders.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from prompt_r1.metrics.statistics import mean_interval
from prompt_r1.metrics.text import exact_match
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.studies.figure import Point, Series, Study, cell, markdown_table
from prompt_r1.studies.turns import rate

CLAIM = (
    "Proposition 2. Reinforcement learning can make small-scale LLMs better guide large-scale LLMs to "
    "complete tasks."
)
BIN = 5  # steps of sampled games in one point


def study_training(folders: Sequence[Path]) -> Study:
    """EM by GRPO step: greedy on held-out questions, and sampled on training questions."""
    validated = [validation_of(folder) for folder in folders]
    steps = sorted(set.intersection(*(set(one) for one in validated)))
    pooled = [rate(step, [score for one in validated for score in one[step]]) for step in steps]
    sampled = sampled_points(folders)
    table = markdown_table(
        ["validation at step", "n", "all seeds", *(folder.name for folder in folders)],
        [
            [
                f"{point.x:g}",
                str(point.n),
                cell(point),
                *(f"{fmean(one[step]):.3f}" for one in validated),
            ]
            for step, point in zip(steps, pooled, strict=True)
        ],
    )
    notes = (
        "Validation: EM [95 % Wilson interval], greedy games of held-out questions; "
        f"{len(folders)} seeds pooled.",
        f"Sampled: the games that were trained on, {BIN} steps to a point; bootstrap over questions, since "
        "the games of one question are not independent.",
        "Intervals are about other questions for these seeds; how seeds differ, the columns show.",
    )
    series = [Series("validation", pooled), Series("sampled", sampled, dashed=True)]
    return Study(
        "training", "Accuracy against training steps", CLAIM, "GRPO step", "EM", series, table, notes
    )


def validation_of(folder: Path) -> dict[int, list[float]]:
    """By step, a 1 for each right answer and a 0 for each other."""
    lines = [line for line in read_metrics(folder) if "val/em" in line]
    found = {}
    for line in lines:
        n, right = int(line["val/n"]), round(line["val/em"] * line["val/n"])
        found[int(line["step"])] = [1.0] * right + [0.0] * (n - right)
    return found


def sampled_points(folders: Sequence[Path]) -> list[Point]:
    """The mean EM of the sampled games of every BIN steps."""
    scores: dict[int, list[float]] = defaultdict(list)
    questions: dict[int, list[str]] = defaultdict(list)
    for folder in folders:
        for path in sorted((folder / "trajectories").glob("step-*.jsonl")):
            step = int(path.name.split("-")[1])
            place = (step - 1) // BIN
            for row in map(json.loads, path.read_text("utf-8").splitlines()):
                if row["stop"] != "env_error":
                    scores[place].append(exact_match(row["answer"] or "", row["question"]["answers"]))
                    questions[place].append(f"{folder} {step} {row['question']['id']}")
    return [
        Point(place * BIN + (BIN + 1) / 2, fmean(values), *mean_interval(values, questions[place]),
              n=len(set(questions[place])))
        for place, values in sorted(scores.items())
    ]  # fmt: skip
