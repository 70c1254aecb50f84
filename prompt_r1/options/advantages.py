"""Other advantages than eq. 16 (`--advantages`), and groups without spread.

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
from statistics import mean

from prompt_r1.grpo import compared, group_advantages
from prompt_r1.types import Reward, ScoredGame, Trajectory

Rewards = Sequence[Sequence[float | None]]  # by question and game; None: the environment broke the game
Advantages = list[list[float | None]]
Groups = list[list[ScoredGame]]
Sum = Callable[[list[float]], list[float]]  # of each number, over all ranks; called by every rank


def compare_games(
    trajectories_PG: Sequence[Sequence[Trajectory]],
    rewards_PG: Sequence[Sequence[Reward | None]],
    *,
    advantages: str,
    sum_over_ranks: Sum,
) -> Groups:
    """The games with rewards and advantages, by a name of the table above. Called by every rank."""
    totals_PG = [[reward.total if reward else None for reward in rewards] for rewards in rewards_PG]
    if advantages == "group-mean-batch-std":
        advantages_PG = _group_mean_batch_std(totals_PG, sum_over_ranks)
    elif advantages == "no-std":
        advantages_PG = [_centred(rewards) for rewards in totals_PG]
    else:
        advantages_PG = group_advantages(totals_PG)
    columns_P = zip(trajectories_PG, rewards_PG, advantages_PG, strict=True)
    return [list(map(ScoredGame, *columns)) for columns in columns_P]


def _group_mean_batch_std(rewards_PG: Rewards, sum_over_ranks: Sum) -> Advantages:
    """Advantages with the mean of the group and the standard deviation of the step. Collective."""
    kept_PG = [[reward for reward in compared(rewards) if reward is not None] for rewards in rewards_PG]
    kept = [reward for rewards in kept_PG for reward in rewards]
    count, total = sum_over_ranks([len(kept), sum(kept)])
    centre = total / max(count, 1)
    [squares] = sum_over_ranks([sum((reward - centre) ** 2 for reward in kept)])
    spread: float = (squares / max(count - 1, 1)) ** 0.5
    return [_centred(rewards, scale=1 / (spread + 1e-6)) for rewards in rewards_PG]


def _centred(rewards: Sequence[float | None], *, scale: float = 1.0) -> list[float | None]:
    """(R_i - mean) · scale, in units of the reward."""
    rewards = compared(rewards)
    kept = [reward for reward in rewards if reward is not None]
    centre = mean(kept) if kept else 0.0
    return [None if reward is None else (reward - centre) * scale for reward in rewards]


def has_spread(group: Sequence[ScoredGame]) -> bool:
    """Whether any game of the group did better or worse than the others."""
    return any(game.advantage for game in group)
