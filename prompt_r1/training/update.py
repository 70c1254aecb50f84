"""The update of one training step: its optimiser steps, and what is measured of them.

The loop over micro-batches stands in train.py. Every method is called by every rank or by none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from prompt_r1.errors import UsageError
from prompt_r1.grpo import Loss
from prompt_r1.model.distributed import Ranks, full_tensor
from prompt_r1.model.packing import Packed
from prompt_r1.model.policy import Policy, TokenScores, blocks_of
from prompt_r1.training.batches import Batch

GRADIENT_LIMIT = 1.0  # the largest norm of a gradient
IMPORTANCE_CAP = 2.0  # of the loss in 16 bits; in float32 the engine samples from the policy itself
GAP = "engine/logprob_gap"
GAP_MEAN = f"{GAP}_mean"
# Weighted sums over a micro-batch: over all micro-batches and ranks they are means over the agent's tokens.
MEANS = ("loss", "kl", "clip_frac", "entropy")


class Measured(NamedTuple):
    """What is measured of a micro-batch."""

    means: dict[str, float]  # its part of MEANS
    moved: Tensor  # (N,) nats, the engine's minus the policy's log-probability; (0,) until a step is taken
    token_kl: Tensor  # (N,) k3 of each agent token


@dataclass(frozen=True)
class Limit:
    """A metric of the gap, the value from which it is an alarm, and the one from which no update is made."""

    metric: str
    alarm: float
    stop: float


def limit_of(policy: Policy) -> Limit:
    """The limit for a policy's dtype of matrix products and its depth.

    The log-probabilities belong to the same tokens and weights, so only rounding may separate them. The alarm
    is between what was measured for right models and for injected errors (RoPE frequencies 2 % lower,
    attention scaled by 1.1, weights with 2 % noise, another temperature), with five random models, the mini
    agent and SmolLM2-135M (30 layers) on a CPU:

        compute dtype   of a token   right models      injected errors   alarm         stop
        float32         maximum      1e-6 to 5e-5      0.54 to 3.7       1e-4 or more  1e-2
        bfloat16        mean         0.001 to 0.022    0.053 to 0.38     0.05          0.5

    In float32 rounding errors add up over the layers: the mean of SmolLM2's first 8, 15 and 30 layers is
    8e-7, 3e-6 and 5e-6. So does the alarm: 2.5e-5 for each layer. In bfloat16 a single token may be far off,
    and the mean does not grow: it is 0.009 with SmolLM2's 30 layers.
    """
    if policy.compute.itemsize >= 4:
        return Limit(GAP, max(1e-4, 2.5e-5 * len(blocks_of(policy.model))), 1e-2)
    return Limit(GAP_MEAN, 0.05, 0.5)


def gap_metrics(differences: Sequence[Tensor], *, cap: float) -> dict[str, float]:
    """The gap and the importance weights of all tokens.

    `differences` are the policy's log-probabilities minus the engine's, in nats. The gap is their distance
    from 0: its maximum, mean and 99th percentile. Of the weights: the mean, and the share that `cap`
    truncates.
    """
    difference = torch.cat(list(differences)) if differences else torch.zeros(1)
    gap = difference.abs()
    high = gap.kthvalue(math.ceil(0.99 * len(gap))).values
    ratio = difference.exp()
    weights = ratio.clamp(max=cap) if cap else torch.ones(1)
    truncated = ratio > cap if cap else torch.zeros(1)
    return {
        GAP: gap.max().item(),
        GAP_MEAN: gap.mean().item(),
        f"{GAP}_p99": high.item(),
        "engine/importance_mean": weights.mean().item(),
        "engine/importance_truncated": truncated.float().mean().item(),
    }


Reference = Callable[[Packed], Tensor | None]  # the reference's log-probabilities (N,); None: no reference


class Update:
    """Takes the optimiser steps of one training step, and collects their metrics."""

    def __init__(self, policy: Policy, optimizer: Optimizer, ranks: Ranks, *, gap_limit: Limit) -> None:
        self.policy = policy
        self.importance_cap = 0.0 if policy.compute.itemsize >= 4 else IMPORTANCE_CAP
        self.taken = self.skipped = 0  # optimiser steps
        self._optimizer = optimizer
        self._ranks = ranks
        self._gap_limit = gap_limit
        self._gap = gap_metrics([], cap=self.importance_cap)  # measured before the first optimiser step
        self._current: list[Measured] = []  # micro-batches of the next optimiser step
        self._used: list[Measured] = []  # those of the steps that were taken
        self._grad_norm = 0.0  # summed over these steps
        # Policy's minus engine's log-probabilities of each micro-batch's tokens, in nats.
        self._differences: list[Tensor] = []

    def record(self, batch: Batch, scores: TokenScores, loss: Loss) -> None:
        """Add a micro-batch to the metrics of its optimiser step."""
        gap = scores.logprobs.detach() - batch.engine
        if self.taken + self.skipped == 0:  # the weights have not moved yet
            self._differences.append(gap.cpu())
        parts = loss.total, loss.kl, loss.clip_frac, (batch.weights * scores.entropy).sum()
        means = {name: part.item() for name, part in zip(MEANS, parts, strict=True)}
        moved = -gap.double() if self.taken else gap[:0]
        self._current.append(Measured(means, moved.cpu(), loss.token_kl.cpu()))

    def take_step(self) -> None:
        """Sum the gradients over the ranks, clip them, and step.

        When loss or gradient is not finite on any rank, no rank takes the step. Raises UsageError, the same
        on every rank, before a step on games of another model than the policy, and when the weights are not
        finite afterwards: they must not be saved.
        """
        if self.taken + self.skipped == 0:
            self._check_gap()
        step, self._current = self._current, []
        self._ranks.sum_gradients(self.policy)
        # The norm over all weights and ranks, before it is clipped.
        grad_norm = full_tensor(clip_grad_norm_(self.policy.parameters(), GRADIENT_LIMIT)).item()
        broken = not math.isfinite(grad_norm + sum(batch.means["loss"] for batch in step))
        if any(self._ranks.gather(broken)):
            self.skipped += 1
        else:
            self._optimizer.step()
            self.taken += 1
            self._used += step
            self._grad_norm += grad_norm
        self._optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(self._ranks.weight_norm(self.policy)):  # the same number on every rank
            raise UsageError(
                "the weights are not finite after an optimiser step: they are not saved, and the last "
                "checkpoint is kept; start a new run with a smaller --lr"
            )

    def _check_gap(self) -> None:
        """Measure the gap. Raises UsageError if engine and policy are plainly different models."""
        differences = self._ranks.gather_lists(self._differences)
        self._gap, limit = gap_metrics(differences, cap=self.importance_cap), self._gap_limit
        value = self._gap[limit.metric]
        if value > limit.stop:
            raise UsageError(
                f"the engine does not play the model that learns: {limit.metric} is {value:.3g} nats, above "
                f"{limit.stop:g}; no update was made, and the last checkpoint is kept: train another agent, "
                "or try --dtype float32"
            )

    def metrics(self) -> dict[str, float]:
        """Means over the optimiser steps that were taken and over all ranks."""
        used, count = self._ranks.gather_lists(self._used), max(1, self.taken)
        moved_tokens = sum(len(batch.moved) for batch in used)
        token_kl = torch.cat([torch.zeros(0), *(batch.token_kl for batch in used)])
        return {
            **{name: sum(batch.means[name] for batch in used) / count for name in MEANS},
            "grad_norm": self._grad_norm / count,
            "update/skipped": float(self.skipped),
            "update/kl": sum(batch.moved.sum().item() for batch in used) / max(moved_tokens, 1),
            **self._gap,
            "kl_median": token_kl.median().item() if len(token_kl) else 0.0,
        }
