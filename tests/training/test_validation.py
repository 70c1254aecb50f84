"""Validation metrics and results tables, against numbers computed by hand."""

import asyncio
import re

import pytest

from prompt_r1.environments.own import OwnSource
from prompt_r1.errors import EnvError
from prompt_r1.reward import RULES
from prompt_r1.training.metrics import metrics_of_game
from prompt_r1.training.validation import ask_directly, mean_metrics, table_by_dataset
from prompt_r1.types import Question
from tests.support.games import GOOD, RIGHT, WRONG, game_of_turns, score_and_compare
from tests.support.methods import method, priced
from tests.support.thread_ranks import on_each_rank
from tests.support.tiny import ScriptedEnvironment


def test_a_failed_call_is_counted_as_an_error_and_left_out_of_the_means():
    broken = game_of_turns(GOOD, stop="env_error")
    broken.error = "HTTP 500"
    games = [game_of_turns(GOOD, RIGHT), game_of_turns(WRONG), broken]
    [scored] = score_and_compare([games], RULES["release"])
    means = mean_metrics([metrics_of_game(game) for game in scored])
    assert (means["n"], means["errors"]) == (2, 1)
    assert means["em"] == 0.5 and means["reward"] == pytest.approx((1.0 - 0.4) / 2)
    assert means["turns"] == 1.5


def test_the_table_has_a_row_for_each_dataset_and_the_mean_over_all_questions():
    rows = [{"em": 1.0, "f1": 1.0}, {"em": 0.0, "f1": 0.5}, {"em": 1.0, "f1": 1.0}]
    lines = re.sub(" +", " ", table_by_dataset({"direct": rows}, ["a", "a", "b"])).splitlines()
    assert "| direct | a | 2 | 0 | 0.500 | 0.750 | – | – | – |" in lines
    assert "| **direct** | **all** | 3 | 0 | 0.667 | 0.833 | – | – | – |" in lines


def test_a_table_of_failed_calls_only_has_no_means():
    table = table_by_dataset({"direct": [{"env/errors": 1}]}, ["a"])
    assert "| 0 | 1 | – | – |" in re.sub(" +", " ", table)


@pytest.mark.parametrize("spec", ["mini", "large@http://localhost:8000/v1"])
def test_the_test_asks_the_environment_alone_as_the_method_direct_does(spec):
    """The test of a training asked every environment for the "Answer only.", and took the whole reply."""
    questions = [Question("1", "a", "Who?", ("Anna",)), Question("2", "a", "Who else?", ("Bob",))]
    reply = "Anna" if spec == "mini" else "It is <answer>Anna</answer>."
    environment = ScriptedEnvironment([reply, EnvError("down")])
    right, failed = asyncio.run(ask_directly(questions, priced(OwnSource(environment, seed=0)), spec))
    evaluated = ScriptedEnvironment([reply])
    direct = method("direct", priced(OwnSource(evaluated, seed=0)), spec=spec)
    assert asyncio.run(direct(questions[0], 0)).answer == "Anna"
    assert environment.asked[0] == evaluated.asked[0]
    assert right == {"em": 1.0, "f1": 1.0} and failed == {"env/errors": 1}
    assert environment.sessions == ["1", "2"]  # by which one of several environments is drawn


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_the_rows_of_several_ranks_are_in_the_order_of_the_questions(count):
    """The table matches datasets by position."""
    for found in on_each_rank(3, lambda ranks: ranks.gather_lists(ranks.share(range(count)))):
        assert found == list(range(count))
    sizes = on_each_rank(3, lambda ranks: len(ranks.share(range(count))))
    assert max(sizes) - min(sizes) <= 1
