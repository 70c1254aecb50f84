"""Other advantages against a recomputation from their formulas, and groups without spread."""

from statistics import mean, stdev

import pytest

from prompt_r1.distributed import Ranks
from prompt_r1.grpo import group_advantages
from prompt_r1.options.advantages import compare_games, has_spread
from prompt_r1.training.micro_batches import mini_batches_of
from prompt_r1.types import Reward, ScoredGame
from tests.support import tiny
from tests.support.games import ONE_RANK, Learner, random_game, random_scored_games, record_logprobs_of
from tests.training.thread_ranks import on_each_rank

REWARDS: list[list[float | None]] = [
    [1.0, -0.25, 0.5, 1.0],
    [0.3, 0.3, 0.3, 0.3],
    [-1.0, None, 1.0, 0.9],  # the environment broke a game
    [None, None, 1.0, 0.0],  # it broke too many: the group left
    [-1.0, -1.0, -1.0, -0.9],
]
INTACT = [[1.0, -0.25, 0.5, 1.0], [0.3, 0.3, 0.3, 0.3], [-1.0, 1.0, 0.9], [], [-1.0, -1.0, -1.0, -0.9]]


def advantages_of(
    name: str, rewards_PG: list[list[float | None]], ranks: Ranks = ONE_RANK
) -> list[list[float | None]]:
    """The advantages of games with these rewards, which are this rank's."""
    trajectories_PG = [[random_game(number) for number in range(len(rewards))] for rewards in rewards_PG]
    scores_PG = [
        [None if reward is None else Reward(1, 0, reward) for reward in rewards] for rewards in rewards_PG
    ]
    games_PG = compare_games(trajectories_PG, scores_PG, advantages=name, sum_over_ranks=ranks.sum)
    return [[game.advantage for game in group] for group in games_PG]


def test_by_default_games_have_the_advantages_of_eq_16():
    assert advantages_of("group", REWARDS) == group_advantages(REWARDS)


@pytest.mark.parametrize("name", ["group-mean-batch-std", "no-std"])
def test_other_advantages_are_those_of_their_formulas(name):
    """A game that left is in no mean and in no standard deviation."""
    divisor = 1.0
    if name == "group-mean-batch-std":
        divisor = stdev([reward for rewards in INTACT for reward in rewards]) + 1e-6
    got = advantages_of(name, REWARDS)
    rows = zip(got, REWARDS, INTACT, strict=True)
    for advantages, rewards, intact in rows:
        assert [value is None for value in advantages] == [not intact or reward is None for reward in rewards]
        expected = [(reward - mean(intact)) / divisor for reward in intact]
        values = [value for value in advantages if value is not None]
        assert values == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert got[1] == [0.0] * 4


def test_advantages_do_not_depend_on_how_the_questions_are_divided_over_ranks():
    """The rewards of the second rank are far from those of the first: its own mean is another."""
    name = "group-mean-batch-std"
    divided = on_each_rank(2, lambda ranks: advantages_of(name, REWARDS[4 * ranks.rank :][:4], ranks))
    together = advantages_of(name, REWARDS)
    for one, other in zip([*divided[0], *divided[1]], together, strict=True):
        assert [value or 0 for value in one] == pytest.approx([value or 0 for value in other], rel=1e-12)


def test_an_empty_share_of_a_rank_and_a_step_without_spread_have_finite_advantages():
    for name in ("group", "group-mean-batch-std", "no-std"):
        assert advantages_of(name, []) == [], name
        assert advantages_of(name, [[0.5, 0.5]]) == [[0.0, 0.0]]
        assert advantages_of(name, [[None, None]]) == [[None, None]]


def test_without_even_groups_the_others_keep_their_weight_in_the_mini_batch():
    """A bug: alone, one or two groups took a step as large as that of a full mini-batch."""
    groups = [random_scored_games(9)[start : start + 3] for start in (0, 3, 6)]
    groups[1] = [ScoredGame(game.trajectory, game.reward, 0.0) for game in groups[1]]
    assert [has_spread(group) for group in groups] == [True, False, True]
    gradients = []
    for trained_on, drop_even, least in ((groups, True, 9), (groups, False, 0), (groups, True, 0)):
        policy = tiny.policy()
        for group in trained_on:
            record_logprobs_of(policy, group)
        count = len(trained_on)
        steps = mini_batches_of(
            trained_on, games=3 * count, group_size=3, mini_batch=9, numbers=range(count), drop_even=drop_even
        )
        metrics = Learner(policy, grad_clip=float("inf"), kl_coef=0.0, least_games=least).learn(steps)
        gradients.append(metrics["grad_norm"])
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-6) != gradients[2]
    assert gradients[1] == pytest.approx(gradients[2] * 2 / 3, rel=1e-6)
