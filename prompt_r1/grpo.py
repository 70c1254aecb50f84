"""GRPO (paper, eqs 16-17): advantages within a group, clipped surrogate, KL to the frozen reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import torch
from torch import Tensor

from prompt_r1.types import Reward, ScoredGame, Trajectory


def compare_games(
    trajectories_PG: Sequence[Sequence[Trajectory]],
    rewards_PG: Sequence[Sequence[Reward | None]],
    *,
    numbers: Sequence[int],
) -> list[list[ScoredGame]]:
    """Give each of P × G games its reward and its advantage over the other games of its question.

    `numbers` are the places of the P questions among all questions of the step. A game's index follows from
    them, so it does not depend on which rank played it.
    """
    games_PG = []
    for number, trajectories, rewards in zip(numbers, trajectories_PG, rewards_PG, strict=True):
        advantages = group_advantages([None if reward is None else reward.total for reward in rewards])
        group = []
        for sample, trajectory in enumerate(trajectories):
            index = number * len(trajectories) + sample
            group.append(ScoredGame(trajectory, rewards[sample], advantages[sample], index))
        games_PG.append(group)
    return games_PG


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """Eq. 16: how much better each game did than the other games of its question.

        Â_i = (R_i - mean(R_1 … R_G)) / (std(R_1 … R_G) + 1e-6)        std with Bessel's correction

    A reward of None marks a game that the environment broke. It says nothing about the agent, so it leaves
    mean, std and loss. If more than a quarter of a group broke, the whole group leaves: all its advantages
    are None.
    """
    broken = rewards.count(None)
    if 4 * broken > len(rewards):
        return [None] * len(rewards)
    intact = [reward for reward in rewards if reward is not None]
    # Without spread there is nothing to compare. Eq. 16 would divide rounding errors by 1e-6.
    if len(intact) < 2 or max(intact) == min(intact):
        return [None if reward is None else 0.0 for reward in rewards]
    centre, scale = mean(intact), stdev(intact) + 1e-6
    return [None if reward is None else (reward - centre) / scale for reward in rewards]


@dataclass(frozen=True)
class LossColumns:
    """What a loss may read beside the policy's own log-probabilities: N agent tokens, one entry for each."""

    old: Tensor  # (N,) log π_old: the policy before this training step
    reference: Tensor  # (N,) log π_ref: the frozen start
    sampled: Tensor  # (N,) log π_engine: recorded when the token was sampled
    advantages: Tensor  # (N,) Â of the token's game
    weights: Tensor  # (N,) w; they sum to 1 over an optimiser step and all ranks
    game: Tensor  # (N,) int64 number of the token's game in this micro-batch


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch and its metrics. The scalars are shares: add them up over micro-batches."""

    total: Tensor  # scalar, with a gradient
    kl: Tensor  # scalar, weighted sum
    clip_frac: Tensor  # scalar, weighted share of tokens whose gradient the clip range cut off
    token_kl: Tensor  # (N,) k3 of each agent token


def grpo_loss(
    logprobs: Tensor,
    columns: LossColumns,
    *,
    clip: float,
    clip_high: float,
    kl_coef: float,
    importance_cap: float,
) -> Loss:
    """Eq. 17: clipped surrogate plus KL to the frozen reference, a weighted sum over the N agent tokens.

        r  = π_θ / π_old
        KL = π_ref / π_θ - log(π_ref / π_θ) - 1                              (k3, never negative)
        c  = min(π_old / π_engine, C)                                        C: importance_cap; 0: c = 1
        L  = Σ w [ -c min(r Â, clip(r, 1 - ε, 1 + ε_high) Â) + β KL ]        ε: clip, β: kl_coef

    `logprobs` (N,) are log π_θ of the policy that learns, the only tensor with a gradient. The weights w are
    1 / (games · |u|), see `training.batches`. `clip_high` 0 stands for ε, as in the paper.

    In 16 bits engine and policy round differently, so tokens come from another distribution than the policy
    that learns. c corrects the policy term for it (truncated importance sampling, Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl; `token_truncate` in TRL).
    """
    advantages, weights = columns.advantages, columns.weights
    ratio = (logprobs - columns.old).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip, 1 + (clip_high or clip)) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    log_ratio = columns.reference - logprobs
    kl = log_ratio.exp() - log_ratio - 1
    importance = (columns.old - columns.sampled).exp().clamp(max=importance_cap) if importance_cap else 1.0
    total = (weights * (-importance * surrogate + kl_coef * kl)).sum()
    clip_frac = (weights * (unclipped > surrogate)).sum()
    return Loss(total, (weights * kl).sum().detach(), clip_frac.detach(), kl.detach())
