"""Score predictions, and average the scores with confidence intervals.

Tables 2 to 5 average over datasets, as the paper does (`macro_average`). The terminal and results.json
average over questions (`micro_means`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from prompt_r1.data.datasets import OUT_OF_DISTRIBUTION, TRAINED
from prompt_r1.evaluation.intervals import mean_interval
from prompt_r1.evaluation.official import official_scores
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.evaluation.similarity import SentenceEncoder
from prompt_r1.f1 import exact_match, f1, substring_match
from prompt_r1.types import Kind, Question

OwnMetric = Callable[[str, Question], float]
"""A user's own metric: an answer ("" if there is none) and its question → 0 to 1."""

# The metrics in the order of the tables. SM is measured beside EM, because an environment that is asked once
# often gives the right answer in a sentence, which EM counts as wrong.
LABELS = {"em": "EM", "sm": "SM", "f1": "F1", "ssim": "SSim"}

# The metrics of each kind of question: the paper's metrics, and SM.
METRICS_OF_KIND: dict[Kind, tuple[str, ...]] = {
    "qa": ("em", "sm", "f1"),
    "math": ("em", "sm", "f1"),
    "text": ("f1", "ssim"),
}


@dataclass(frozen=True)
class ScoredPrediction:
    """A prediction with its scores."""

    prediction: Prediction
    metrics: dict[str, float]  # metric → 0 to 1; empty after an error


@dataclass(frozen=True)
class Rate:
    """A mean from 0 to 1 over `n` questions, with its 95 % interval. Failed calls are left out."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Means:
    """The means of a system over the questions of some datasets. Each question has the same weight."""

    n: int  # questions with an answer
    errors: int  # failed calls, which do not count in any mean
    rates: dict[str, Rate]  # metric → mean, if the metric was measured
    counts: dict[str, float]  # reward, turns, calls, … (see `counts_of`) → mean per answer, if it is known

    def as_json(self) -> dict[str, float]:
        """One flat object, the form of results.json."""
        row: dict[str, float] = {"n": self.n, "errors": self.errors}
        for metric, rate in self.rates.items():
            row[metric] = rate.mean
            row[f"{metric}_low"] = rate.low
            row[f"{metric}_high"] = rate.high
        return row | self.counts


class Results:
    """Scored predictions by system and dataset, and their means.

    Systems are in the order in which they appear, datasets in the paper's order.
    """

    def __init__(self, scored: Sequence[ScoredPrediction]) -> None:
        self.groups: dict[tuple[System, str], list[ScoredPrediction]] = {}
        self.kinds: dict[str, set[Kind]] = {}  # A dataset of the user may mix kinds.
        measured: set[str] = set()
        for result in scored:
            question = result.prediction.question
            self.groups.setdefault((result.prediction.system, question.dataset), []).append(result)
            self.kinds.setdefault(question.dataset, set()).add(question.kind)
            measured.update(result.metrics)
        # The paper's datasets come first, in the paper's order, then the others by name.
        order = dict.fromkeys([*TRAINED, *OUT_OF_DISTRIBUTION, *sorted(self.kinds)])
        self.datasets = [name for name in order if name in self.kinds]
        self.systems = list(dict.fromkeys(system for system, _ in self.groups))
        # The column of a user's own metric has the metric's name, MODULE:FUNCTION.
        metrics = [*LABELS, *sorted(measured - LABELS.keys())]
        self.labels = {metric: LABELS.get(metric, metric) for metric in metrics if metric in measured}
        # The means over the questions of all datasets.
        self.means = {system: self.micro_means(system, self.datasets) for system in self.systems}

    def reported_metrics(self, dataset: str) -> list[str]:
        """The metrics that the paper's tables report for a dataset, in the order of LABELS."""
        reported: set[str] = set()
        for kind in self.kinds[dataset]:
            reported.update(METRICS_OF_KIND[kind])
        return [metric for metric in self.labels if metric in reported]

    def scored(self, system: System, datasets: Sequence[str]) -> list[ScoredPrediction]:
        """A system's scored predictions on some datasets."""
        found = []
        for name in datasets:
            found += self.groups.get((system, name), [])
        return found

    def scores(self, system: System, datasets: Sequence[str], metric: str) -> list[float]:
        """The score of each question: the mean over its repeats, without failed calls."""
        repeats: dict[Question, list[float]] = {}
        for result in self.scored(system, datasets):
            if metric in result.metrics:
                repeats.setdefault(result.prediction.question, []).append(result.metrics[metric])
        return [fmean(scores) for scores in repeats.values()]

    def macro_average(self, system: System, datasets: Sequence[str], metric: str) -> Rate | None:
        """The mean of the datasets' means: each dataset that reports this metric has the same weight.

        None if one of these datasets was not measured.
        """
        reporting = [name for name in datasets if metric in self.reported_metrics(name)]
        scores = [self.scores(system, [name], metric) for name in reporting]
        if not scores or not all(scores):
            return None
        return rate_of(scores)

    def micro_means(self, system: System, datasets: Sequence[str]) -> Means:
        """The means of everything that was measured on a system's questions of these datasets."""
        predictions = [result.prediction for result in self.scored(system, datasets)]
        answered = [prediction for prediction in predictions if not prediction.error]
        questions = {prediction.question for prediction in answered}
        rates = {}
        for metric in self.labels:
            scores = self.scores(system, datasets, metric)
            if scores:
                rates[metric] = rate_of([scores])
        known: dict[str, list[float]] = {}
        for prediction in answered:
            for name, count in counts_of(prediction).items():
                if count is not None:
                    known.setdefault(name, []).append(count)
        counts = {name: fmean(values) for name, values in known.items()}
        errors = len(predictions) - len(answered)
        return Means(len(questions), errors, rates, counts)


def rate_of(groups: Sequence[Sequence[float]]) -> Rate:
    """The mean of the groups' means, with its interval. A group has a score for each of its questions."""
    mean = fmean(fmean(scores) for scores in groups)
    low, high = mean_interval(groups)
    return Rate(mean, low, high, n=sum(len(scores) for scores in groups))


def score_predictions(
    predictions: Sequence[Prediction],
    *,
    official: bool = False,
    encoder: SentenceEncoder | None = None,
    own_metrics: Mapping[str, OwnMetric] | None = None,
) -> Results:
    """Score predictions by EM, SM and F1, and by a user's `own_metrics` (MODULE:FUNCTION → metric).

    With an `encoder`, free texts are scored by SSim, too. A missing answer is scored as an empty one. Failed
    calls are not scored.
    """
    answered = [prediction for prediction in predictions if not prediction.error]
    similarities = {} if encoder is None else similarities_of(answered, encoder, official=official)
    scored = []
    for prediction in predictions:
        metrics: dict[str, float] = {}
        if not prediction.error:
            metrics = text_metrics(prediction, official=official)
            for name, metric in (own_metrics or {}).items():
                metrics[name] = metric(prediction.answer or "", prediction.question)
        if prediction in similarities:
            metrics["ssim"] = similarities[prediction]
        scored.append(ScoredPrediction(prediction, metrics))
    return Results(scored)


def text_metrics(prediction: Prediction, *, official: bool) -> dict[str, float]:
    """The metrics of an answer that need no encoder."""
    answer = prediction.answer or ""
    golds = prediction.question.answers
    if official:
        return official_scores(answer, golds)
    return {"em": exact_match(answer, golds), "sm": substring_match(answer, golds), "f1": f1(answer, golds)}


def similarities_of(
    answered: Sequence[Prediction], encoder: SentenceEncoder, *, official: bool
) -> dict[Prediction, float]:
    """SSim of the answers to free texts. All texts are embedded together."""
    texts = [prediction for prediction in answered if prediction.question.kind == "text"]
    answers = [text.answer or "" for text in texts]
    golds = [text.question.answers for text in texts]
    return dict(zip(texts, encoder.similarity(answers, golds, official=official), strict=True))


def counts_of(prediction: Prediction) -> dict[str, float | None]:
    """The numbers beside the metrics that are averaged over answers; None if a method lacks one."""
    return {
        "reward": prediction.reward,
        "format": prediction.format,
        "turns": prediction.turns,
        "calls": prediction.spent.calls,
        "tokens_in": prediction.spent.tokens_in,
        "tokens_out": prediction.spent.tokens_out,
        "usd": prediction.spent.usd,
    }
