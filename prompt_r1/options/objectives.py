"""Losses with other ratios, clip ranges and importance weights.

    token      r_t = π_θ(w_t) / π_old(w_t)                                   eq. 17
    sequence   s   = exp( 1/|u| Σ_t log(π_θ(w_t) / π_old(w_t)) )             GSPO: of each game

GSPO (Zheng et al. 2025, arXiv 2507.18071, eqs 5-7) clips a game as a whole: its reward is that of the whole
game, and single tokens have noisy ratios, most of all in mixture-of-experts models. Every token of the game
has the ratio s, so with `--loss sequence-mean` the surrogate is min(s Â, clip(s) Â) / M per game, and its
gradient is that of the paper, s Â / (M |u|) Σ_t ∇ log π_θ(w_t). A mean of logarithms stays closer to 0 than
each of them, so the clip range must be smaller: the authors use 3e-4 below and 4e-4 above 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from prompt_r1.grpo import Loss


def weighted_loss(
    ratio: Tensor,
    importance: Tensor,
    kl: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip: tuple[float, float],
    kl_coef: float,
    dual_clip: float = 0.0,
    reverse_kl: bool = False,
) -> Loss:
    """Eq. 17 with any ratio, a clip range below and above 1, and importance weights.

        L = Σ w [ -c min(r Â, clip(r, 1 - ε, 1 + ε_high) Â) + β KL ]

    `dual_clip` d (Ye et al. 2020, arXiv 1912.09729; 0: none) bounds what a bad game's token of any ratio
    costs: for Â < 0 the min is at least d Â. Differentiated, k3 gives the gradient of KL(π_ref ‖ π_θ) where
    π_θ has sampled; `reverse_kl` multiplies it by r, which gives that of KL(π_θ ‖ π_ref).

    As in TRL 1.16 (GRPOTrainer), the importance weight c is for the policy term only.
    """
    below, above = clip
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - below, 1 + above) * advantages)
    if dual_clip:
        surrogate = torch.where(advantages < 0, surrogate.maximum(dual_clip * advantages), surrogate)
    penalty = ratio * kl if reverse_kl else kl
    total = (weights * (-importance * surrogate + kl_coef * penalty)).sum()
    clipped = (ratio * advantages != surrogate).float()
    return Loss(total, (weights * kl).sum().detach(), (weights * clipped).sum().detach(), kl.detach())


def importance_weights(old: Tensor, engine: Tensor, *, cap: float) -> Tensor:
    """The weight (N,) that corrects each token for the engine that sampled it.

        c = min(π_old / π_engine, C)                                   C: cap; 0: no correction, c = 1

    In 16 bits engine and policy round differently: tokens come from another distribution than the one that
    learns. This is token-level truncated importance
    sampling (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; `token_truncate` in TRL).
    """
    return (old - engine).exp().clamp(max=cap) if cap else torch.ones_like(old)


def token_ratios(games: Tensor, log_ratios: Tensor) -> Tensor:
    """The ratio (N,) of each token."""
    return log_ratios.exp()


def sequence_ratios(games: Tensor, log_ratios: Tensor) -> Tensor:
    """The ratio (N,) of each token's game. `games` (N,) are the numbers of the games, from 0."""
    sums = torch.zeros_like(log_ratios).index_add(0, games, log_ratios)  # as many places as there are tokens
    tokens = torch.zeros_like(log_ratios).index_add(0, games, torch.ones_like(log_ratios))
    return (sums / tokens.clamp(min=1)).exp()[games]


RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": token_ratios, "sequence": sequence_ratios}
