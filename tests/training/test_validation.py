"""Validation metrics, against numbers computed by hand."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace

import pytest

from prompt_r1.reward import RULES
from prompt_r1.training.metrics import metrics_of_game
from prompt_r1.training.validation import mean_metrics, play_share
from prompt_r1.types import ScoredGame
from tests.support.games import GOOD, ONE_RANK, RIGHT, WRONG, game_of_turns, score_and_compare
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


def test_after_a_share_of_games_the_cache_of_the_agent_holds_none_of_them():
    """The cache would otherwise keep blocks of games that never go on. They are dropped before the write."""
    events: list[str] = []
    engine = SimpleNamespace(drop_cache=lambda: events.append("drop"))

    def play(work: Coroutine[None, None, list[ScoredGame]]) -> list[ScoredGame]:
        events.append("play")
        return asyncio.run(work)

    run = SimpleNamespace(
        ranks=ONE_RANK,
        environment=None,
        config=SimpleNamespace(base_rule=RULES["release"]),
        own_reward=None,
        wait_for=play,
        log=SimpleNamespace(write_games=lambda name, games_PG: events.append(f"write {name}")),
    )
    assert play_share(run, SimpleNamespace(engine=engine), [], name="test-trained") == []
    assert events == ["play", "drop", "write test-trained"]
