"""Score an answer by EM, SM and F1. Each is the best score over the gold answers (eqs 13 and 14).

Texts are normalised before they are compared (normalise.py). An empty prediction scores 0. If normalisation
leaves nothing of a gold answer ("a", "$"), only the same text matches it.

Evaluations may also score by the rules of the paper's release (evaluation/official.py) and by SSim, a metric
that needs a model (evaluation/similarity.py).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import eq

from prompt_r1.normalise import normalise, plain_characters

AROUND = " .,:;!?()[]{}*_\"'`"  # marks that may stand around an answer; no signs and operators


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
        if predicted and wanted:
            scores.append(float(metric(predicted, wanted)))
        elif not wanted:  # Normalisation leaves nothing of this gold answer.
            scores.append(float(_is_the_same_text(prediction, gold)))
    return max(scores)


def _is_the_same_text(prediction: str, gold: str) -> bool:
    """Whether two texts are equal but for case, typography and the marks around them. Empty texts are not."""
    meant = _without_marks_around(gold)
    return meant != "" and _without_marks_around(prediction) == meant


def _without_marks_around(text: str) -> str:
    """Strip the marks around a text: "(A)" becomes "a". A text that has only marks, such as "$", stays."""
    plain = plain_characters(text).strip().casefold()
    return plain.strip(AROUND) or plain


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
