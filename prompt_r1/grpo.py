"""GRPO (paper, eqs 16-17): advantages within a group, clipped surrogate, KL to the frozen reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import torch
from torch import Tensor

from prompt_r1.training.batches import Batch
from prompt_r1.types import Reward, ScoredGame, Trajectory


def compare_games(
    trajectories_PG: Sequence[Sequence[Trajectory]],
    rewards_PG: Sequence[Sequence[Reward | None]],
    *,
    numbers: Sequence[int],
) -> list[list[ScoredGame]]:
    """The P × G games with rewards and advantages. `numbers`: the questions' places in the step."""
    games_PG = []
    for number, trajectories, rewards in zip(numbers, trajectories_PG, rewards_PG, strict=True):
        advantages = group_advantages([reward.total if reward else None for reward in rewards])
        scored = zip(trajectories, rewards, advantages, strict=True)
        first = number * len(trajectories)
        games_PG.append([ScoredGame(*game, first + sample) for sample, game in enumerate(scored)])
    return games_PG


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """Eq. 16: how much better each game did than the other games of its question.

        Â_i = (R_i - mean(R_1 … R_G)) / (std(R_1 … R_G) + 1e-6)        std with Bessel's correction

    A reward of None is a game that the environment broke: it says nothing about the agent, so it leaves mean,
    std and loss. When more than a quarter of a group broke, all of it leaves: its advantages are None.
    """
    intact = [reward for reward in rewards if reward is not None]
    if 4 * rewards.count(None) > len(rewards):
        return [None] * len(rewards)
    if len(intact) < 2 or max(intact) == min(intact):  # by eq. 16, rounding errors over 1e-6
        return [None if reward is None else 0.0 for reward in rewards]
    centre, scale = mean(intact), stdev(intact) + 1e-6
    return [None if reward is None else (reward - centre) / scale for reward in rewards]


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch, and what is logged: shares of a mean, to be added up over micro-batches."""

    total: Tensor  # scalar, with a gradient
    kl: Tensor  # scalar, weighted sum
    clip_frac: Tensor  # scalar, weighted sum: the share of tokens that the clip range cut
    token_kl: Tensor  # (N,) k3 of each agent token


def grpo_loss(
    logprobs: Tensor,
    old: Tensor,
    ref: Tensor,
    batch: Batch,
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

    The tensors are (N,) log-probabilities: `logprobs` of the policy that learns, the only ones with a
    gradient; `old` its own before this training step; `ref` of the frozen reference. Advantages Â, weights w
    (1 / (games · |u|), see `micro_batches_of`) and π_engine are columns of the batch. `clip_high` 0: ε,
    as in the paper.

    In 16 bits engine and policy round differently, so tokens come from another distribution than the one that
    learns: c corrects the policy term for it (truncated importance sampling, Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl; `token_truncate` in TRL).
    """
    advantages, weights = batch.advantages, batch.weights
    ratio = (logprobs - old).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip, 1 + (clip_high or clip)) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    log_ratio = ref - logprobs
    kl = log_ratio.exp() - log_ratio - 1
    importance = (old - batch.engine).exp().clamp(max=importance_cap) if importance_cap else 1.0
    total = (weights * (-importance * surrogate + kl_coef * kl)).sum()
    clip_frac = (weights * (unclipped > surrogate)).sum()
    return Loss(total, (weights * kl).sum().detach(), clip_frac.detach(), kl.detach())
