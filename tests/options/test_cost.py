"""The cost-aware advantage: the charge of each game, against its formula, and what it may never do."""

import random
from statistics import fmean

import pytest

from prompt_r1.config.train import PRESETS, TrainConfig, check
from prompt_r1.errors import UsageError
from prompt_r1.grpo import group_advantages
from prompt_r1.options.cost import MOST_WEIGHT, charge_costs
from prompt_r1.types import Action, Question, Reward, ScoredGame, Trajectory, Turn

QUESTION = Question("q", "bridge", "Who?", ("Bob",))
ASKED = Turn("", Action("I ask.", "Who?", None, clean=True), "Bob.")


def group(
    rewards: list[float | None], costs: list[float], *, calls: list[int] | None = None
) -> list[ScoredGame]:
    """A scored and compared group of games with these rewards and dollars."""
    [advantages] = group_advantages([rewards])
    return [
        ScoredGame(
            Trajectory(QUESTION, usd=usd, turns=[ASKED] * count),
            None if reward is None else Reward(1.0, 0.0, reward),
            advantage,
        )
        for reward, usd, advantage, count in zip(
            rewards, costs, advantages, calls or [0] * len(costs), strict=True
        )
    ]


def charged(games: list[ScoredGame], weight: float = 0.5) -> list[float | None]:
    [result] = charge_costs([games], weight=weight, unit="usd")
    return [game.advantage for game in result]


def test_of_equally_right_games_the_cheaper_ones_are_better():
    advantages = charged(group([1.0] * 4, [4e-6, 1e-6, 1e-6, 2e-6]))
    # The mean is 2e-6 and the dearest 4e-6: -0.5 × (2, -1, -1, 0) / 4.
    assert advantages == pytest.approx([-0.25, 0.125, 0.125, 0.0])


def test_the_charge_is_that_of_the_formula_and_sums_to_zero():
    rng = random.Random(0)
    for _ in range(300):
        rewards = [rng.choice([1.0, 1.0, 0.6, 0.2, 0.0, -0.4, -1.5]) for _ in range(5)]
        costs = [rng.uniform(0.0, 3e-3) for _ in rewards]
        games = group(rewards, costs)
        paid = [max(0.0, reward) for reward in rewards]
        expected = [game.advantage for game in games]
        if any(paid):
            centre = sum(p * c for p, c in zip(paid, costs, strict=True)) / sum(paid)
            dearest = max(c for p, c in zip(paid, costs, strict=True) if p > 0)
            for number, (p, c) in enumerate(zip(paid, costs, strict=True)):
                expected[number] -= 0.3 * p * (c - centre) / dearest
        after = charged(games, weight=0.3)
        assert after == pytest.approx(expected)
        assert fmean(after) == pytest.approx(fmean(game.advantage for game in games), abs=1e-9)


def test_a_cheap_wrong_game_never_beats_a_dear_right_one():
    rng = random.Random(1)
    closest = float("inf")
    for _ in range(20_000):
        size = rng.randint(2, 8)
        wrong_rewards = rng.choice([[0.0], [0.0, -1.5], [0.0, -0.5, -1.5], [-0.4, -1.0]])
        rewards = [rng.choice([1.0, rng.choice(wrong_rewards)]) for _ in range(size)]
        costs = [rng.choice([0.0, 1e-6, rng.random()]) for _ in rewards]
        advantages = charged(group(rewards, costs), weight=MOST_WEIGHT)
        right = [a for a, reward in zip(advantages, rewards, strict=True) if reward == 1]
        wrong = [a for a, reward in zip(advantages, rewards, strict=True) if reward <= 0]
        if right and wrong:
            closest = min(closest, min(right) - max(wrong))
    assert closest > 0.2


def test_wrong_games_and_groups_without_a_right_game_are_not_charged():
    for rewards in ([0.0, 0.0, -0.4], [-1.0, 0.0, 0.0]):
        games = group(rewards, [3.0, 1.0, 0.0])
        assert charged(games) == [game.advantage for game in games]
    games = group([1.0, 0.0, 0.0], [3.0, 1.0, 0.0])
    assert charged(games) == [game.advantage for game in games]  # one right game: nothing to compare with


def test_games_that_the_environment_broke_stay_out():
    games = group([1.0, 1.0, 1.0, None], [2.0, 1.0, 0.0, 9.0])
    assert charged(games) == pytest.approx([-0.25, 0.0, 0.25, None])


def test_the_cost_may_be_the_number_of_calls():
    games = group([1.0, 1.0], [0.0, 0.0], calls=[3, 1])
    [after] = charge_costs([games], weight=0.5, unit="calls")
    assert [game.advantage for game in after] == pytest.approx([-1 / 6, 1 / 6])


def test_without_weight_or_costs_nothing_changes():
    games = group([1.0, 1.0, 0.0], [2.0, 1.0, 0.0])
    assert charge_costs([games], weight=0.0, unit="usd") == [games]
    free = group([1.0, 1.0, 0.0], [0.0, 0.0, 0.0])
    assert charge_costs([free], weight=0.5, unit="usd") == [free]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"cost_weight": 0.6, "env_price": ("1,2",)}, "at most 0.5"),
        ({"cost_weight": 0.1}, "--env-price"),
        ({"cost_weight": 0.1, "cost_of": "calls", "credit": "turn"}, "whole games"),
        ({"cost_weight": 0.1, "cost_of": "calls", "explain": True}, "--explain"),
        ({"env": "mini", "route": "agent"}, "several environments"),
        ({"env": "mini,mini", "route": "agent"}, "same name"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, problem):
    with pytest.raises(UsageError, match=problem):
        check(TrainConfig(**{**PRESETS["mini"], **settings}))
    check(TrainConfig(**PRESETS["mini"], cost_weight=0.5, cost_of="calls"))
