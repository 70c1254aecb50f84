"""How far the engine's log-probabilities may be from the policy's.

They belong to the same tokens and the same weights, so only rounding may separate them. The alarm is between
what was measured for right models and for injected errors (RoPE frequencies 2 % lower, attention scaled by
1.1, weights with 2 % noise, another temperature), with five random models and the mini agent on a CPU:

    compute dtype   of a token   right models      injected errors   alarm   stop
    float32         maximum      1e-6 to 1.7e-5    0.54 to 3.7       1e-4    1e-2
    bfloat16        mean         0.001 to 0.022    0.053 to 0.38     0.05    0.5

What rounding leaves in 16 bits is corrected by importance weights (`options.objectives.importance_weights`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prompt_r1.errors import UsageError

NAME = "engine/logprob_gap"
MEAN = f"{NAME}_mean"
HIGH = f"{NAME}_p99"
IMPORTANCE = "engine/importance_mean"
TRUNCATED = "engine/importance_truncated"


@dataclass(frozen=True)
class Limit:
    """A metric of the gap, the value from which it is an alarm, and the one from which no update is made."""

    metric: str
    alarm: float
    stop: float


def limit_of(compute: torch.dtype) -> Limit:
    """The limit for a dtype of matrix products. In 16 bits a single token may be far off."""
    return Limit(NAME, 1e-4, 1e-2) if compute.itemsize >= 4 else Limit(MEAN, 0.05, 0.5)


def gap_metrics(differences: Sequence[Tensor], *, cap: float) -> dict[str, float]:
    """The gap and the importance weights of all tokens.

    `differences` are the policy's log-probabilities minus the engine's, in nats. The gap is their distance
    from 0: its maximum, mean and 99th percentile. Of the weights: the mean, and the share that `cap`
    truncates.
    """
    difference = torch.cat([torch.zeros(0), *differences])
    if not len(difference):
        return {NAME: 0.0, MEAN: 0.0, HIGH: 0.0, IMPORTANCE: 1.0, TRUNCATED: 0.0}
    gap = difference.abs()
    high = gap.kthvalue(math.ceil(0.99 * len(gap))).values
    ratio = difference.exp()
    weights = ratio.clamp(max=cap) if cap else torch.ones(1)
    truncated = ratio > cap if cap else torch.zeros(1)
    return {
        NAME: gap.max().item(),
        MEAN: gap.mean().item(),
        HIGH: high.item(),
        IMPORTANCE: weights.mean().item(),
        TRUNCATED: truncated.float().mean().item(),
    }


def check_gap(metrics: Mapping[str, float], limit: Limit) -> None:
    """Raise UsageError if engine and policy are plainly different models."""
    value = metrics[limit.metric]
    if value > limit.stop:
        raise UsageError(
            f"the engine does not play the model that learns: {limit.metric} is {value:.3g} nats, above "
            f"{limit.stop:g}; no update was made, and the last checkpoint is kept: train another agent, or "
            "try --dtype float32"
        )
