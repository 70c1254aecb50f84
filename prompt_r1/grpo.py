"""GRPO (paper, eqs 16-17): advantages within a group, clipped surrogate, KL to the frozen reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import torch
from torch import Tensor


def group_advantages(rewards_PG: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Eq. 16: how much better each game did than the other games of its question.

        Â_i = (R_i - mean(R_1 … R_G)) / (std(R_1 … R_G) + 1e-6)        std with Bessel's correction

    All are 0 when the rewards of the group are equal or only one is left. A game that `compared` leaves out
    has None. The suffix PG: by question (P) and game (G).
    """
    return [_group_advantages(compared(rewards)) for rewards in rewards_PG]


def compared(rewards: Sequence[float | None]) -> list[float | None]:
    """The rewards of a group to compare: all None when more than a quarter of its games broke.

    A reward of None is a game that the environment, or the verifier of its answer, broke: it says nothing
    about the agent, so it leaves mean, std and loss.
    """
    broken = sum(reward is None for reward in rewards)
    return [None] * len(rewards) if 4 * broken > len(rewards) else list(rewards)


def _group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    intact = [reward for reward in rewards if reward is not None]
    if len(intact) < 2 or max(intact) == min(intact):
        return [None if reward is None else 0.0 for reward in rewards]
    centre, spread = mean(intact), stdev(intact)
    return [None if reward is None else (reward - centre) / (spread + 1e-6) for reward in rewards]


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
    advantages: Tensor,
    weights: Tensor,
    *,
    clip: float,
    kl_coef: float,
) -> Loss:
    """Eq. 17: clipped surrogate plus KL to the frozen reference, a weighted sum over the N agent tokens.

        r  = π_θ / π_old
        KL = π_ref / π_θ - log(π_ref / π_θ) - 1                        (k3, never negative)
        L  = Σ w [ -min(r Â, clip(r, 1 - ε, 1 + ε) Â) + β KL ]         ε: clip, β: kl_coef

    All tensors are (N,). `logprobs` are those of the policy that learns, the only ones with a gradient; `old`
    its own before this step of training; `ref` those of the frozen reference; `advantages` those of each
    token's game. `weights` hold the normalisation: over one optimiser step and all ranks they sum to 1 (or to
    less with --drop-even-groups), so that neither micro-batches nor the number of GPUs can change the loss.

    `options.objectives` has other ratios, an asymmetric clip range, and weights that correct for the rounding
    of a 16-bit engine, which are the default there.
    """
    ratio = (logprobs - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    kl = k3(logprobs, ref)
    total = (weights * (-surrogate + kl_coef * kl)).sum()
    clipped = (ratio * advantages > surrogate).float()
    return Loss(total, (weights * kl).sum().detach(), (weights * clipped).sum().detach(), kl.detach())


def k3(logprobs: Tensor, ref: Tensor) -> Tensor:
    """The estimate of KL(π_θ ‖ π_ref) from each token: π_ref / π_θ - log(π_ref / π_θ) - 1."""
    log_ratio = ref - logprobs
    return log_ratio.exp() - log_ratio - 1
