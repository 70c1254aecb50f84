"""Compare mathematical answers by math-verify (`pip install '.[math]'`).

    python evaluate.py --answer-metric prompt_r1.metrics.with_math_verify:same_answer …

It reads what `numbers.py` does not: roots, powers, sets, intervals, equations and units.
"""

from collections.abc import Sequence

try:
    from math_verify import parse, verify
except ImportError:
    raise ImportError("math-verify is not installed: pip install math-verify") from None


def same_answer(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals a gold answer, else 0."""
    predicted = parse(_as_formula(prediction))
    return float(any(verify(parse(_as_formula(gold)), predicted) for gold in answers))


def _as_formula(text: str) -> str:
    """math-verify finds LaTeX only between dollar signs."""
    return f"${text}$" if "\\" in text and "$" not in text else text
