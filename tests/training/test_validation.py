"""Validation metrics, results tables and the metrics of a step, against numbers computed by hand."""

import asyncio
from dataclasses import replace

import pytest

from prompt_r1.errors import EnvError
from prompt_r1.metrics.statistics import wilson
from prompt_r1.reward import RULES, Rule, score_games
from prompt_r1.training.results import GameResult, failed_result, result_of_game
from prompt_r1.training.step_metrics import SAME_REPLY_QUESTIONS, game_metrics, step_metrics
from prompt_r1.training.validation import ask_directly, mean_metrics, results_table
from prompt_r1.types import Question, Reward, ScoredGame, Trajectory
from tests.games import GOOD, HALF, ONE_RANK, RIGHT, WRONG, game_of_turns
from tests.tiny import ScriptedEnvironment
from train import score_and_compare

RULE = RULES["release"]


def result(game: Trajectory) -> GameResult:
    """Score a game by RULE and return its result."""
    [reward] = score_games([game], rule=RULE)
    return result_of_game(ScoredGame(game, reward, None))


def test_a_failed_call_is_counted_as_an_error_and_left_out_of_the_means():
    broken = game_of_turns(GOOD, stop="env_error")
    broken.error = "HTTP 500"
    means = mean_metrics(map(result, [game_of_turns(GOOD, RIGHT), game_of_turns(WRONG), broken]))
    assert (means["n"], means["errors"]) == (2, 1)
    assert means["em"] == 0.5 and means["reward"] == pytest.approx((1.0 - 0.4) / 2)
    assert means["turns"] == 1.5


def test_the_table_has_a_row_for_each_dataset_and_the_mean_over_all_questions():
    results = [
        GameResult("1", "a", "x", 1.0, 1.0),
        GameResult("2", "a", "x", 0.0, 0.5),
        GameResult("3", "b", "x", 1.0, 1.0),
    ]
    lines = results_table({"direct": results}).splitlines()
    assert "| direct | a | 2 | 0 | 0.500 | 0.750 | – | – | – |" in lines
    assert "| **direct** | **all** | 3 | 0 | 0.667 | 0.833 | – | – | – |" in lines


def test_a_table_of_failed_calls_only_has_no_means():
    failed = failed_result(Question("1", "a", "?", ("x",)), "down")
    assert "| 0 | 1 | – | – |" in results_table({"direct": [failed]})


def test_ask_directly_asks_the_environment_for_the_answer_only():
    questions = [Question("1", "a", "Who?", ("Anna",)), Question("2", "a", "Who else?", ("Bob",))]
    environment = ScriptedEnvironment(["Anna", EnvError("down")])
    right, failed = asyncio.run(ask_directly(questions, environment.ask))
    assert environment.asked[0] == [{"role": "user", "content": "Who? Answer only."}]
    assert right.em == 1.0 and failed.error == "down"


def test_the_metrics_of_games_count_broken_games_but_leave_them_out_of_the_means():
    broken = result(game_of_turns(GOOD, stop="env_error"))
    metrics = game_metrics([result(game_of_turns(GOOD, RIGHT)), result(game_of_turns(WRONG)), broken])
    assert metrics["reward/mean"] == pytest.approx(0.3) and metrics["em"] == 0.5
    assert metrics["stop/env_error"] == pytest.approx(1 / 3) and metrics["env/errors"] == 1
    assert game_metrics([broken])["reward/mean"] == 0.0


def test_the_intervals_of_a_step_count_questions_not_games():
    """Five equal games of a question are one observation: repeating each game leaves the bounds unchanged."""
    questions = [Question(str(number), "test", "?", ("Anna Keller",)) for number in range(8)]
    endings = [RIGHT, RIGHT, WRONG, RIGHT, WRONG, RIGHT, RIGHT, WRONG]
    games = [
        replace(game_of_turns(GOOD, ending), question=question)
        for question, ending in zip(questions, endings, strict=True)
    ]
    once = game_metrics([result(game) for game in games])
    five_times = game_metrics([result(game) for game in games for _ in range(5)])
    assert (once["em_low"], once["em_high"]) == pytest.approx(wilson(5, 8))
    bounds = [name for name in once if name.endswith(("low", "high"))]
    assert all(five_times[name] == pytest.approx(once[name]) for name in bounds)
    assert "em_low" in once and "reward/mean_high" in once and "format_low" in once


def test_dropped_groups_are_a_share_of_all_groups_and_no_spread_of_the_kept_ones():
    """One of three groups is broken; one of the other two has equal rewards."""
    right, wrong = game_of_turns(GOOD, RIGHT), game_of_turns(WRONG)
    broken = game_of_turns(GOOD, stop="env_error")
    right.usd = 0.25
    games_PG = score_and_compare([[broken, broken], [right, right], [right, wrong]], RULE)
    metrics = step_metrics(games_PG, ONE_RANK, rollout_seconds=2.0)
    assert metrics["groups/dropped"] == pytest.approx(1 / 3) and metrics["groups/no_spread"] == 1 / 2
    assert metrics["games/s"] == 3.0
    assert metrics["groups/no_spread_calls"] == 2 and metrics["groups/no_spread_usd"] == 0.5
    only_broken = step_metrics(games_PG[:1], ONE_RANK, rollout_seconds=2.0)
    assert only_broken["groups/dropped"] == 1 and only_broken["groups/no_spread"] == 0


def pays_for_turns(trajectory: Trajectory, reward: Reward) -> float:
    """A leak: the reward of the user's depends on the turns alone."""
    return len(trajectory.turns) / 10


def test_a_pair_is_misranked_when_the_better_answer_gets_no_higher_reward():
    """Of games with an open gate. Here the longer games have the worse answers."""
    right, half = game_of_turns(GOOD, RIGHT), game_of_turns(GOOD, HALF)
    wrong = game_of_turns(GOOD, GOOD, WRONG)
    malformed = game_of_turns(RIGHT)  # no interaction: the gate is shut
    group = [right, half, wrong, malformed]

    def misranked(rule: Rule) -> float:
        games_PG = score_and_compare([group, [right, right]], rule)
        return step_metrics(games_PG, ONE_RANK, rollout_seconds=1.0)["reward/misranked"]

    assert misranked(RULE) == 0.0
    # right against half (equal rewards), right against wrong, half against wrong
    assert misranked(replace(RULE, own=pays_for_turns)) == 1.0
    assert misranked(replace(RULE, own=lambda game, reward: reward.total + len(game.turns))) == 2 / 3


def with_replies(*replies: str) -> Trajectory:
    """A game whose prompts got these replies."""
    game = game_of_turns(*[GOOD] * len(replies), RIGHT)
    turns = [replace(turn, reply=reply) for turn, reply in zip(game.turns, [*replies, None], strict=True)]
    return replace(game, turns=turns)


ERROR_TEXTS = [f"Error 429: too many requests, retry after {n} seconds (request a{n}f)" for n in range(20)]


@pytest.mark.parametrize(
    ("replies", "share"),
    [
        (ERROR_TEXTS[:10], 1.0),  # numbers and codes are taken as equal
        ([*ERROR_TEXTS[:4], *(f"The director is person {chr(65 + n)} of the list" for n in range(6))], 0.4),
        (["Yes."] * 10, 0.0),  # a bare answer may be right for many questions
        (ERROR_TEXTS[: SAME_REPLY_QUESTIONS - 1], 0.0),  # so few questions may have it by chance
    ],
)
def test_the_same_reply_to_most_questions_is_counted(replies, share):
    groups = [[with_replies(reply), with_replies(reply)] for reply in replies]
    metrics = step_metrics(score_and_compare(groups, RULE), ONE_RANK, rollout_seconds=1.0)
    assert metrics["env/same_reply"] == pytest.approx(share)
