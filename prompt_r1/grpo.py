"""GRPO (paper, eqs 16-17): advantages within a group; clipped surrogate and KL to the frozen reference."""

from dataclasses import dataclass
from statistics import mean, stdev

import torch
from torch import Tensor

from prompt_r1.training.batch import Batch
from prompt_r1.types import Trajectory


def group_advantages(rewards_PG: list[list[float]]) -> list[list[float]]:
    """Eq. 16: (R - mean) / (std + 1e-6) in each group, std with Bessel's correction; 0 where all are equal.

    Groups may differ in size: games that the environment broke have left theirs.
    """
    return [_standardise(rewards) for rewards in rewards_PG]


def _standardise(rewards: list[float]) -> list[float]:
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    centre, spread = mean(rewards), stdev(rewards)
    return [(reward - centre) / (spread + 1e-6) for reward in rewards]


def survivors(group: list[Trajectory]) -> list[Trajectory]:
    """The games of a group that the environment did not break; none when more than a quarter of them broke.

    A broken game leaves mean, spread and loss: its reward would say nothing about the agent.
    """
    alive = [trajectory for trajectory in group if trajectory.stop != "env_error"]
    return alive if 4 * len(alive) >= 3 * len(group) else []


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch, and what to watch beside it."""

    total: Tensor  # scalar
    metrics: dict[str, Tensor]  # scalars; weighted sums, to be added up over batches and ranks
    kl: Tensor  # (N,) k3 of each agent token


def grpo_loss(logprobs: Tensor, batch: Batch, *, clip: float, kl_coef: float) -> Loss:
    """Eq. 17: clipped surrogate plus k3 KL to the frozen reference; a weighted sum over the agent's tokens.

    logprobs (N,) are the policy's, the only ones with a gradient.
    """
    ratio = (logprobs - batch.old_logprobs).exp()  # (N,)
    surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - clip, 1 + clip) * batch.advantages)

    to_reference = batch.ref_logprobs - logprobs
    kl = to_reference.exp() - to_reference - 1  # k3, never negative

    total = (batch.weights * (-surrogate + kl_coef * kl)).sum()
    clipped = (ratio * batch.advantages > surrogate).float()
    metrics = {"loss": total, "kl": (batch.weights * kl).sum(), "clip_frac": (batch.weights * clipped).sum()}
    return Loss(total, {name: value.detach() for name, value in metrics.items()}, kl.detach())
