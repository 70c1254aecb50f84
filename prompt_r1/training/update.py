"""One optimiser step, and the metrics of an update. The loop over mini-batches is in train.py.

The update of a training step has one optimiser step for each mini-batch. Before the first one, `check_gap`
checks that the engine generated with the policy's weights. Each one checks that loss and gradient are finite.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from prompt_r1.errors import UsageError
from prompt_r1.grpo import Loss, LossColumns
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.policy import Policy, PolicyOutput, layers_of
from prompt_r1.model.sharding import full_tensor, weight_norm

GAP = "engine/logprob_gap"  # the metric of the largest difference of engine and policy, in nats
GAP_MEAN = f"{GAP}_mean"
# The metrics of the gap in an update without an optimiser step. All importance weights are 1.
NO_GAP = {
    GAP: 0.0,
    GAP_MEAN: 0.0,
    f"{GAP}_p99": 0.0,
    "engine/importance_mean": 1.0,
    "engine/importance_truncated": 0.0,
}
GRADIENT_LIMIT = 1.0  # the largest norm of a gradient
IMPORTANCE_CAP = 2.0  # the largest importance weight of a token in 16 bits (see `grpo_loss`)


@dataclass(frozen=True)
class BatchStats:
    """The measurements of a micro-batch."""

    # The value of an optimiser step is the sum of these four over its micro-batches and ranks.
    loss: float
    kl: float
    clip_frac: float
    entropy: float

    log_ratio: Tensor  # (N,) log(π_θ / π_engine) of each agent token
    token_kl: Tensor  # (N,) k3 of each agent token
    weights_moved: bool  # whether an earlier optimiser step of the same update was taken


@dataclass
class UpdateStats:
    """Collects the measurements of the micro-batches and optimiser steps of one update."""

    taken: int = 0  # optimiser steps
    skipped: int = 0  # optimiser steps whose loss or gradient was not finite
    grad_norms: float = 0.0  # summed over the optimiser steps that were taken
    gap: dict[str, float] = field(default_factory=NO_GAP.copy)  # measured before the first optimiser step
    pending: list[BatchStats] = field(default_factory=list)  # micro-batches of the next optimiser step
    used: list[BatchStats] = field(default_factory=list)  # micro-batches of the optimiser steps taken

    def add(self, columns: LossColumns, output: PolicyOutput, loss: Loss) -> None:
        """Add a micro-batch, after its backward."""
        measured = BatchStats(
            loss=loss.total.item(),
            kl=loss.kl.item(),
            clip_frac=loss.clip_frac.item(),
            entropy=(columns.weights * output.entropy).sum().item(),
            log_ratio=(output.logprobs.detach() - columns.engine).cpu(),
            token_kl=loss.token_kl.detach().cpu(),
            weights_moved=self.taken > 0,
        )
        self.pending.append(measured)

    def end_optimizer_step(self, *, taken: bool, grad_norm: float) -> None:
        """End an optimiser step. Its micro-batches count only if it was taken."""
        if taken:
            self.taken += 1
            self.grad_norms += grad_norm
            self.used += self.pending
        else:
            self.skipped += 1
        self.pending = []

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """The sums over all micro-batches and ranks, divided by the number of optimiser steps taken."""
        used = ranks.gather_lists(self.used)
        steps = max(1, self.taken)
        # Before the first optimiser step, the log-ratio is only rounding.
        moved = [batch.log_ratio.double() for batch in used if batch.weights_moved]
        tokens = sum(map(len, moved))
        return {
            "loss": sum(batch.loss for batch in used) / steps,
            "kl": sum(batch.kl for batch in used) / steps,
            "clip_frac": sum(batch.clip_frac for batch in used) / steps,
            "entropy": sum(batch.entropy for batch in used) / steps,
            "grad_norm": self.grad_norms / steps,
            "update/skipped": float(self.skipped),
            # Estimates KL(policy that sampled || policy now) as the mean of -log_ratio.
            "update/kl": -sum(log_ratio.sum().item() for log_ratio in moved) / max(tokens, 1),
            **self.gap,
            "kl_median": torch.cat([batch.token_kl for batch in used]).median().item() if used else 0.0,
        }


def gap_metrics(log_ratio: Tensor, *, cap: float) -> dict[str, float]:
    """The metrics of the gap and of the importance weights, over N tokens.

    `log_ratio` (N,) are the policy's log-probabilities minus the engine's, in nats. The gap of a token is the
    absolute value. Returns the maximum, the mean and the 99th percentile of the gap, the mean of the
    weights, and the share of weights that `cap` truncates. With `cap` 0 all weights are 1.
    """
    gap = log_ratio.abs()
    metrics = NO_GAP | {
        GAP: gap.max().item(),
        GAP_MEAN: gap.mean().item(),
        f"{GAP}_p99": gap.kthvalue(math.ceil(0.99 * len(gap))).values.item(),
    }
    if cap:
        ratio = log_ratio.exp()
        metrics["engine/importance_mean"] = ratio.clamp(max=cap).mean().item()
        metrics["engine/importance_truncated"] = (ratio > cap).float().mean().item()
    return metrics


@dataclass(frozen=True)
class GapLimit:
    """The limit of the gap between the log-probabilities of engine and policy."""

    metric: str  # the metric of the gap that has the limit
    alarm: float  # a higher value is an alarm
    stop: float  # a higher value ends the run before the update


def gap_limit_of(policy: Policy) -> GapLimit:
    """The limit for a policy's dtype of matrix products and its depth.

    The log-probabilities belong to the same tokens and weights, so only rounding may separate them. The alarm
    is set between the gaps of right models and the gaps of models with an injected error (RoPE frequencies
    2 % lower, attention scaled by 1.1, weights with 2 % noise, another temperature). Both were measured with
    five random models, the mini agent and SmolLM2-135M (30 layers) on a CPU:

        compute dtype   gap of tokens  right models      injected errors   alarm         stop
        float32         maximum        1e-6 to 5e-5      0.54 to 3.7       1e-4 or more  1e-2
        bfloat16        mean           0.001 to 0.022    0.053 to 0.38     0.05          0.5

    In float32, rounding errors add up over the layers: with SmolLM2's first 8, 15 and 30 layers, the mean gap
    is 8e-7, 3e-6 and 5e-6. So the alarm grows too, by 2.5e-5 for each layer.

    In bfloat16 a single token may be far off, so the limit is on the mean. It does not depend on the number
    of layers: with SmolLM2's 30 layers, the mean gap is 0.009.
    """
    if computes_in_16_bits(policy):
        return GapLimit(GAP_MEAN, alarm=0.05, stop=0.5)
    layers = len(layers_of(policy.model))
    return GapLimit(GAP, alarm=max(1e-4, 2.5e-5 * layers), stop=1e-2)


def importance_cap_of(policy: Policy) -> float:
    """The cap of the importance weights in the loss; 0 in float32, where engine and policy agree."""
    return IMPORTANCE_CAP if computes_in_16_bits(policy) else 0.0


def computes_in_16_bits(policy: Policy) -> bool:
    """Whether the policy's matrix products have 16 bits. Then it differs more from the engine."""
    return policy.compute_dtype.itemsize == 2


def check_gap(policy: Policy, ranks: Ranks, stats: UpdateStats, limit: GapLimit) -> None:
    """Measure the gap over the first mini-batch of all ranks, before the weights move.

    Every rank raises UsageError if a model other than the policy generated the games.
    """
    log_ratios = ranks.gather_lists([batch.log_ratio for batch in stats.pending])
    stats.gap = gap_metrics(torch.cat(log_ratios), cap=importance_cap_of(policy))
    value = stats.gap[limit.metric]
    if value > limit.stop:
        raise UsageError(
            f"the engine does not play the model that learns: {limit.metric} is {value:.3g} nats, above "
            f"{limit.stop:g}; no update was made, and the last checkpoint is kept: train another agent, "
            "or try --dtype float32"
        )


def optimizer_step(policy: Policy, optimizer: Optimizer, ranks: Ranks, stats: UpdateStats) -> None:
    """Sum the gradients over the ranks, clip them, and step.

    If loss or gradient is not finite on any rank, no rank takes the step. After the step, every rank raises
    UsageError if the weights are not finite. Then they are not saved.
    """
    ranks.sum_gradients(policy)
    # The norm over all weights and ranks, before it is clipped.
    grad_norm = full_tensor(clip_grad_norm_(policy.parameters(), GRADIENT_LIMIT)).item()
    loss = sum(batch.loss for batch in stats.pending)
    is_broken = not math.isfinite(grad_norm + loss)
    taken = not any(ranks.gather(is_broken))
    if taken:
        optimizer.step()
    stats.end_optimizer_step(taken=taken, grad_norm=grad_norm)
    optimizer.zero_grad(set_to_none=True)
    if not math.isfinite(weight_norm(policy)):  # the same number on every rank
        raise UsageError(
            "the weights are not finite after an optimiser step: they are not saved, and the last "
            "checkpoint is kept; start a new run with a smaller --lr"
        )
