"""The agent of parts: what its demonstrations show."""

import re
from collections import Counter

from prompt_r1.metrics.em_f1 import exact_match
from prompt_r1.miniworld.agent import demonstrations
from prompt_r1.miniworld.world import TRAINING_MIX
from studies.parts import show_part


def test_no_demonstration_chains_two_facts():
    """No request holds what only a reply has told; questions of two steps get a single request."""
    asked: Counter[str] = Counter()
    answered, right = 0, 0
    for question, turns in demonstrations(0, worlds=2, games=600, show=show_part):
        told: set[str] = set()
        for turn in turns:
            used = set(re.findall(r"\d+|[A-Z]\w+ [A-Z]\w+", turn.action.prompt or ""))
            assert not used & told, (question.text, turns)
            words = re.findall(r"\d+|[A-Z]\w+ [A-Z]\w+", turn.reply or "")
            told |= {word for word in words if word not in question.text}
            asked[question.dataset] += turn.action.prompt is not None
        if question.dataset == "parts":
            answered += turns[-1].action.answer is not None
            right += exact_match(turns[-1].action.answer or "", question.answers) == 1
        else:
            assert sum(turn.action.prompt is not None for turn in turns) <= 1
    assert set(asked) == {"parts", *TRAINING_MIX} and right > 0.95 * answered
