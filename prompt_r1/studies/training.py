"""Proposition 2: more training makes a better agent (eqs 34-39).

No games are played: the run folders hold the validation results and the sampled games of every step.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.metrics.statistics import mean_interval
from prompt_r1.metrics.text import exact_match
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.studies.study import Point, Series, Study, pooled_validations, validations

CLAIM = (
    "Proposition 2. Reinforcement learning can make small-scale LLMs better guide large-scale LLMs to "
    "complete tasks."
)
STEPS_PER_POINT = 5  # of sampled games


def study_training(folders: Sequence[Path]) -> Study:
    """EM by GRPO step: greedy on validation questions, and sampled on training questions."""
    runs = [read_metrics(folder) for folder in folders]
    pooled = pooled_validations(runs)
    rows = []
    for point in pooled:
        by_seed = [f"{validations(run)[int(point.x)]['val/em']:.3f}" for run in runs]
        rows.append([f"{point.x}", f"{point.n}", str(point), *by_seed])
    header = ["validation at step", "n", "all seeds", *(folder.name for folder in folders)]
    notes = (
        "Validation: EM of greedy games of held-out questions, with 95 % intervals over questions and "
        f"{len(folders)} seeds.",
        f"Sampled: the games that the agent was trained on, {STEPS_PER_POINT} steps per point; bootstrap "
        "over questions, because the games of one question are not independent.",
    )
    series = [
        Series("validation", pooled, joined=False),
        Series("sampled", sampled_points(folders), dashed=True),
    ]
    title, table = "Exact match by training step", markdown_table(header, rows)
    return Study("training", CLAIM, title, "GRPO step", series, table, notes)


def sampled_points(folders: Sequence[Path]) -> list[Point]:
    """The mean EM of the sampled games, one point for every STEPS_PER_POINT steps."""
    scores: dict[int, list[float]] = defaultdict(list)
    questions: dict[int, list[str]] = defaultdict(list)
    for folder in folders:
        for path in sorted((folder / "trajectories").glob("step-*.jsonl")):
            step = int(path.name.split("-")[1])
            number = (step - 1) // STEPS_PER_POINT
            for row in map(json.loads, path.read_text("utf-8").splitlines()):
                if row["stop"] != "env_error":
                    scores[number].append(exact_match(row["answer"] or "", row["question"]["answers"]))
                    questions[number].append(f"{folder} {step} {row['question']['id']}")
    points = []
    for number, values in sorted(scores.items()):
        middle = number * STEPS_PER_POINT + (STEPS_PER_POINT + 1) / 2
        low, high = mean_interval(values, questions[number])
        points.append(Point(middle, fmean(values), low, high, n=len(set(questions[number]))))
    return points
