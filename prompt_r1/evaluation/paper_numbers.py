"""The numbers in the paper's Tables 2 to 5, in percent, which are in paper_numbers.csv.

Each number is over 128 questions; the paper reports no intervals. Datasets have the names of
`prompt_r1/data`, metrics those of `aggregate.py`.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from prompt_r1.types import Kind

# The metrics that the paper reports of each kind of question; the first is the kind's main metric here.
REPORTED_METRICS: Mapping[Kind, tuple[str, str]] = {
    "qa": ("em", "f1"),
    "math": ("em", "f1"),
    "text": ("f1", "ssim"),
}
QWEN, MINI, OSS = "Qwen3-4B", "GPT-4o-mini", "GPT-OSS-20B"
ENVIRONMENTS = {"gpt-4o-mini": MINI, "gpt-oss-20b": OSS, "qwen3-4b": QWEN}  # a model → the paper's name

# Columns of the file: a method, its environment and that of its agent's training (empty: any). They are those
# of Table 2 (trained datasets), Table 3 (out of distribution), "w/o Env." and "w/o R.L." of Table 4, and of
# Table 5 those that are not in Table 3.
with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as _table:
    NUMBERS = {
        (*column.split("; "), row["dataset"], row["metric"]): float(number)
        for row in csv.DictReader(_table)
        for column, number in row.items()
        if number and column not in ("dataset", "metric")
    }


def paper_number(method: str, environment: str, home: str, datasets: Sequence[str], metric: str) -> str:
    """The paper's number, in percent: the mean over the datasets that report it; "" if there is none.

    `home` is the environment of the agent's training.
    """
    for where in ((paper_name(environment), paper_name(home)), ("", "")):
        keys = [(method, *where, dataset, metric) for dataset in datasets]
        if found := [NUMBERS[key] for key in keys if key in NUMBERS]:
            return f"{fmean(found) + 1e-9:.2f}"  # the paper rounds halves up
    return ""


def paper_name(environment: str) -> str:
    """The paper's name of an environment; other environments, also several at once, keep their names."""
    model = re.split("@https?://", environment)[0].lower()
    return ENVIRONMENTS.get(re.split("[:/]", model)[-1], environment)
