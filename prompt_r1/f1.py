"""Score an answer by EM, SM and F1. Each is the best score over the gold answers (eqs 13 and 14).

Texts are normalised before they are compared, by the strict rules or by the official ones (normalise.py). By
the strict rules, an empty prediction scores 0, and if normalisation leaves nothing of a gold answer ("a",
"$"), only the same text matches it.

SSim, a metric that needs a model, is in `evaluation/similarity.py`.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from prompt_r1.normalise import normalise, plain_characters

Metric = Callable[[str, str], float]
"""Compares a prediction with one gold answer, both normalised."""


def exact_match(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """1 if the prediction equals a gold answer, else 0."""
    return _best(_equals, prediction, answers, official)


def substring_match(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """1 if the prediction contains a gold answer as whole words, else 0.

    Official rules: 1 if one of the two is a substring of the other.
    """
    return _best(_overlaps if official else _contains, prediction, answers, official)


def f1(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """F1 over the multisets of words (eq. 14). Official rules: 1 if both texts are empty."""
    return _best(_f1, prediction, answers, official)


def _best(metric: Metric, prediction: str, answers: Sequence[str], official: bool) -> float:
    """The highest score over the gold answers; 0 if there are none."""
    predicted = normalise(prediction, official=official)
    scores = [0.0]
    for gold in answers:
        wanted = normalise(gold, official=official)
        if official or (predicted and wanted):
            scores.append(float(metric(predicted, wanted)))
        elif not wanted:  # Normalisation leaves nothing of this gold answer.
            scores.append(float(_is_the_same_text(prediction, gold)))
    return max(scores)


def _is_the_same_text(prediction: str, gold: str) -> bool:
    """Whether two texts are equal but for case and typographic forms. Empty texts are not."""
    said = plain_characters(prediction).strip().casefold()
    meant = plain_characters(gold).strip().casefold()
    return meant != "" and said == meant


def _equals(predicted: str, wanted: str) -> bool:
    return predicted == wanted


def _contains(predicted: str, wanted: str) -> bool:
    return f" {wanted} " in f" {predicted} "


def _overlaps(predicted: str, wanted: str) -> bool:
    return wanted in predicted or predicted in wanted


def _f1(predicted: str, wanted: str) -> float:
    if not predicted and not wanted:
        return 1.0
    predicted_words, wanted_words = predicted.split(), wanted.split()
    common = sum((Counter(predicted_words) & Counter(wanted_words)).values())
    if common == 0:
        return 0.0
    precision = common / len(predicted_words)
    recall = common / len(wanted_words)
    return 2 * precision * recall / (precision + recall)
