"""Ratios of the clipped surrogate (eq. 17) other than that of each token (`--ratio`).

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


def token_ratios(games: Tensor, log_ratios: Tensor) -> Tensor:
    """The ratio (N,) of each token."""
    return log_ratios.exp()


def sequence_ratios(games: Tensor, log_ratios: Tensor) -> Tensor:
    """The ratio (N,) of each token's game. `games` (N,) are the numbers of the games, from 0."""
    sums = torch.zeros_like(log_ratios).index_add(0, games, log_ratios)  # as many places as there are tokens
    tokens = torch.zeros_like(log_ratios).index_add(0, games, torch.ones_like(log_ratios))
    return (sums / tokens.clamp(min=1)).exp()[games]


RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": token_ratios, "sequence": sequence_ratios}
