"""Score an answer by EM, SM and F1. Each is the best score over the gold answers (eqs 13 and 14).

Texts are normalised before they are compared (normalise.py). An empty prediction scores 0.

Evaluations may also score by the rules of the paper's release (evaluation/official.py) and by SSim, a metric
that needs a model (evaluation/similarity.py).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import eq

from prompt_r1.normalise import normalise


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals a gold answer, else 0."""
    return _best(eq, prediction, answers)


def substring_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction contains a gold answer as whole words, else 0."""
    return _best(_contains, prediction, answers)


def f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 over the multisets of words (eq. 14)."""
    return _best(f1_of_words, prediction, answers)


def _best(metric: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    """The highest score over the gold answers; 0 if there are none. `metric` compares normalised texts."""
    predicted = normalise(prediction)
    scores = [0.0]
    for gold in answers:
        wanted = normalise(gold)
        if predicted and wanted:  # Nothing equals an empty text.
            scores.append(float(metric(predicted, wanted)))
    return max(scores)


def _contains(predicted: str, wanted: str) -> bool:
    return f" {wanted} " in f" {predicted} "


def f1_of_words(predicted: str, wanted: str) -> float:
    """F1 of two normalised texts; 0 if one of them is empty."""
    predicted_words, wanted_words = predicted.split(), wanted.split()
    common = sum((Counter(predicted_words) & Counter(wanted_words)).values())
    if common == 0:
        return 0.0
    precision = common / len(predicted_words)
    recall = common / len(wanted_words)
    return 2 * precision * recall / (precision + recall)
