"""GRPO (paper, eqs 16-17): advantages within a group, clipped surrogate, KL to the frozen reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

import torch
from torch import Tensor

from prompt_r1.types import Reward, ScoredGame, Trajectory

OwnAdvantages = Callable[[Sequence[ScoredGame]], Sequence[Sequence[float]]]
"""A user's own advantages: takes the compared games of a group. Returns for each game a number per turn."""


def compare_games(
    trajectories_PG: Sequence[Sequence[Trajectory]],
    rewards_PG: Sequence[Sequence[Reward | None]],
    *,
    numbers: Sequence[int],
    standardise: bool = True,
    own: OwnAdvantages | None = None,
) -> list[list[ScoredGame]]:
    """Give each of P × G games its reward, and its advantage over the other games of its question.

    `numbers` are the numbers of the P questions among all questions of the step. The index of a game is
    computed from them, so it does not depend on which rank played the game. `own` replaces the advantages
    of eq. 16 by a number for each turn. A game without an advantage keeps None.
    """
    games_PG = []
    for number, trajectories, rewards in zip(numbers, trajectories_PG, rewards_PG, strict=True):
        totals = [None if reward is None else reward.total for reward in rewards]
        advantages = group_advantages(totals, standardise=standardise)
        group = []
        for sample, trajectory in enumerate(trajectories):
            index = number * len(trajectories) + sample
            group.append(ScoredGame(trajectory, rewards[sample], advantages[sample], index))
        games_PG.append(group if own is None else with_own_advantages(group, own))
    return games_PG


def with_own_advantages(group: Sequence[ScoredGame], own: OwnAdvantages) -> list[ScoredGame]:
    """The games of a group with a user's advantages. Games that are not compared stay as they are."""
    compared = [game for game in group if game.advantage is not None]
    if not compared:
        return list(group)
    changed = {}
    for game, turn_advantages in zip(compared, own(compared), strict=True):
        changed[game.index] = replace(game, advantage=mean(turn_advantages), turn_advantages=turn_advantages)
    return [changed.get(game.index, game) for game in group]


def group_advantages(rewards: Sequence[float | None], *, standardise: bool = True) -> list[float | None]:
    """Eq. 16: how much better each game did than the other games of its question.

        Â_i = (R_i - mean(R_1 … R_G)) / (std(R_1 … R_G) + 1e-6)        std with Bessel's correction

    Without `standardise` it is the difference alone (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783).

    A reward of None marks a game that the environment broke. Such a game says nothing about the agent, so it
    does not count in mean, std and loss. If more than a quarter of a group broke, the whole group is left
    out: all its advantages are None.
    """
    broken = rewards.count(None)
    if 4 * broken > len(rewards):
        return [None] * len(rewards)
    intact = [reward for reward in rewards if reward is not None]
    # Without spread there is nothing to compare. Eq. 16 would divide rounding errors by 1e-6.
    if len(intact) < 2 or max(intact) == min(intact):
        return [None if reward is None else 0.0 for reward in rewards]
    centre = mean(intact)
    scale = stdev(intact) + 1e-6 if standardise else 1.0
    return [None if reward is None else (reward - centre) / scale for reward in rewards]


@dataclass(frozen=True, kw_only=True)
class LossColumns:
    """What a loss may read, beside log π_θ, of the N agent tokens of a micro-batch."""

    old: Tensor  # (N,) log π_old of the policy before this training step
    reference: Tensor | None  # (N,) log π_ref of the frozen start; None without it (kl_coef 0)
    engine: Tensor  # (N,) log π_engine, recorded when the engine sampled the token
    advantages: Tensor  # (N,) Â of the token's game, or of its turn
    weights: Tensor  # (N,) w. The weights of an optimiser step, over all ranks, add up to 1.
    # (N,) int64, the token's game, by its number in this micro-batch. A game is never split.
    game: Tensor


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch and its metrics.

    The scalars of all micro-batches add up to the values of the optimiser step.
    """

    total: Tensor  # scalar with a gradient
    kl: Tensor  # scalar, Σ w KL
    clip_frac: Tensor  # scalar, Σ w over the tokens whose surrogate the clip range left without a gradient
    token_kl: Tensor  # (N,) KL of each agent token


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
                                                                             ε_high: clip_high; 0: ε

    `logprobs` (N,) are log π_θ of the policy that learns. No other tensor has a gradient. The weights w are
    1 / (M · |u|) for M games in the optimiser step, over all ranks, and |u| agent tokens in the token's game
    (see `training.batches`). With c = 1, L is eq. 17 of the paper's later version. (The first version, with
    the policy term -w Â log π_θ, is in examples/losses.py.)

    In 16 bits engine and policy round differently, so the tokens were sampled from a slightly other
    distribution than π_old. c corrects the policy term for this difference (truncated importance sampling,
    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; `token_truncate` in TRL).
    """
    weights, advantages = columns.weights, columns.advantages
    ratio = (logprobs - columns.old).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip, 1 + (clip_high or clip)) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    # Without a reference, the KL to π_old is measured.
    reference = columns.old if columns.reference is None else columns.reference
    log_ratio = reference - logprobs
    kl = log_ratio.exp() - log_ratio - 1
    importance = torch.ones_like(logprobs)
    if importance_cap:
        importance = (columns.old - columns.engine).exp().clamp(max=importance_cap)
    total = (weights * (-importance * surrogate + kl_coef * kl)).sum()
    # Where the clipped term is the smaller one, it is a constant, and only the KL has a gradient.
    clip_frac = (weights * (unclipped > surrogate)).sum()
    mean_kl = (weights * kl).sum()
    return Loss(total, mean_kl.detach(), clip_frac.detach(), kl.detach())
