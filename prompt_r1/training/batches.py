"""Divide the games of a step into mini-batches, ranks and micro-batches of tensors.

    mini-batch    the games of one optimiser step, over all ranks
    micro-batch   the games that a rank computes in one forward: one packed row (`model.packing`)

A packed row stores the opening of a question's games once, so these games stay together. With several ranks,
groups are split where the ranks would otherwise wait for each other, and each part repeats the opening.
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
    """A micro-batch with N agent tokens."""

    packed: Packed
    weights: Tensor  # (N,) sum to 1 over the micro-batches of an optimiser step and all ranks
    advantages: Tensor  # (N,) of each token's game, or of its turn
    sampled_logprobs: Tensor  # (N,) nats, recorded by the engine when it sampled the token
    game: Tensor  # (N,) int64 number of each token's game in this micro-batch


def make_mini_batches(
    games_PG: Sequence[Sequence[ScoredGame]],
    ranks: Ranks,
    *,
    mini_batch: int,
    tokens_per_batch: int,
    token_mean: bool,
    mask_truncated: bool,
    skip_no_spread: bool,
) -> list[list[Batch]]:
    """Make this rank's micro-batches of each optimiser step, from the games that this rank played.

    Called by every rank. `learned_from`, `mini_batches_of` and `micro_batches_of` explain the settings.
    """
    learned_PG = learned_from(games_PG, ranks, mask_truncated=mask_truncated, skip_no_spread=skip_no_spread)
    return [
        micro_batches_of(games, ranks, tokens_per_batch=tokens_per_batch, token_mean=token_mean)
        for games in mini_batches_of(learned_PG, ranks, mini_batch=mini_batch)
    ]


def learned_from(
    games_PG: Sequence[Sequence[ScoredGame]], ranks: Ranks, *, mask_truncated: bool, skip_no_spread: bool
) -> list[list[ScoredGame]]:
    """The games of each group of this rank that enter the loss. Called by every rank.

    These games are left out:

    1. games without an advantage
    2. with `mask_truncated`, games that a limit of tokens cut off (DAPO, Yu et al. 2025, arXiv 2503.14476).
       Their rewards still count in mean and std of their group.
    3. with `skip_no_spread`, groups whose advantages are all 0, because their policy gradient is 0. If this
       would leave out all groups of all ranks, it leaves out none, so that the step has an update.

    The means of the loss are over the games that enter it.
    """
    learned_PG = []
    for group in games_PG:
        learned = [game for game in group if game.advantage is not None]
        if mask_truncated:
            learned = [game for game in learned if game.trajectory.stop != "max_tokens"]
        learned_PG.append(learned)
    if skip_no_spread:
        with_spread = [group for group in learned_PG if any(game.has_advantage for game in group)]
        if any(ranks.gather(bool(with_spread))):
            return with_spread
    return learned_PG


def mini_batches_of(
    games_PG: Sequence[Sequence[ScoredGame]], ranks: Ranks, *, mini_batch: int
) -> list[list[ScoredGame]]:
    """Divide the games of all ranks into optimiser steps.

    Each step covers `mini_batch` played games. Those that do not enter the loss are left out, so a step may
    have fewer. Called by every rank with the games that it played. The optimiser step of a game follows from
    its index, so it does not depend on the number of ranks. Groups stay whole if `mini_batch` is a multiple
    of their size.
    """
    kept = []
    for group in games_PG:
        for game in group:
            if game.advantage is not None:
                without_text = replace(game.trajectory, turns=[])  # the loss reads tokens only
                kept.append(replace(game, trajectory=without_text))
    games = sorted(ranks.gather_lists(kept), key=lambda game: game.index)
    return [list(step) for _, step in groupby(games, key=lambda game: game.index // mini_batch)]


def micro_batches_of(
    games: Sequence[ScoredGame], ranks: Ranks, *, tokens_per_batch: int, token_mean: bool
) -> list[Batch]:
    """Make this rank's micro-batches of an optimiser step. `games` are the step's games of all ranks.

    Every rank gets equally many, some of them perhaps empty, because sharded weights are gathered by all
    ranks for each forward. In eq. 17, each of M games has the weight 1 / M, and each of its |u| agent tokens
    has 1 / (M · |u|). With `token_mean`, every token of the mini-batch has the same weight. The weights sum
    to 1 over all micro-batches and ranks, so the loss does not depend on how the games are divided.
    """
    trajectories = [game.trajectory for game in games]
    agent_tokens = sum(sum(trajectory.sampled) for trajectory in trajectories)

    def token_weight(trajectory: Trajectory) -> float:
        if token_mean:
            return 1 / agent_tokens
        return 1 / (len(games) * sum(trajectory.sampled))

    shares = divide(trajectories, ranks=ranks.count, tokens_per_batch=tokens_per_batch)
    batches = []
    for numbers in shares[ranks.rank]:
        batches.append(make_batch([games[number] for number in numbers], token_weight, ranks.device))
    return batches


@dataclass(frozen=True)
class RowPlan:
    """The games of one row, by their numbers, and how many columns (places for tokens) they take."""

    games: tuple[int, ...]
    own_tokens: int  # columns that the games add to their openings
    openings: dict[int, int]  # number of the group → tokens of its opening, which the row stores once

    @property
    def size(self) -> int:
        """The columns of the row."""
        return self.own_tokens + sum(self.openings.values())

    def __add__(self, other: "RowPlan") -> "RowPlan":
        return RowPlan(
            self.games + other.games, self.own_tokens + other.own_tokens, self.openings | other.openings
        )


EMPTY_PLAN = RowPlan((), 0, {})


def divide(games: Sequence[Trajectory], *, ranks: int, tokens_per_batch: int) -> list[list[list[int]]]:
    """Divide games among ranks and micro-batches: for each rank, the numbers of each micro-batch's games.

    A micro-batch has at most `tokens_per_batch` columns, or a single game. A single rank packs its rows as
    full as it can. Several ranks wait for each other at every micro-batch, so they get equally many of about
    equal size, some of them perhaps empty. The result depends on the arguments alone.
    """
    groups = group_rows(games)
    if ranks == 1:
        parts = split_groups(groups, tokens_per_batch)
        rows = first_fit(parts, tokens_per_batch)
        return [[list(row.games) for row in rows]]
    total = sum(sum(group, EMPTY_PLAN).size for group in groups)
    per_rank = math.ceil(total / (ranks * tokens_per_batch))
    columns_per_row = total // max(ranks * per_rank, 1)  # If there are no games, this is 0.
    # All rows should be equally full. Smaller parts balance better, and larger parts repeat fewer openings.
    # Half a row is the compromise.
    half_row = columns_per_row // 2
    parts = split_groups(groups, min(tokens_per_batch, half_row))
    rows = balance(parts, ranks=ranks, per_rank=per_rank, limit=tokens_per_batch)
    return [[list(row.games) for row in rows[rank::ranks]] for rank in range(ranks)]


def group_rows(games: Sequence[Trajectory]) -> list[list[RowPlan]]:
    """Make a row of each game, and group the rows by opening, the longest game of a group first."""
    groups = []
    for group, numbers in enumerate(by_opening(games)):
        rows = []
        for number in sorted(numbers, key=lambda number: len(games[number].tokens), reverse=True):
            opening = games[number].opening_length
            own = len(games[number].tokens) - 1 - opening  # the last token is only a target
            rows.append(RowPlan((number,), own, {group: opening}))
        groups.append(rows)
    return groups


def split_groups(groups: Iterable[Sequence[RowPlan]], limit: int) -> list[RowPlan]:
    """Cut each group into rows of one game or of at most `limit` columns. Returns the largest rows first."""
    parts = [row for group in groups for row in first_fit(group, limit)]
    return sorted(parts, key=lambda row: row.size, reverse=True)


def first_fit(parts: Iterable[RowPlan], limit: int) -> list[RowPlan]:
    """Add each part to the first row that stays within `limit` columns with it, or begin a new row."""
    rows: list[RowPlan] = []
    for part in parts:
        for number, row in enumerate(rows):
            if (row + part).size <= limit:
                rows[number] = row + part
                break
        else:
            rows.append(part)
    return rows


def balance(parts: Sequence[RowPlan], *, ranks: int, per_rank: int, limit: int) -> list[RowPlan]:
    """Put the parts into equally many rows for each rank. Returns the largest rows first.

    Each part goes to the row that stays smallest with it. There are `per_rank` rows for a rank, or more if a
    row of several games would exceed `limit` columns.
    """
    while True:
        rows = [EMPTY_PLAN] * (ranks * per_rank)
        for part in parts:
            sizes = [_size_with(row, part) for row in rows]
            smallest = sizes.index(min(sizes))
            rows[smallest] += part
        if all(row.size <= limit or len(row.games) == 1 for row in rows):
            return sorted(rows, key=lambda row: row.size, reverse=True)
        per_rank += 1


def _size_with(row: RowPlan, part: RowPlan) -> tuple[int, int]:
    """The columns of a row with one more part and, to decide between equally large rows, the row's games.

    A game whose agent wrote a single token adds no column after the opening, because its last token is only a
    target. By size alone, all such games would go into one row.
    """
    return (row + part).size, len(row.games)


def by_opening(games: Sequence[Trajectory]) -> list[list[int]]:
    """Group games by opening: for each opening, the numbers of its games."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, game in enumerate(games):
        groups.setdefault(tuple(game.tokens[: game.opening_length]), []).append(number)
    return list(groups.values())


def token_advantages(game: ScoredGame) -> list[float]:
    """The advantage of each agent token of a game, which is the advantage of the token's turn."""
    assert game.advantage is not None, "a game that left its group is not trained on"
    sampled = game.trajectory.sampled
    if not game.turn_advantages:
        return [game.advantage] * sum(sampled)
    advantages = []
    turn = -1
    for position, is_sampled in enumerate(sampled):
        if is_sampled:
            # The agent's first token after context begins a turn.
            if not sampled[position - 1]:
                turn += 1
            advantages.append(game.turn_advantages[turn])
    assert turn + 1 == len(game.turn_advantages), (turn + 1, game.turn_advantages)
    return advantages


def make_batch(
    games: Sequence[ScoredGame], token_weight: Callable[[Trajectory], float], device: torch.device
) -> Batch:
    """Make one micro-batch of these games. Games with the same opening share it.

    `token_weight` gives the weight of each agent token of a game. Without games the batch is a row of one
    token that is not scored, so loss and gradients are 0.
    """
    groups = []
    for numbers in by_opening([game.trajectory for game in games]):
        groups.append([games[number] for number in numbers])
    weights: list[float] = []
    advantages: list[float] = []
    sampled_logprobs: list[float] = []
    game_numbers: list[int] = []
    in_row_order = [game for group in groups for game in group]
    for number, game in enumerate(in_row_order):
        trajectory = game.trajectory
        agent_tokens = sum(trajectory.sampled)
        weights += [token_weight(trajectory)] * agent_tokens
        advantages += token_advantages(game)
        game_numbers += [number] * agent_tokens
        for logprob, sampled in zip(trajectory.logprobs, trajectory.sampled, strict=True):
            if sampled:
                sampled_logprobs.append(logprob)
    packed = pack([[game.trajectory for game in group] for group in groups], device)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Batch(
        packed,
        weights=column(weights),
        advantages=column(advantages),
        sampled_logprobs=column(sampled_logprobs),
        game=torch.tensor(game_numbers, dtype=torch.long, device=device),
    )
