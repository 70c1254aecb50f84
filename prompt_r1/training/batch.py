"""Micro-batches of games, and the weight of each token in the loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prompt_r1.agent.packing import Group, Packed, fill, pack
from prompt_r1.types import Reward, Trajectory


@dataclass(frozen=True)
class Sample:
    """A game to train on, its reward, and how much better it was than its siblings."""

    trajectory: Trajectory
    reward: Reward
    advantage: float


@dataclass(frozen=True)
class Batch:
    """A micro-batch: games in one row, and what the loss needs of each of their N agent tokens."""

    packed: Packed
    weights: Tensor  # (N,) they sum to 1 over the batches and ranks of a step
    advantages: Tensor  # (N,) of each token's game
    engine_logprobs: Tensor  # (N,) recorded while sampling
    old_logprobs: Tensor  # (N,) of the policy that sampled
    ref_logprobs: Tensor  # (N,) of the frozen reference; of the policy that sampled where there is none


def sequence_mean_weight(trajectory: Trajectory, *, games: int) -> float:
    """Eq. 17: each of the step's M games (all ranks) counts 1 / M, and each of its tokens 1 / |u| of it."""
    return 1 / (games * sum(trajectory.sampled))


def token_mean_weight(_: Trajectory, *, tokens: int) -> float:
    """Every agent token of the step counts the same (one denominator over all ranks)."""
    return 1 / tokens


def collate(
    samples: Sequence[Sample],
    token_weight: Callable[[Trajectory], float],
    *,
    tokens_per_batch: int,
    device: torch.device,
) -> list[Batch]:
    """Micro-batches of at most `tokens_per_batch` tokens (or one game), without padding.

    Since the weights are fixed for the whole step, no split into batches can change the sum of the gradients.
    """
    batches = []
    for numbers_GN in fill([sample.trajectory for sample in samples], tokens_per_batch):
        groups = [[samples[number] for number in numbers] for numbers in numbers_GN]
        batches.append(_batch(groups, token_weight, device))
    return batches


def _batch(
    groups: list[list[Sample]], token_weight: Callable[[Trajectory], float], device: torch.device
) -> Batch:
    packed = pack([[sample.trajectory for sample in group] for group in groups], device)
    samples = [sample for group in groups for sample in group]
    rows = [
        (token_weight(sample.trajectory), sample.advantage, logprob)
        for sample in samples
        for sampled, logprob in zip(sample.trajectory.sampled, sample.trajectory.logprobs, strict=True)
        if sampled
    ]
    weights, advantages, recorded = torch.tensor(rows, dtype=torch.float32, device=device).unbind(1)
    return Batch(
        packed, weights, advantages,
        engine_logprobs=recorded, old_logprobs=recorded, ref_logprobs=recorded,
    )  # fmt: skip


def nothing(device: torch.device) -> Batch:
    """A batch in which nothing is scored: its loss is 0, and so are its gradients."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    token = torch.zeros(1, dtype=torch.long, device=device)
    return Batch(Packed(token, token, (Group(0, 1, ()),), sources=none, targets=none), *[none.float()] * 5)
