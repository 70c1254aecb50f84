"""The numbers in the paper's Tables 2 to 5, in percent.

The numbers are in paper_numbers.csv. Each is a mean over 128 questions; the paper reports no intervals.
Datasets have the names of `prompt_r1/data`, and metrics have the names of `scores.py`.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

FILE = Path(__file__).with_name("paper_numbers.csv")
# A model → the paper's name of it.
ENVIRONMENTS = {"gpt-4o-mini": "GPT-4o-mini", "gpt-oss-20b": "GPT-OSS-20B", "qwen3-4b": "Qwen3-4B"}


@dataclass(frozen=True)
class Column:
    """A column of the paper's tables. Environments have the paper's names, "" stands for none."""

    method: str
    environment: str = ""  # the environment that is asked
    # The environment of the agent's training. Without a training, it is the one that is asked.
    trained_with: str = ""


@cache
def load_numbers() -> Mapping[Column, Mapping[tuple[str, str], float]]:
    """Each column's numbers: (dataset, metric) → percent.

    First the columns of Tables 2 (trained datasets) and 3 (out of distribution), then "w/o Env." and
    "w/o R.L." of Table 4, then the columns of Table 5 that are not in Table 3. In the file, the fields of a
    column are separated by "; ".
    """
    numbers: dict[Column, dict[tuple[str, str], float]] = {}
    with FILE.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            place = (row.pop("dataset"), row.pop("metric"))
            for name, number in row.items():
                column = numbers.setdefault(Column(*name.split("; ")), {})
                if number:
                    column[place] = float(number)
    return numbers


def paper_number(
    method: str, environment: str, trained_with: str, datasets: Sequence[str], metric: str
) -> str:
    """The paper's number in percent, as a mean over the datasets that report it; "" if there is none."""
    with_environment = Column(method, paper_name(environment), paper_name(trained_with))
    without_environment = Column(method)
    for column in (with_environment, without_environment):
        reported = load_numbers().get(column, {})
        found = [reported[name, metric] for name in datasets if (name, metric) in reported]
        if found:
            return f"{fmean(found) + 1e-9:.2f}"  # The paper rounds halves up.
    return ""


def paper_name(environment: str) -> str:
    """The paper's name of an environment. Environments that the paper does not have keep their names."""
    model = re.split("@https?://", environment)[0].lower()
    last_part = re.split("[:/]", model)[-1]  # "qwen3-4b" of "Qwen/Qwen3-4B"
    return ENVIRONMENTS.get(last_part, environment)
