"""Validation metrics, against numbers computed by hand."""

import pytest

from prompt_r1.reward import RULES
from prompt_r1.training.metrics import metrics_of_game
from prompt_r1.training.validation import mean_metrics
from tests.support.games import GOOD, RIGHT, WRONG, game_of_turns, score_and_compare
from tests.support.thread_ranks import on_each_rank


def test_a_failed_call_is_counted_as_an_error_and_left_out_of_the_means():
    broken = game_of_turns(GOOD, stop="env_error")
    broken.error = "HTTP 500"
    games = [game_of_turns(GOOD, RIGHT), game_of_turns(WRONG), broken]
    [scored] = score_and_compare([games], RULES["release"])
    means = mean_metrics([metrics_of_game(game) for game in scored])
    assert (means["n"], means["errors"]) == (2, 1)
    assert means["em"] == 0.5 and means["reward"] == pytest.approx((1.0 - 0.4) / 2)
    assert means["turns"] == 1.5


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_the_rows_of_several_ranks_are_in_the_order_of_the_questions(count):
    for found in on_each_rank(3, lambda ranks: ranks.gather_lists(ranks.share(range(count)))):
        assert found == list(range(count))
    sizes = on_each_rank(3, lambda ranks: len(ranks.share(range(count))))
    assert max(sizes) - min(sizes) <= 1
