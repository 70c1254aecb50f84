"""Micro-batches: games packed into one row, and what the loss needs of each agent token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prompt_r1.agent.packing import Group, Packed, by_opening, fill, pack
from prompt_r1.options.credit import token_advantages
from prompt_r1.types import ScoredGame, Trajectory


@dataclass(frozen=True)
class Batch:
    """A micro-batch of N agent tokens; its fields are the arguments of `grpo_loss`."""

    packed: Packed
    weights: Tensor  # (N,) sum to 1 over the micro-batches of an optimiser step and all ranks
    advantages: Tensor  # (N,) of each token's game, or turn
    engine: Tensor  # (N,) log-probabilities that the tokens were sampled with
    games: Tensor  # (N,) int64 number of each token's game in the micro-batch
    old: Tensor | None = None  # (N,) of the policy before this training step; None: it has not moved since
    ref: Tensor | None = None  # (N,) of the frozen reference; None: there is none


def sequence_mean_weight(trajectory: Trajectory, *, games: int) -> float:
    """Eq. 17: each of a step's M games (all ranks) counts 1 / M, each of its |u| agent tokens 1 / |u|."""
    return 1 / (games * sum(trajectory.sampled))


def token_mean_weight(trajectory: Trajectory, *, tokens: int) -> float:
    """`--loss token-mean`: every agent token of the step (all ranks) counts the same."""
    return 1 / tokens


def collate(
    games: Sequence[ScoredGame],
    token_weight: Callable[[Trajectory], float],
    *,
    tokens_per_batch: int,
    device: torch.device,
) -> list[Batch]:
    """Micro-batches of at most `tokens_per_batch` tokens (or one game), without padding.

    The weights are fixed for the whole step, so no split into micro-batches changes the sum of the gradients.
    """
    batches = full_batches(games, tokens_per_batch)
    return [make_batch(batch, token_weight, device) for batch in batches]


def full_batches(games: Sequence[ScoredGame], tokens_per_batch: int) -> list[list[ScoredGame]]:
    """The games of each micro-batch of at most `tokens_per_batch` tokens (or one game), full ones first."""
    batches = fill([game.trajectory for game in games], tokens_per_batch)
    return [[games[number] for group in batch for number in group] for batch in batches]


def make_batch(
    games: Sequence[ScoredGame], token_weight: Callable[[Trajectory], float], device: torch.device
) -> Batch:
    """One micro-batch of these games; those with a common opening share it."""
    trajectories = [game.trajectory for game in games]
    groups = [[games[number] for number in group] for group in by_opening(trajectories)]
    packed = pack([[game.trajectory for game in group] for group in groups], device)
    weights: list[float] = []
    advantages: list[float] = []
    recorded: list[float] = []
    numbers: list[int] = []
    for number, game in enumerate(game for group in groups for game in group):
        trajectory = game.trajectory
        count = sum(trajectory.sampled)
        weights += [token_weight(trajectory)] * count
        advantages += token_advantages(game)
        pairs = zip(trajectory.logprobs, trajectory.sampled, strict=True)
        recorded += [logprob for logprob, sampled in pairs if sampled]
        numbers += [number] * count
    columns = torch.tensor([weights, advantages, recorded], dtype=torch.float32, device=device)  # (3, N)
    number_of_game = torch.tensor(numbers, device=device)
    return Batch(packed, weights=columns[0], advantages=columns[1], engine=columns[2], games=number_of_game)


def empty_batch(device: torch.device) -> Batch:
    """A batch in which nothing is scored: its loss is 0, and so are its gradients."""
    token = torch.zeros(1, dtype=torch.long, device=device)
    no_index = torch.zeros(0, dtype=torch.long, device=device)
    no_value = torch.zeros(0, device=device)
    packed = Packed(token, token, (Group(0, 1, ()),), sources=no_index, targets=no_index)
    return Batch(packed, weights=no_value, advantages=no_value, engine=no_value, games=no_index)
