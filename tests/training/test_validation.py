"""Means and tables against numbers worked out by hand; the records that the curves are made of."""

import asyncio
from dataclasses import replace

import pytest
import torch

from prompt_r1.distributed.ranks import Ranks
from prompt_r1.errors import EnvError
from prompt_r1.grpo import group_advantages, survivors
from prompt_r1.metrics.statistics import wilson
from prompt_r1.reward import RULES, score
from prompt_r1.training.batch import ScoredGame
from prompt_r1.training.step_metrics import game_metrics, record, step_metrics
from prompt_r1.training.validation import Result, ask_directly, judge, means, table
from prompt_r1.types import Question, Trajectory
from tests.games import GOOD, RIGHT, WRONG, game_of_turns
from tests.tiny import ScriptedEnvironment

RULE = RULES["release"]


def test_a_failed_call_is_counted_apart_and_lowers_no_mean():
    broken = game_of_turns(GOOD, stop="env_error")
    broken.error = "HTTP 500"
    averages = means(
        [
            judge(game_of_turns(GOOD, RIGHT), rule=RULE),
            judge(game_of_turns(WRONG), rule=RULE),
            judge(broken, rule=RULE),
        ]
    )
    assert (averages["n"], averages["errors"]) == (2, 1)
    assert averages["em"] == 0.5 and averages["reward"] == pytest.approx((1.0 - 0.4) / 2)
    assert averages["turns"] == 1.5


def test_the_table_has_a_row_a_dataset_and_the_mean_of_the_questions():
    results = [
        Result("1", "a", "x", 1.0, 1.0),
        Result("2", "a", "x", 0.0, 0.5),
        Result("3", "b", "x", 1.0, 1.0),
    ]
    lines = table({"direct": results}).splitlines()
    assert "| direct | a | 2 | 0 | 0.500 | 0.750 | – | – | – |" in lines
    assert "| **direct** | **all** | 3 | 0 | 0.667 | 0.833 | – | – | – |" in lines


def test_nothing_scored_gives_a_table_and_no_division_by_zero():
    assert "| 0 | 1 | – | – |" in table({"direct": [Result("1", "a", "", 0.0, 0.0, error="down")]})


def test_the_environment_alone_is_asked_for_the_answer_only():
    questions = [Question("1", "a", "Who?", ("Anna",)), Question("2", "a", "Who else?", ("Bob",))]
    environment = ScriptedEnvironment(["Anna", EnvError("down")])
    right, failed = asyncio.run(ask_directly(questions, environment.ask))
    assert environment.asked[0] == [{"role": "user", "content": "Who? Answer only."}]
    assert right.em == 1.0 and failed.error == "down"


def test_the_curves_leave_out_broken_games_but_count_them():
    records = [
        record(g, rule=RULE)
        for g in (game_of_turns(GOOD, RIGHT), game_of_turns(WRONG), game_of_turns(GOOD, stop="env_error"))
    ]
    metrics = game_metrics(records)
    assert metrics["reward/mean"] == pytest.approx(0.3) and metrics["em"] == 0.5
    assert metrics["stop/env_error"] == pytest.approx(1 / 3) and metrics["env/errors"] == 1
    assert game_metrics(records[2:])["reward/mean"] == 0.0


def test_the_intervals_of_a_step_count_questions_not_games():
    """Five equal games of a question are no five observations: repeating each game moves no bound."""
    questions = [Question(str(number), "test", "?", ("Anna Keller",)) for number in range(8)]
    endings = [RIGHT, RIGHT, WRONG, RIGHT, WRONG, RIGHT, RIGHT, WRONG]
    games = [
        replace(game_of_turns(GOOD, ending), question=question)
        for question, ending in zip(questions, endings, strict=True)
    ]
    once = game_metrics([record(game, rule=RULE) for game in games])
    five_times = game_metrics([record(game, rule=RULE) for game in games for _ in range(5)])
    assert (once["em_low"], once["em_high"]) == pytest.approx(wilson(5, 8))
    assert all(
        five_times[name] == pytest.approx(once[name]) for name in once if name.endswith(("low", "high"))
    )
    assert "em_low" in once and "reward/mean_high" in once and "format_low" in once


def test_the_shares_of_groups_are_over_the_kept_groups_and_over_all():
    """One of three groups broke; of the two others one has equal rewards."""
    right, wrong, broken = (
        game_of_turns(GOOD, RIGHT),
        game_of_turns(WRONG),
        game_of_turns(GOOD, stop="env_error"),
    )
    groups_PG = [[broken, broken], [right, right], [right, wrong]]
    alone = Ranks(0, 1, torch.device("cpu"))
    samples_PG = samples(groups_PG)
    metrics = step_metrics(groups_PG, samples_PG, RULE, alone, rollout_seconds=2.0)
    assert metrics["groups/dropped"] == pytest.approx(1 / 3) and metrics["groups/no_spread"] == 1 / 2
    assert metrics["games/s"] == 3.0
    nothing = step_metrics(groups_PG[:1], samples_PG[:1], RULE, alone, rollout_seconds=2.0)
    assert nothing["groups/dropped"] == 1 and nothing["groups/no_spread"] == 0


def samples(groups_PG: list[list[Trajectory]]) -> list[list[ScoredGame]]:
    """The samples to train on; a broken group has none."""
    alive_PG = [survivors(group) for group in groups_PG]
    rewards_PG = [[score(trajectory, rule=RULE) for trajectory in group] for group in alive_PG]
    advantages_PG = group_advantages([[reward.total for reward in rewards] for rewards in rewards_PG])
    return [
        list(map(ScoredGame, group, rewards, advantages))
        for group, rewards, advantages in zip(alive_PG, rewards_PG, advantages_PG, strict=True)
    ]
