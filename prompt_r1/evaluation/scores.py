"""Score predictions, and average them with confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from prompt_r1.data.datasets import OUT_OF_DISTRIBUTION, TRAINED
from prompt_r1.evaluation.extraction import extract_answer
from prompt_r1.evaluation.paper_numbers import REPORTED_METRICS
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.evaluation.similarity import SentenceEncoder
from prompt_r1.evaluation.statistics import macro_interval
from prompt_r1.f1 import exact_match, f1, substring_match
from prompt_r1.types import Kind

EXTRACTED = "em_read"  # EM after `extract_answer`
LABELS = {"em": "EM", EXTRACTED: "EM read", "sm": "SM", "f1": "F1", "ssim": "SSim"}


@dataclass(frozen=True)
class Rate:
    """A mean from 0 to 1 over `n` questions with its 95 % interval; `errors` failed calls are left out."""

    mean: float
    low: float
    high: float
    n: int
    errors: int


class Results:
    """Scored predictions by system and dataset, and their means.

    Systems are in the order in which they appear, datasets in the paper's order.
    """

    def __init__(self, predictions: Sequence[Prediction]) -> None:
        self.groups: dict[tuple[System, str], list[Prediction]] = {}
        kinds: dict[str, Kind] = {}
        for prediction in predictions:
            question = prediction.question
            self.groups.setdefault((prediction.system, question.dataset), []).append(prediction)
            kinds.setdefault(question.dataset, question.kind)
        # The paper's datasets in its order, then the others by name.
        order = dict.fromkeys([*TRAINED, *OUT_OF_DISTRIBUTION, *sorted(kinds)])
        self.kinds = {name: kinds[name] for name in order if name in kinds}
        self.systems = list(dict.fromkeys(system for system, _ in self.groups))
        measured = {metric for prediction in predictions for metric in prediction.metrics}
        self.labels = {metric: label for metric, label in LABELS.items() if metric in measured}

    def predictions(self, system: System, datasets: Sequence[str]) -> list[Prediction]:
        """A system's predictions on some datasets."""
        return [prediction for name in datasets for prediction in self.groups.get((system, name), [])]

    def scores(self, system: System, dataset: str, metric: str) -> list[float]:
        """The score of each question: the mean over the repeats, without failed calls."""
        repeats: dict[str, list[float]] = {}
        for one in self.predictions(system, [dataset]):
            if metric in one.metrics:
                repeats.setdefault(one.question.id, []).append(one.metrics[metric])
        return list(map(fmean, repeats.values()))

    def average(self, system: System, datasets: Sequence[str], metric: str) -> Rate | None:
        """The mean over the datasets that report this metric; None if one of them was not measured."""
        reporting = [name for name in datasets if metric in REPORTED_METRICS[self.kinds[name]]]
        groups = {name: self.scores(system, name, metric) for name in reporting}
        if not groups or not all(groups.values()):
            return None
        mean, n = fmean(map(fmean, groups.values())), sum(map(len, groups.values()))
        errors = sum(bool(one.error) for one in self.predictions(system, reporting))
        return Rate(mean, *macro_interval(groups), n, errors)


def score_predictions(
    predictions: Sequence[Prediction], *, official: bool = False, encoder: SentenceEncoder | None = None
) -> Results:
    """Score predictions by EM, SM and F1 and, given an `encoder`, texts by SSim.

    A missing answer is scored as an empty one; failed calls are not scored.
    """
    scored = [replace(one, metrics=text_metrics(one, official=official)) for one in predictions]
    texts = [one for one in scored if one.question.kind == "text" and not one.error]
    if encoder is not None and texts:
        answers, golds = [one.answer or "" for one in texts], [one.question.answers for one in texts]
        for one, ssim in zip(texts, encoder.similarity(answers, golds, official=official), strict=True):
            one.metrics["ssim"] = ssim
    return Results(scored)


def text_metrics(prediction: Prediction, *, official: bool = False) -> dict[str, float]:
    """The metrics that need no encoder; none after an error. From a free text no answer is extracted."""
    if prediction.error:
        return {}
    question, answer = prediction.question, prediction.answer or ""
    golds, em = question.answers, exact_match(answer, question.answers, official=official)
    read = answer if question.kind == "text" else extract_answer(answer, question.text, question.kind)
    return {
        "em": em,
        EXTRACTED: max(em, exact_match(read, golds, official=official)),
        "sm": substring_match(answer, golds, official=official),
        "f1": f1(answer, golds, official=official),
    }
