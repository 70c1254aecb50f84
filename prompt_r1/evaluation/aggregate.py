"""Predictions → numbers: the metrics of each answer, and means with intervals by system and dataset."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

from prompt_r1.evaluation.paper_numbers import OUT_OF_DISTRIBUTION, TRAINED
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.metrics.statistics import cluster_means, macro_interval, mean_interval
from prompt_r1.metrics.text import Rules, score_text
from prompt_r1.types import Kind

# What the paper reports of each kind of question; the first one is the kind's main metric here.
FIGURES: Mapping[Kind, tuple[str, str]] = {"qa": ("em", "f1"), "math": ("em", "f1"), "text": ("f1", "ssim")}
LABELS = {"em": "EM", "sm": "SM", "f1": "F1", "ssim": "SSim"}

Similarity = Callable[[Sequence[str], Sequence[Sequence[str]]], Sequence[float]]
"""Predictions, gold answers of each → SSim of each."""


@dataclass(frozen=True)
class Scored:
    """A prediction and its metrics, each from 0 to 1. Failed calls have none."""

    prediction: Prediction
    values: Mapping[str, float]


@dataclass(frozen=True)
class Cell:
    """A rate from 0 to 1 with its 95 % interval, of `n` questions; `errors` failed calls are left out."""

    mean: float
    low: float
    high: float
    n: int
    errors: int


class Scores:
    """The scored predictions by system, in the order in which they appear, and dataset."""

    def __init__(self, scored: Sequence[Scored]) -> None:
        self.groups: dict[tuple[System, str], list[Scored]] = {}
        self.kinds: dict[str, Kind] = {}
        for one in scored:
            prediction = one.prediction
            self.groups.setdefault((prediction.system, prediction.dataset), []).append(one)
            self.kinds.setdefault(prediction.dataset, prediction.kind)
        self.kinds = {name: self.kinds[name] for name in sorted(self.kinds, key=_place)}
        self.systems = list(dict.fromkeys(system for system, _ in self.groups))
        self._cells: dict[tuple[System, tuple[str, ...], str], Cell | None] = {}

    def values(self, system: System, dataset: str, metric: str) -> dict[str, float]:
        """Question id → its score, the mean over its repeats; not of questions that only met failed calls."""
        scored = [one for one in self.groups.get((system, dataset), []) if metric in one.values]
        ids = [one.prediction.id for one in scored]
        if not ids:
            return {}
        means = cluster_means([one.values[metric] for one in scored], ids)
        return dict(zip(dict.fromkeys(ids), map(float, means), strict=True))

    def errors(self, system: System, dataset: str) -> int:
        """How many of a system's answers to a dataset the environment broke."""
        return sum(bool(one.prediction.error) for one in self.groups.get((system, dataset), []))

    def cell(self, system: System, dataset: str, metric: str) -> Cell | None:
        """Mean and interval over the questions of a dataset; None where nothing was measured."""
        return self._cached(system, (dataset,), metric)

    def average(self, system: System, datasets: Sequence[str], metric: str) -> Cell | None:
        """The mean over the datasets that report this metric; None where one of them was not measured."""
        reporting = tuple(name for name in datasets if metric in FIGURES[self.kinds[name]])
        return self._cached(system, reporting, metric)

    def pooled(self, system: System, datasets: Sequence[str], metric: str) -> Cell | None:
        """Mean and interval over the questions of all datasets together."""
        values = [value for name in datasets for value in self.values(system, name, metric).values()]
        return _cell({"": values}, sum(self.errors(system, name) for name in datasets))

    def main(self, system: System, datasets: Sequence[str]) -> Cell | None:
        """The mean over the datasets of the main metric of their kinds: EM, and F1 for texts."""
        return self._cached(system, tuple(datasets), "")

    def _cached(self, system: System, datasets: tuple[str, ...], metric: str) -> Cell | None:
        key = (system, datasets, metric)
        if key not in self._cells:
            groups = {
                name: list(self.values(system, name, metric or FIGURES[self.kinds[name]][0]).values())
                for name in datasets
            }
            errors = sum(self.errors(system, name) for name in datasets)
            self._cells[key] = _cell(groups, errors)
        return self._cells[key]


def _place(dataset: str) -> tuple[int, str]:
    """The paper's datasets in its order, then the others by name."""
    order = (*TRAINED, *OUT_OF_DISTRIBUTION)
    return (order.index(dataset) if dataset in order else len(order)), dataset


def _cell(groups: Mapping[str, list[float]], errors: int) -> Cell | None:
    if not groups or not all(groups.values()):
        return None
    pooled = [value for values in groups.values() for value in values]
    # Resampling says nothing of values that are all the same; Wilson's interval does, of zeros and of ones.
    alone = len(groups) == 1 or len(set(pooled)) == 1
    low, high = mean_interval(pooled) if alone else macro_interval(groups)
    return Cell(mean(map(mean, groups.values())), low, high, len(pooled), errors)


def score_predictions(
    predictions: Sequence[Prediction], *, rules: Rules = "strict", similarity: Similarity | None = None
) -> Scores:
    """EM, SM, F1 of each prediction, whether it is the same number, and SSim of texts where there is a
    `similarity`. No answer is scored as an empty one.
    """
    values: list[dict[str, float]] = [
        {} if one.error else text_metrics(one, rules=rules) for one in predictions
    ]
    texts = [place for place, one in enumerate(predictions) if one.kind == "text" and not one.error]
    if similarity is not None and texts:
        answers = [predictions[place].prediction or "" for place in texts]
        numbers = similarity(answers, [predictions[place].answers for place in texts])
        for place, number in zip(texts, numbers, strict=True):
            values[place]["ssim"] = number
    return Scores([Scored(*pair) for pair in zip(predictions, values, strict=True)])


def text_metrics(prediction: Prediction, *, rules: Rules = "strict") -> dict[str, float]:
    """The metrics that need no encoder; `math` of mathematical questions."""
    judged = asdict(score_text(prediction.prediction or "", prediction.answers, rules=rules))
    return {name: value for name, value in judged.items() if name != "math" or prediction.kind == "math"}
