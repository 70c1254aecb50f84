"""GRPO (paper, eqs 16-17): advantages within a group, clipped surrogate, KL to the frozen reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import torch
from torch import Tensor


def group_advantages(rewards_PG: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Eq. 16: how much better each game did than the other games of its question.

        Â_i = (R_i - mean(R_1 … R_G)) / (std(R_1 … R_G) + 1e-6)        std with Bessel's correction

    All advantages of a group are 0 when its rewards are equal. A reward of None is a game that the
    environment broke: it says nothing about the agent, so it leaves mean, std and loss (its advantage is
    None). When more than a quarter of a group broke, the whole group leaves.
    """
    return [_group_advantages(rewards) for rewards in rewards_PG]


def _group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    intact = [reward for reward in rewards if reward is not None]
    if 4 * len(intact) < 3 * len(rewards):
        return [None] * len(rewards)
    if len(intact) < 2 or max(intact) == min(intact):
        return [None if reward is None else 0.0 for reward in rewards]
    centre, spread = mean(intact), stdev(intact)
    return [None if reward is None else (reward - centre) / (spread + 1e-6) for reward in rewards]


def importance_weights(old: Tensor, engine: Tensor, *, cap: float) -> Tensor:
    """The weight (N,) that corrects each token for the engine that sampled it.

        c = min(π_old / π_engine, C)                                   C: cap; 0: no correction, c = 1

    In 16 bits engine and policy round differently, and with `--ahead 1` the engine's weights are older, so it
    samples from another distribution than the one that learns. This is token-level truncated importance
    sampling (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; `token_truncate` in TRL).
    """
    return (old - engine).exp().clamp(max=cap) if cap else torch.ones_like(old)


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch and the metrics logged beside it."""

    total: Tensor  # scalar, with a gradient
    metrics: dict[str, Tensor]  # scalars; weighted sums, to be added up over micro-batches and ranks
    kl: Tensor  # (N,) k3 of each agent token


def grpo_loss(
    logprobs: Tensor,
    old: Tensor,
    ref: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip: float | tuple[float, float],
    kl_coef: float,
    importance: Tensor | float = 1.0,
    ratio_of: Callable[[Tensor], Tensor] = torch.exp,
) -> Loss:
    """Eq. 17: clipped surrogate plus KL to the frozen reference, a weighted sum over the N agent tokens.

        r  = π_θ / π_old
        KL = π_ref / π_θ - log(π_ref / π_θ) - 1                        (k3, never negative)
        L  = Σ w [ -c min(r Â, clip(r, 1 - ε, 1 + ε) Â) + β KL ]       ε: clip, β: kl_coef, c: importance

    All tensors are (N,). `logprobs` are those of the policy that learns, the only ones with a gradient; `old`
    those of the policy that sampled; `ref` those of the frozen reference; `advantages` those of each token's
    game. `weights` hold mask and normalisation together and sum to 1 over one optimiser step and all ranks,
    so that neither padding nor micro-batches nor the number of GPUs can change the loss. `importance` is that
    of `importance_weights`, without gradient; the paper's loss has c = 1. As in TRL 1.16 (GRPOTrainer), it
    weights the policy term only. A pair `clip` is ε below and above 1. `ratio_of` maps log r to r.
    """
    below, above = clip if isinstance(clip, tuple) else (clip, clip)
    ratio = ratio_of(logprobs - old)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - below, 1 + above) * advantages)
    log_ratio_to_ref = ref - logprobs
    kl = log_ratio_to_ref.exp() - log_ratio_to_ref - 1
    total = (weights * (-importance * surrogate + kl_coef * kl)).sum()

    clipped = (ratio * advantages > surrogate).float()
    metrics = {"loss": total, "kl": (weights * kl).sum(), "clip_frac": (weights * clipped).sum()}
    return Loss(total, {name: value.detach() for name, value in metrics.items()}, kl.detach())
