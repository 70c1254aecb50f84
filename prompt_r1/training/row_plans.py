"""Divide the games of an optimiser step among ranks, and each rank's games among micro-batches.

A micro-batch is one packed row. The row stores the opening of a question's games once, so these games stay
together. With several ranks, groups are split where the ranks would otherwise wait for each other, and each
part repeats the opening.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prompt_r1.types import Trajectory


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

    For example, two ranks get games that have 6,000 columns together, and a micro-batch has at most 2,000.
    Then each rank gets two rows of about 1,500 columns. They are filled with parts of groups: a part is a
    single game, or several games of at most 750 columns together.

    A micro-batch has at most `tokens_per_batch` columns, or a single game. A single rank packs its rows as
    full as it can. Several ranks wait for each other at every micro-batch, so they get equally many of about
    equal size, some of them perhaps empty. The result depends on the arguments alone.
    """
    groups = group_rows(games)
    if ranks == 1:
        parts = split_groups(groups, tokens_per_batch)
        rows = first_fit(parts, tokens_per_batch)
        return [[list(row.games) for row in rows]]
    whole_groups = [sum(group, EMPTY_PLAN) for group in groups]  # one row with all games of a group
    columns = sum(row.size for row in whole_groups)
    per_rank = math.ceil(columns / (ranks * tokens_per_batch))  # rows of a rank
    even_row = columns // (ranks * per_rank)  # columns of a row, if all rows are equally full
    # Smaller parts balance better, and larger parts repeat fewer openings. Half a row is the compromise.
    parts = split_groups(groups, even_row // 2)
    # Repeated openings and uneven parts may exceed the limit. Then `balance` gives each rank more rows.
    rows = balance(parts, ranks=ranks, per_rank=per_rank, limit=tokens_per_batch)
    # The largest rows come first: with two ranks, rank 0 takes rows 0 and 2, and rank 1 takes rows 1 and 3.
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
            # Of rows of equal size, the one with fewer games gets the part. A game with a single token of the
            # agent adds no column to its opening. Without this rule, one row would get all such games.
            sizes = [((row + part).size, len(row.games)) for row in rows]
            rows[sizes.index(min(sizes))] += part
        if all(row.size <= limit or len(row.games) == 1 for row in rows):
            return sorted(rows, key=lambda row: row.size, reverse=True)
        per_rank += 1


def by_opening(games: Sequence[Trajectory]) -> list[list[int]]:
    """Group games by opening: for each opening, the numbers of its games."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, game in enumerate(games):
        groups.setdefault(tuple(game.tokens[: game.opening_length]), []).append(number)
    return list(groups.values())
