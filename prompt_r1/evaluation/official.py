"""EM, SM and F1 by the rules of the paper's release (`--metrics official`), for comparison with its tables.

Texts are normalised by SQuAD's rules: lower case, no punctuation, no articles. The reward does not use these
rules, because in mathematics they make wrong answers right (normalise.py).
"""

import re
import string
from collections.abc import Sequence

from prompt_r1.f1 import f1_of_words

ARTICLES = re.compile(r"\b(a|an|the)\b")
DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


def official_scores(prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """EM, SM and F1. Each is the best score over the gold answers, and 1 if both texts are empty."""
    predicted = official_form(prediction)
    em = sm = f1 = 0.0
    for gold in answers:
        wanted = official_form(gold)
        is_equal = predicted == wanted
        contains = wanted in predicted or predicted in wanted
        em = max(em, float(is_equal))
        sm = max(sm, float(contains))
        f1 = max(f1, 1.0 if is_equal else f1_of_words(predicted, wanted))
    return {"em": em, "sm": sm, "f1": f1}


def official_form(text: str) -> str:
    """The text in lower case, without punctuation and articles, and with single blanks."""
    letters = text.lower().translate(DROP_PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", letters).split())
