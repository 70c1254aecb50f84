"""Advantages other than those of eq. 16 (`--advantages`), and groups whose games all did equally well.

    group                  (R_i - mean(group)) / (std(group) + 1e-6)         eq. 16
    group-mean-batch-std   (R_i - mean(group)) / (std(step) + 1e-6)          as in TRL (scale_rewards="batch")
    no-std                  R_i - mean(group)                                Dr. GRPO

std(group) gives a group of nearly equal rewards the same influence as one with large differences: questions
that are nearly always or nearly never answered weigh most (Dr. GRPO: Liu et al. 2025, arXiv 2503.20783).
std(step) is that of all rewards of the training step, over all ranks (group mean and batch standard
deviation: Liu et al. 2025, arXiv 2508.08221; REINFORCE++, arXiv 2501.03262, divides the centred rewards by
their own standard deviation over the batch).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

from prompt_r1.types import ScoredGame

Groups = list[list[ScoredGame]]
Sum = Callable[[list[float]], list[float]]  # of each number, over all ranks; called by every rank


def group_mean_batch_std(games_PG: Groups, sum_over_ranks: Sum) -> Groups:
    """Advantages with the mean of the group and the standard deviation of the step. Collective."""
    rewards = [reward for group in games_PG for reward in _rewards(group)]
    count, total = sum_over_ranks([len(rewards), sum(rewards)])
    centre = total / max(count, 1)
    [squares] = sum_over_ranks([sum((reward - centre) ** 2 for reward in rewards)])
    spread: float = (squares / max(count - 1, 1)) ** 0.5
    return [_with_advantages(group, scale=1 / (spread + 1e-6)) for group in games_PG]


def group_mean(games_PG: Groups, sum_over_ranks: Sum) -> Groups:
    """Advantages that are differences to the mean of the group, in units of the reward."""
    return [_with_advantages(group, scale=1.0) for group in games_PG]


def group_mean_and_std(games_PG: Groups, sum_over_ranks: Sum) -> Groups:
    """The advantages of eq. 16, which the games have already."""
    return games_PG


ADVANTAGES: dict[str, Callable[[Groups, Sum], Groups]] = {
    "group": group_mean_and_std,
    "group-mean-batch-std": group_mean_batch_std,
    "no-std": group_mean,
}


def _rewards(group: Sequence[ScoredGame]) -> list[float]:
    """The rewards of the games to train on: without those that left, alone or with their group."""
    return [game.reward.total for game in group if game.reward and game.advantage is not None]


def _with_advantages(group: Sequence[ScoredGame], *, scale: float) -> list[ScoredGame]:
    """The group with (R_i - mean) · scale as advantages. A game that left stays without one."""
    rewards = _rewards(group)
    centre = mean(rewards) if rewards else 0.0
    return [
        replace(game, advantage=(game.reward.total - centre) * scale)
        if game.reward and game.advantage is not None
        else game
        for game in group
    ]


def has_spread(group: Sequence[ScoredGame]) -> bool:
    """Whether any game of the group did better or worse than the others."""
    return any(game.advantage or any(game.turn_advantages) for game in group)
