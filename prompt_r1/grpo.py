"""GRPO (paper, eqs 16-17): advantages within a group; clipped surrogate and KL to the frozen reference."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

import torch
from torch import Tensor

from prompt_r1.types import Reward, Trajectory


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
class Sample:
    """A game to train on, its reward, and how much better it was than its siblings."""

    trajectory: Trajectory
    reward: Reward
    advantage: float


@dataclass(frozen=True)
class Batch:
    """A micro-batch of B games, right-padded to T tokens. Entry t of (B, T-1) is about token t+1."""

    tokens: Tensor  # (B, T) int64
    weights: Tensor  # (B, T-1) mask and normalisation in one: sums to 1 over a step's batches and ranks
    advantages: Tensor  # (B,)
    engine_logprobs: Tensor  # (B, T-1) recorded while sampling
    old_logprobs: Tensor  # (B, T-1) of the policy that sampled
    ref_logprobs: Tensor  # (B, T-1) of the frozen reference; equal to old_logprobs where there is none

    @property
    def scored(self) -> Tensor:
        """(B, T-1) bool: the agent's own tokens."""
        return self.weights > 0


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch, and what to watch beside it."""

    total: Tensor  # scalar
    metrics: dict[str, Tensor]  # scalars; weighted sums, to be added up over batches and ranks
    kl: Tensor  # (N,) k3 of each agent token


def sequence_mean_weight(trajectory: Trajectory, *, games: int) -> float:
    """Eq. 17: each of the step's M games (all ranks) counts 1 / M, and each of its tokens 1 / |u| of it."""
    return 1 / (games * sum(trajectory.sampled))


def token_mean_weight(_: Trajectory, *, tokens: int) -> float:
    """Every agent token of the step counts the same (one denominator over all ranks)."""
    return 1 / tokens


def collate(
    samples: Iterable[Sample],
    token_weight: Callable[[Trajectory], float],
    *,
    tokens_per_batch: int,
    device: torch.device,
) -> list[Batch]:
    """Micro-batches of games of similar length, each of at most `tokens_per_batch` padded tokens (or one
    game).

    Since the weights are fixed for the whole step, no split into batches can change the sum of the gradients.
    """
    batches: list[list[Sample]] = []
    longest = 0
    for sample in sorted(samples, key=lambda sample: len(sample.trajectory.tokens), reverse=True):
        if not batches or (len(batches[-1]) + 1) * longest > tokens_per_batch:
            batches.append([])
            longest = len(sample.trajectory.tokens)
        batches[-1].append(sample)
    return [_pad(batch, token_weight, device) for batch in batches]


def _pad(
    samples: Sequence[Sample], token_weight: Callable[[Trajectory], float], device: torch.device
) -> Batch:
    longest = max(len(sample.trajectory.tokens) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    weights = torch.zeros(len(samples), longest)
    logprobs = torch.zeros(len(samples), longest)
    for row, sample in enumerate(samples):
        trajectory = sample.trajectory
        length = len(trajectory.tokens)
        tokens[row, :length] = torch.tensor(trajectory.tokens)
        weights[row, :length] = torch.tensor(trajectory.sampled) * token_weight(trajectory)
        logprobs[row, :length] = torch.tensor(trajectory.logprobs)
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    recorded = logprobs[:, 1:].to(device)
    return Batch(
        tokens.to(device), weights[:, 1:].to(device), advantages.to(device),
        engine_logprobs=recorded, old_logprobs=recorded, ref_logprobs=recorded,
    )  # fmt: skip


def nothing(device: torch.device) -> Batch:
    """A batch in which nothing is scored: its loss is 0, and so are its gradients."""
    zeros, tokens = torch.zeros(1, 1, device=device), torch.zeros(1, 2, dtype=torch.long, device=device)
    return Batch(tokens, zeros, zeros[0], engine_logprobs=zeros, old_logprobs=zeros, ref_logprobs=zeros)


def with_logprobs(batch: Batch, *, old: Tensor | None = None, reference: Tensor | None = None) -> Batch:
    """The same batch with log-probabilities (B, T-1) that a model recomputed."""
    changes = {"old_logprobs": old, "ref_logprobs": reference}
    return replace(batch, **{name: value for name, value in changes.items() if value is not None})


def grpo_loss(logprobs: Tensor, batch: Batch, *, clip: float, kl_coef: float) -> Loss:
    """Eq. 17: clipped surrogate plus k3 KL to the frozen reference; a weighted sum over the agent's tokens.

    logprobs (B, T-1) are the policy's, the only ones with a gradient.
    """
    mask = batch.scored
    advantage = batch.advantages[:, None]
    # Where nothing is scored both sides are 0: the ratio is 1 and the weight 0.
    ratio = (logprobs - batch.old_logprobs.where(mask, logprobs.detach())).exp()  # (B, T-1)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)

    to_reference = batch.ref_logprobs.where(mask, logprobs.detach()) - logprobs
    kl = to_reference.exp() - to_reference - 1  # k3, never negative

    total = (batch.weights * (-surrogate + kl_coef * kl)).sum()
    clipped = (ratio * advantage > surrogate).float()
    metrics = {"loss": total, "kl": (batch.weights * kl).sum(), "clip_frac": (batch.weights * clipped).sum()}
    return Loss(total, {name: value.detach() for name, value in metrics.items()}, kl.detach()[mask])
