"""The numbers in the paper's Tables 2 to 5.

The environments are GPT-4o-mini and, in Table 5, GPT-OSS-20B. Each number is over 128 questions; the paper
reports no intervals. Datasets have the names of `prompt_r1/data`, metrics those of `aggregate.py`.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from prompt_r1.data.datasets import DATASETS, PAPER_MIX
from prompt_r1.data.files import kind_of
from prompt_r1.types import Kind

TRAINED = PAPER_MIX
OUT_OF_DISTRIBUTION = tuple(dataset.name for dataset in DATASETS.values() if not dataset.trained)
# The metrics that the paper reports of each kind of question; the first is the kind's main metric here.
REPORTED_METRICS: Mapping[Kind, tuple[str, str]] = {
    "qa": ("em", "f1"),
    "math": ("em", "f1"),
    "text": ("f1", "ssim"),
}
COLUMNS = (
    "Qwen3-4B", "GPT-4o-mini", "SFT (Qwen3-4B)", "CoT (Qwen3-4B)", "CoT (GPT-4o-mini)", "GRPO (Qwen3-4B)",
    "OPRO", "TextGrad", "GEPA", "Prompt-R1",
)  # fmt: skip

# Table 2 (trained datasets), then Table 3 (out of distribution): a number for each of COLUMNS.
MAIN_RESULTS = {
    ("2WikiMultihopQA", "em"): (28.13, 33.59, 41.41, 21.88, 43.75, 34.38, 25.00, 18.75, 41.41, 48.44),
    ("2WikiMultihopQA", "f1"): (29.32, 36.57, 42.62, 24.17, 49.13, 35.05, 35.96, 27.50, 46.27, 54.41),
    ("HotpotQA", "em"): (21.09, 33.59, 23.44, 18.75, 42.97, 27.34, 34.38, 27.34, 38.28, 44.53),
    ("HotpotQA", "f1"): (24.25, 40.07, 31.09, 22.98, 49.70, 32.27, 46.83, 37.10, 47.03, 52.31),
    ("GSM8K", "em"): (84.38, 83.59, 32.03, 82.81, 84.38, 92.97, 63.28, 70.31, 87.50, 97.66),
    ("GSM8K", "f1"): (84.38, 86.72, 32.03, 82.81, 88.02, 92.97, 83.65, 85.99, 90.10, 97.66),
    ("DAPO-Math", "em"): (0.00, 18.75, 3.13, 0.00, 20.31, 3.91, 6.25, 10.16, 13.28, 26.56),
    ("DAPO-Math", "f1"): (0.00, 18.76, 3.13, 0.00, 20.32, 3.91, 6.39, 10.27, 14.06, 26.56),
    ("MuSiQue", "em"): (1.56, 14.06, 7.81, 3.13, 17.97, 8.59, 14.06, 14.84, 15.63, 18.75),
    ("MuSiQue", "f1"): (5.44, 22.06, 16.78, 6.95, 25.39, 13.90, 26.18, 24.06, 24.91, 26.31),
    ("PopQA", "em"): (7.03, 25.78, 7.81, 7.03, 28.13, 7.81, 23.44, 19.53, 27.34, 28.13),
    ("PopQA", "f1"): (9.97, 30.75, 9.53, 9.58, 32.66, 12.27, 30.14, 28.28, 31.18, 33.77),
    ("BookSum", "f1"): (19.99, 20.45, 25.47, 16.68, 11.58, 25.88, 16.18, 25.79, 0.00, 26.50),
    ("BookSum", "ssim"): (45.19, 57.01, 54.55, 35.02, 56.51, 54.21, 23.22, 34.95, 0.00, 60.87),
    ("WritingPrompts", "f1"): (13.06, 19.48, 15.12, 10.20, 9.93, 8.40, 7.81, 22.07, 0.21, 22.11),
    ("WritingPrompts", "ssim"): (20.59, 35.31, 30.86, 12.15, 30.86, 10.41, 13.73, 20.28, 0.34, 38.54),
    ("TriviaQA", "em"): (45.31, 63.28, 29.69, 46.88, 67.19, 51.56, 60.94, 54.69, 65.63, 70.31),
    ("TriviaQA", "f1"): (48.52, 71.34, 34.21, 50.26, 75.81, 55.98, 72.14, 67.59, 74.91, 76.91),
    ("MathQA", "em"): (28.91, 46.09, 17.97, 27.34, 49.22, 46.88, 43.75, 44.53, 40.63, 52.34),
    ("MathQA", "f1"): (32.29, 54.04, 22.66, 30.60, 57.03, 54.43, 60.08, 61.46, 61.59, 61.59),
    ("SQuAD v2", "em"): (6.25, 13.28, 5.47, 6.25, 14.06, 10.16, 10.94, 6.25, 13.28, 19.53),
    ("SQuAD v2", "f1"): (16.09, 25.61, 16.18, 16.25, 25.73, 23.10, 26.67, 22.04, 25.52, 29.28),
    ("XSum", "f1"): (16.75, 24.35, 21.13, 8.33, 8.92, 21.98, 17.87, 24.88, 0.21, 25.76),
    ("XSum", "ssim"): (31.73, 60.56, 55.65, 6.81, 53.94, 52.09, 29.47, 28.45, 0.37, 63.02),
}

# Table 4: two numbers (EM and F1, or F1 and SSim) for each of TRAINED, then of OUT_OF_DISTRIBUTION. Its rows
# "w/o Agent" and "Full" repeat Tables 2 and 3.
ABLATIONS = {
    "w/o Env.": (
        41.41, 43.48, 21.88, 25.96, 95.31, 95.31, 25.00, 25.00, 2.34, 11.63, 8.59, 10.85,
        23.34, 56.84, 18.67, 37.83, 49.22, 57.94, 10.16, 18.12, 39.84, 43.54, 21.41, 59.87,
    ),
    "w/o R.L.": (
        1.56, 8.86, 20.31, 27.42, 84.38, 89.41, 21.09, 22.22, 5.47, 10.90, 3.91, 9.28,
        19.38, 58.80, 17.11, 36.65, 48.44, 58.07, 5.47, 12.89, 49.22, 56.23, 23.61, 61.83,
    ),
}  # fmt: skip

# Table 5, two numbers for each of OUT_OF_DISTRIBUTION. Keys: the environment of the agent's training ("":
# no agent) and of the test.
TRANSFER = {
    ("", "GPT-OSS-20B"): (51.56, 59.48, 7.81, 18.75, 50.78, 59.37, 22.77, 59.48),
    ("", "GPT-4o-mini"): (46.09, 54.04, 13.28, 25.61, 63.28, 71.34, 24.35, 60.56),
    ("GPT-OSS-20B", "GPT-OSS-20B"): (51.56, 61.07, 10.16, 21.28, 50.78, 59.60, 24.14, 61.83),
    ("GPT-4o-mini", "GPT-4o-mini"): (52.34, 61.59, 19.53, 29.28, 70.31, 76.91, 25.76, 63.02),
    ("GPT-4o-mini", "GPT-OSS-20B"): (53.91, 62.63, 8.59, 20.13, 51.56, 60.05, 22.95, 60.84),
    ("GPT-OSS-20B", "GPT-4o-mini"): (52.34, 60.29, 17.97, 27.96, 67.19, 73.11, 25.82, 61.83),
}


def main_result(column: str, datasets: Sequence[str], metric: str) -> float | None:
    """The mean over datasets of a column of Tables 2 and 3, or of a row of Table 4; None if not reported.

    Like the paper's averages, it leaves out the datasets without the metric.
    """
    numbers = [_number(column, name, metric) for name in datasets]
    reported = [number for number in numbers if number is not None]
    return round(fmean(reported) + 1e-9, 2) if reported else None  # the paper rounds halves up


def transfer(trained_with: str, tested_with: str, dataset: str, metric: str) -> float | None:
    """A number of Table 5; None if the paper does not report it."""
    return _of_pairs(TRANSFER.get((trained_with, tested_with)), OUT_OF_DISTRIBUTION, dataset, metric)


def _number(column: str, dataset: str, metric: str) -> float | None:
    if column in ABLATIONS:
        return _of_pairs(ABLATIONS[column], (*TRAINED, *OUT_OF_DISTRIBUTION), dataset, metric)
    row = MAIN_RESULTS.get((dataset, metric))
    return None if row is None else row[COLUMNS.index(column)]


def _of_pairs(
    numbers: tuple[float, ...] | None, datasets: tuple[str, ...], dataset: str, metric: str
) -> float | None:
    metrics = REPORTED_METRICS[kind_of(dataset)]
    if numbers is None or dataset not in datasets or metric not in metrics:
        return None
    return numbers[2 * datasets.index(dataset) + metrics.index(metric)]
