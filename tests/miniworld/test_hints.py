"""A question outside the mini world gets a hint, and none of its own questions does."""

import pytest

from prompt_r1.miniworld import mini_world
from prompt_r1.miniworld.hints import hint


def test_the_questions_of_all_splits_need_no_hint():
    world = mini_world(3, train=40, validation=20, test=20, ood=20)
    for question in [*world.train, *world.validation, *world.test, *world.ood]:
        assert hint(question.text, 3) == ""


@pytest.mark.parametrize("question", ["What is the capital of France?", "Who directed Casablanca?", ""])
def test_other_questions_get_examples_that_the_agent_knows(question):
    shown = hint(question, 3).splitlines()
    assert "mini world of seed 3" in shown[0] and len(shown) == 2 + 5
    assert all(hint(line.strip(), 3) == "" for line in shown[2:])
