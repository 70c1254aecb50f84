"""The numbers in the paper's Tables 2 to 5, in percent.

The numbers are in paper_numbers.csv. Each is a mean over 128 questions; the paper reports no intervals.
Datasets have the names of `prompt_r1/data`, and metrics have the names of `scores.py`.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

FILE = Path(__file__).with_name("paper_numbers.csv")
# A model → the paper's name of it.
ENVIRONMENTS = {"gpt-4o-mini": "GPT-4o-mini", "gpt-oss-20b": "GPT-OSS-20B", "qwen3-4b": "Qwen3-4B"}


@cache
def load_numbers() -> Mapping[str, Mapping[tuple[str, str], float]]:
    """Each column's numbers: (dataset, metric) → percent.

    First the columns of Tables 2 (trained datasets) and 3 (out of distribution), then "w/o Env." and
    "w/o R.L." of Table 4, then the columns of Table 5 that are not in Table 3. Names of columns:

        prompt-r1; GPT-OSS-20B; GPT-4o-mini    trained with GPT-4o-mini, the agent asks GPT-OSS-20B
        direct; GPT-4o-mini; GPT-4o-mini       no training: the environment has both places
        sft; ;                                 no environment
    """
    numbers: dict[str, dict[tuple[str, str], float]] = {}
    with FILE.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            place = (row.pop("dataset"), row.pop("metric"))
            for name, number in row.items():
                column = numbers.setdefault(name, {})
                if number:
                    column[place] = float(number)
    return numbers


def paper_number(
    method: str, environment: str, trained_with: str, datasets: Sequence[str], metric: str
) -> str:
    """The paper's number in percent, as a mean over the datasets that report it; "" if there is none."""
    numbers = load_numbers()
    with_environment = f"{method}; {paper_name(environment)}; {paper_name(trained_with)}"
    without_environment = f"{method}; ; "
    for column in (with_environment, without_environment):
        reported = numbers.get(column, {})
        found = [reported[name, metric] for name in datasets if (name, metric) in reported]
        if found:
            return f"{fmean(found) + 1e-9:.2f}"  # The paper rounds halves up.
    return ""


def paper_name(environment: str) -> str:
    """The paper's name of an environment. Environments that the paper does not have keep their names."""
    model = re.split("@https?://", environment)[0].lower()
    last_part = re.split("[:/]", model)[-1]  # "qwen3-4b" of "Qwen/Qwen3-4B"
    return ENVIRONMENTS.get(last_part, environment)
