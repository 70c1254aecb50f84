"""The games that each rank computes together, as tensors.

Games of a question are stored in one row with their opening once (`agent.packing`), so they stay together
unless the ranks would wait for each other: then they are split, and each part repeats the opening.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from prompt_r1.model.distributed import Ranks
from prompt_r1.model.packing import Packed, pack
from prompt_r1.types import ScoredGame, Trajectory


@dataclass(frozen=True)
class Batch:
    """A micro-batch of N agent tokens."""

    packed: Packed
    weights: Tensor  # (N,) sum to 1 over the micro-batches of an optimiser step and all ranks
    advantages: Tensor  # (N,) of each token's game
    engine: Tensor  # (N,) log-probabilities that the tokens were sampled with


def mini_batches_of(
    games_PG: Sequence[Sequence[ScoredGame]], ranks: Ranks, *, mini_batch: int
) -> list[list[ScoredGame]]:
    """The games of all ranks to train on, by optimiser step of `mini_batch` games that were played.

    Called by every rank with the games that it played. A game's place follows from its index, so it does not
    depend on how many ranks there are. Groups stay whole where `mini_batch` is a multiple of their size.
    """
    played = [
        replace(game, trajectory=replace(game.trajectory, turns=[]))  # the loss needs no text
        for group in games_PG
        for game in group
        if game.advantage is not None
    ]
    games = sorted(ranks.gather_lists(played), key=lambda game: game.index)
    return [list(step) for _, step in groupby(games, key=lambda game: game.index // mini_batch)]


def micro_batches_of(
    games: Sequence[ScoredGame], ranks: Ranks, *, tokens_per_batch: int, token_mean: bool
) -> list[Batch]:
    """This rank's micro-batches of an optimiser step on these games of all ranks.

    Every rank gets equally many, some of them perhaps empty: sharded weights are gathered by all ranks for
    each forward. Eq. 17: each of M games counts 1 / M, each of its |u| tokens 1 / |u|. With `token_mean` all
    tokens of the mini-batch count alike. Over all micro-batches and ranks the weights of the tokens sum to 1,
    so neither can change the loss.
    """
    trajectories = [game.trajectory for game in games]
    tokens = sum(sum(trajectory.sampled) for trajectory in trajectories)

    def weight(trajectory: Trajectory) -> float:
        """The weight w of each agent token of a game."""
        return 1 / (tokens if token_mean else len(games) * sum(trajectory.sampled))

    shares = divide(trajectories, ranks=ranks.count, tokens_per_batch=tokens_per_batch)
    return [make_batch([games[n] for n in batch], weight, ranks.device) for batch in shares[ranks.rank]]


def divide(games: Sequence[Trajectory], *, ranks: int, tokens_per_batch: int) -> list[list[list[int]]]:
    """The numbers of the games of each micro-batch of each rank; greedy, longest first.

    A micro-batch has at most `tokens_per_batch` packed tokens or a single game. One rank gets as few as
    possible: whole groups, each in the first micro-batch that has room. Several ranks wait for each other at
    every micro-batch, so all get equally many of about equal size (some may be empty): groups are cut to half
    of that size, and each part goes to the micro-batch that stays smallest with it. The result depends on the
    arguments alone.
    """
    groups = by_opening(games)
    openings = {n: (key, games[n].opening) for key, group in enumerate(groups) for n in group}

    def size(numbers: Iterable[int]) -> int:
        """Columns of a packed row of these games: each opening once, and no last token."""
        own = [len(games[n].tokens) - 1 - openings[n][1] for n in numbers]
        return sum(own) + sum(length for _, length in {openings[n] for n in numbers})

    total = size(range(len(games)))
    per_rank = math.ceil(total / (ranks * tokens_per_batch))
    most = tokens_per_batch if ranks == 1 else min(tokens_per_batch, total // (2 * ranks * max(per_rank, 1)))
    parts: list[list[int]] = []
    for group in groups:
        longest_first = sorted(group, key=lambda n: len(games[n].tokens), reverse=True)
        parts += first_fit([[n] for n in longest_first], lambda part: size(part) <= most)
    parts.sort(key=size, reverse=True)
    if ranks == 1:
        return [first_fit(parts, lambda batch: size(batch) <= tokens_per_batch)]
    while True:
        batches: list[list[int]] = [[] for _ in range(ranks * per_rank)]
        for part in parts:
            # Of equal ones the emptiest: else games without tokens of their own would never be spread.
            smallest = min(batches, key=lambda batch: (size([*batch, *part]), len(batch)))
            smallest += part
        if all(len(batch) == 1 or size(batch) <= tokens_per_batch for batch in batches):
            batches.sort(key=size, reverse=True)  # those of one time are about equally large
            return [batches[rank::ranks] for rank in range(ranks)]
        per_rank += 1


def first_fit(parts: Iterable[list[int]], fits: Callable[[list[int]], bool]) -> list[list[int]]:
    """Put each part into the first bin that still fits with it, or into a new one."""
    bins: list[list[int]] = []
    for part in parts:
        roomy = next((one for one in bins if fits([*one, *part])), None)
        if roomy is None:
            bins.append(list(part))
        else:
            roomy += part
    return bins


def by_opening(games: Sequence[Trajectory]) -> list[list[int]]:
    """The numbers of the games with each opening."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, game in enumerate(games):
        groups.setdefault(tuple(game.tokens[: game.opening]), []).append(number)
    return list(groups.values())


def make_batch(
    games: Sequence[ScoredGame], weight: Callable[[Trajectory], float], device: torch.device
) -> Batch:
    """One micro-batch of these games, in which those with a common opening share it.

    `weight` is that of each agent token of a game. Without games nothing is scored: loss and gradients are 0.
    """
    groups = [
        [games[number] for number in group] for group in by_opening([game.trajectory for game in games])
    ]
    columns: list[tuple[float, float, float]] = []
    for game in (game for group in groups for game in group):
        trajectory = game.trajectory
        assert game.advantage is not None, "a game that left its group is not trained on"
        token = weight(trajectory), game.advantage
        pairs = zip(trajectory.logprobs, trajectory.sampled, strict=True)
        columns += [(*token, logprob) for logprob, sampled in pairs if sampled]
    if games:
        packed = pack([[game.trajectory for game in group] for group in groups], device)
    else:  # a row of one token, of which none is scored
        token_0 = torch.zeros(1, dtype=torch.long, device=device)
        packed = Packed(token_0, token_0, [[0, 1]], sources=token_0[:0], targets=token_0[:0])
    rows = torch.tensor(columns, dtype=torch.float32, device=device).view(len(columns), 3).T.contiguous()
    return Batch(packed, weights=rows[0], advantages=rows[1], engine=rows[2])
