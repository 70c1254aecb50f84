"""Losses of other papers in place of eq. 17: `python train.py --loss-function examples.losses:gspo`.

docs/using.md, "Your own loss or advantages", says what such a function takes and returns. All losses here
have the form of eq. 17, with another surrogate s for the policy, and the same KL and c:

    L = Σ w [ -c s + β KL ]        c = min(π_old / π_engine, C)

The weights w of the tokens of an optimiser step add up to 1. For M games with |u| agent tokens each:

    w = 1 / (M |u|)     with --loss sequence-mean; |u| is of the token's own game
    w = 1 / Σ |u|       with --loss token-mean; the sum is over the games of the step
"""

from dataclasses import replace

import torch
from torch import Tensor

from prompt_r1.grpo import Loss, LossColumns, grpo_loss

MAX_TOKENS = 1024  # Dr. GRPO divides by this number of tokens. Any constant does.
DUAL_CLIP = 3.0


def first_version(
    logprobs: Tensor, columns: LossColumns, *, kl_coef: float, importance_cap: float, **unused: float
) -> Loss:
    """Eq. 17 of the first version of Prompt-R1 (arXiv 2511.01016v1), without ratio and clip.

        s = Â log π_θ

    The gradient of the first optimiser step of a training step is the same as with ratio and clip.
    """
    surrogate = columns.advantages * logprobs
    is_clipped = torch.zeros_like(columns.weights)
    return loss_of_surrogate(
        surrogate, is_clipped, logprobs, columns, kl_coef=kl_coef, importance_cap=importance_cap
    )


def dr_grpo(
    logprobs: Tensor,
    columns: LossColumns,
    *,
    clip: float,
    clip_high: float,
    kl_coef: float,
    importance_cap: float,
) -> Loss:
    """Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), with --advantage centred and --loss sequence-mean.

        r = π_θ / π_old
        s = min(r Â, clip(r, 1 - ε, 1 + ε_high) Â)
        w = 1 / (M MAX_TOKENS)

    The mean over a game's tokens makes a token of a long game weigh less than a token of a short game, so
    that long wrong games cost little. Here all tokens weigh the same, whatever the other games are.
    """
    of_a_token = columns.weights * tokens_of_game(columns) / MAX_TOKENS
    return grpo_loss(
        logprobs,
        replace(columns, weights=of_a_token),
        clip=clip,
        clip_high=clip_high,
        kl_coef=kl_coef,
        importance_cap=importance_cap,
    )


def dual_clip(
    logprobs: Tensor,
    columns: LossColumns,
    *,
    clip: float,
    clip_high: float,
    kl_coef: float,
    importance_cap: float,
) -> Loss:
    """Dual-clip PPO (Ye et al. 2020, arXiv 1912.09729), as in the release of Prompt-R1.

        r = π_θ / π_old
        s = min(r Â, clip(r, 1 - ε, 1 + ε_high) Â)       if Â ≥ 0
            max(that, DUAL_CLIP Â)                       if Â < 0

    For a bad token, r Â is not bounded from below: a single ratio of 100 would rule the step.
    """
    ratio = (logprobs - columns.old).exp()
    advantages = columns.advantages
    once, _ = clipped_surrogate(ratio, advantages, clip=clip, clip_high=clip_high)
    surrogate = torch.where(advantages < 0, torch.maximum(once, DUAL_CLIP * advantages), once)
    is_clipped = ratio * advantages != surrogate
    return loss_of_surrogate(
        surrogate, is_clipped, logprobs, columns, kl_coef=kl_coef, importance_cap=importance_cap
    )


def gspo(
    logprobs: Tensor,
    columns: LossColumns,
    *,
    clip: float,
    clip_high: float,
    kl_coef: float,
    importance_cap: float,
) -> Loss:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071): one ratio for all tokens of a game.

        r = exp(1/|u| Σ log(π_θ / π_old))                over the agent's tokens of the game
        s = min(r Â, clip(r, 1 - ε, 1 + ε_high) Â)

    Such ratios are closer to 1 than those of tokens: the paper has --clip 3e-4 --clip-high 4e-4.
    """
    games = int(columns.game.max()) + 1 if len(columns.game) else 0
    sums = logprobs.new_zeros(games).index_add(0, columns.game, logprobs - columns.old)
    ratio = (sums[columns.game] / tokens_of_game(columns)).exp()
    surrogate, is_clipped = clipped_surrogate(ratio, columns.advantages, clip=clip, clip_high=clip_high)
    return loss_of_surrogate(
        surrogate, is_clipped, logprobs, columns, kl_coef=kl_coef, importance_cap=importance_cap
    )


def cispo(
    logprobs: Tensor,
    columns: LossColumns,
    *,
    clip: float,
    clip_high: float,
    kl_coef: float,
    importance_cap: float,
) -> Loss:
    """CISPO (MiniMax-M1, 2025, arXiv 2506.13585), with --loss token-mean.

        r = π_θ / π_old
        s = sg(min(r, 1 + ε_high)) Â log π_θ             sg: no gradient flows through it

    Where eq. 17 clips, a token has no gradient. Here it keeps its gradient, with a bounded weight.
    """
    ratio = (logprobs - columns.old).exp().detach()
    highest = 1 + (clip_high or clip)
    surrogate = ratio.clamp(max=highest) * columns.advantages * logprobs
    is_clipped = ratio > highest
    return loss_of_surrogate(
        surrogate, is_clipped, logprobs, columns, kl_coef=kl_coef, importance_cap=importance_cap
    )


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """s = min(r Â, clip(r, 1 - ε, 1 + ε_high) Â), and which tokens the clip range left without a gradient.

    All tensors are (N,), for N tokens. `clip_high` 0 stands for ε.
    """
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip, 1 + (clip_high or clip)) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    return surrogate, unclipped > surrogate


def loss_of_surrogate(
    surrogate: Tensor,
    is_clipped: Tensor,
    logprobs: Tensor,
    columns: LossColumns,
    *,
    kl_coef: float,
    importance_cap: float,
) -> Loss:
    """L = Σ w [ -c s + β KL ] and its metrics, for a surrogate s (N,). `grpo_loss` defines KL and c."""
    reference = columns.old if columns.reference is None else columns.reference
    log_ratio = reference - logprobs
    kl = log_ratio.exp() - log_ratio - 1
    importance = torch.ones_like(logprobs)
    if importance_cap:
        importance = (columns.old - columns.engine).exp().clamp(max=importance_cap)
    weights = columns.weights
    total = (weights * (-importance * surrogate + kl_coef * kl)).sum()
    clip_frac = (weights * is_clipped).sum()
    return Loss(total, (weights * kl).sum().detach(), clip_frac.detach(), kl.detach())


def tokens_of_game(columns: LossColumns) -> Tensor:
    """For each token (N,), the number of agent tokens in its game."""
    return columns.game.bincount()[columns.game]
