"""Warn of test questions that also occur in the files that agents and prompts were trained or chosen on."""

from collections import Counter
from collections.abc import Iterable, Sequence

from prompt_r1.data.fields import question_key
from prompt_r1.data.files import load_questions
from prompt_r1.errors import UsageError
from prompt_r1.types import Question


def leak_warnings(questions: Sequence[Question], names: Iterable[str]) -> list[str]:
    """A sentence for each of the files that contains some of the questions, or that cannot be checked.

    The splits of the mini world share no question, and are not checked.
    """
    warnings = []
    for name in dict.fromkeys(names):
        if name.partition(":")[0] == "mini":
            continue
        try:
            keys = {question_key(question.text) for question in load_questions(name)}
        except UsageError as error:
            warnings.append(f"whether {name} contains test questions was not checked ({error}).")
            continue
        shared = Counter(question.dataset for question in questions if question_key(question.text) in keys)
        if shared:
            counts = ", ".join(f"{dataset} {count:,}" for dataset, count in sorted(shared.items()))
            warnings.append(
                f"{shared.total():,} of the {len(questions):,} test questions also occur in {name} "
                f"({counts}); `python -m prompt_r1.data audit` lists them."
            )
    return [f"Warning: {warning}" for warning in warnings]
