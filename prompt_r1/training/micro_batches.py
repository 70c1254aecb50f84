"""The games that each rank computes together, as tensors.

The ranks wait for each other at every micro-batch, so an update takes as long as the longest of each. Games
of a question are stored in one row with their opening once (`agent.packing`), so they stay together unless
splitting them balances better; each part then repeats the opening.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from prompt_r1.agent.packing import Group, Packed, by_opening, fill, pack
from prompt_r1.distributed import Ranks
from prompt_r1.options.advantages import has_spread
from prompt_r1.types import ScoredGame, Trajectory


def mini_batches_of(
    groups_PG: Sequence[Sequence[ScoredGame]],
    *,
    games: int,
    group_size: int,
    mini_batch: int,
    numbers: Sequence[int],
    drop_even: bool = False,
) -> list[list[ScoredGame]]:
    """This rank's games to train on, by optimiser step of `mini_batch` games out of `games` in all.

    `numbers` are the numbers of this rank's questions in the whole step. A game's place follows from the
    number of its question, so it does not depend on how many ranks there are. Groups stay whole where
    `mini_batch` is a multiple of `group_size`. `drop_even` leaves groups without spread out.
    """
    mini_batches: list[list[ScoredGame]] = [[] for _ in range(math.ceil(games / mini_batch))]
    for number, group in zip(numbers, groups_PG, strict=True):
        if drop_even and not has_spread(group):
            continue
        trained_on = [game for game in group if game.advantage is not None]
        for position, game in enumerate(trained_on):
            mini_batches[(number * group_size + position) // mini_batch].append(game)
    return mini_batches


@dataclass(frozen=True)
class Batch:
    """A micro-batch of N agent tokens."""

    packed: Packed
    weights: Tensor  # (N,) sum to 1 over the micro-batches of an optimiser step and all ranks
    advantages: Tensor  # (N,) of each token's game
    engine: Tensor  # (N,) log-probabilities that the tokens were sampled with
    games: Tensor  # (N,) int64 number of each token's game in the micro-batch
    keys: tuple[int, ...]  # `key_of` each game, by its number
    old: Tensor | None = None  # (N,) of the policy before this training step; None: it has not moved since


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
    keys = tuple(key_of(game.trajectory) for group in groups for game in group)
    for number, game in enumerate(game for group in groups for game in group):
        trajectory = game.trajectory
        count = sum(trajectory.sampled)
        assert game.advantage is not None, "a game that left its group is not trained on"
        weights += [token_weight(trajectory)] * count
        advantages += [game.advantage] * count
        pairs = zip(trajectory.logprobs, trajectory.sampled, strict=True)
        recorded += [logprob for logprob, sampled in pairs if sampled]
        numbers += [number] * count
    columns = torch.tensor([weights, advantages, recorded], dtype=torch.float32, device=device)  # (3, N)
    number_of_game = torch.tensor(numbers, device=device)
    return Batch(packed, columns[0], columns[1], engine=columns[2], games=number_of_game, keys=keys)


def key_of(trajectory: Trajectory) -> int:
    """Finds a game again that another rank trained on; games with equal tokens share it."""
    return hash(tuple(trajectory.tokens))


def empty_batch(device: torch.device) -> Batch:
    """A batch in which nothing is scored: its loss is 0, and so are its gradients."""
    token = torch.zeros(1, dtype=torch.long, device=device)
    no_index = torch.zeros(0, dtype=torch.long, device=device)
    no_value = torch.zeros(0, device=device)
    packed = Packed(token, token, (Group(0, 1, ()),), sources=no_index, targets=no_index)
    return Batch(packed, weights=no_value, advantages=no_value, engine=no_value, games=no_index, keys=())


@dataclass(frozen=True)
class GameSize:
    """The tokens of a game, and whose opening they share."""

    question: int  # games with the same number have the same opening
    opening: int  # tokens of the opening
    own: int  # tokens after the opening that take a column in a packed row


def size_of(game: ScoredGame) -> GameSize:
    """The size of a game, for `assign_games`."""
    trajectory = game.trajectory
    opening = trajectory.opening
    question = hash(tuple(trajectory.tokens[:opening]))
    return GameSize(question, opening, own=len(trajectory.tokens) - 1 - opening)


def packed_tokens(games: Iterable[GameSize]) -> int:
    """Columns of a packed row of these games, each opening counted once."""
    games = list(games)
    openings = {game.question: game.opening for game in games}
    return sum(openings.values()) + sum(game.own for game in games)


def assign_games(games: Sequence[GameSize], *, ranks: int, tokens_per_batch: int) -> list[list[list[int]]]:
    """Divide games into micro-batches of about equal size; the numbers of the games, by rank and micro-batch.

    Every rank gets equally many micro-batches, as few as possible; some are empty when there are fewer games.
    A micro-batch has at most `tokens_per_batch` packed tokens or a single game. Below that limit, its size is
    the smallest for which `_fit` succeeds (MULTIFIT: Coffman, Garey and Johnson, 1978). The result depends on
    the arguments alone, so ranks that know all sizes agree without another collective.
    """
    if not games:
        return [[] for _ in range(ranks)]
    total = packed_tokens(games)
    per_rank = math.ceil(total / (ranks * tokens_per_batch))
    groups = _groups(games)
    while (batches := _fit(games, groups, ranks * per_rank, tokens_per_batch)) is None:
        per_rank += 1  # ends at one micro-batch per game
    count = ranks * per_rank
    longest = max(game.opening + game.own for game in games)
    low = min(tokens_per_batch, max(math.ceil(total / count), longest))
    high = tokens_per_batch
    while low < high:
        middle = (low + high) // 2
        fitted = _fit(games, groups, count, middle)
        if fitted is None:
            low = middle + 1
        else:
            batches, high = fitted, middle
    return _assign_batches(games, batches, ranks)


def _fit(
    games: Sequence[GameSize], groups: list[list[int]], count: int, limit: int
) -> list[list[int]] | None:
    """Pack games into `count` batches of at most `limit` tokens or a single game; None when they do not fit.

    The groups come in the order of `_groups`. Each goes to the fullest batch that can take all of it. When
    there is none, the emptiest batch takes what fits, longest games first, and then the rest is placed.
    """
    batches: list[list[int]] = [[] for _ in range(count)]
    free = [limit] * count
    for remaining in groups:
        opening = games[remaining[0]].opening
        while remaining:
            needed = opening + sum(games[number].own for number in remaining)
            roomy = [index for index, room in enumerate(free) if room >= needed]
            if roomy:
                index = min(roomy, key=lambda index: free[index])
                taken = remaining
            else:
                index = max(range(count), key=lambda index: free[index])
                taken = _longest_that_fit(games, remaining, free[index] - opening)
                if not taken and not batches[index]:  # longer than a batch: alone in one
                    taken = remaining[:1]
            if not taken:
                return None
            batches[index] += taken
            free[index] -= opening + sum(games[number].own for number in taken)
            remaining = [number for number in remaining if number not in taken]
    return batches


def _groups(games: Sequence[GameSize]) -> list[list[int]]:
    """The numbers of the games of each question, longest first; the largest group first."""
    groups: dict[int, list[int]] = {}
    for number, game in enumerate(games):
        groups.setdefault(game.question, []).append(number)
    for group in groups.values():
        group.sort(key=lambda number: -games[number].own)
    return sorted(groups.values(), key=lambda group: -packed_tokens(games[number] for number in group))


def _longest_that_fit(games: Sequence[GameSize], numbers: Sequence[int], room: int) -> list[int]:
    """Those of these games that fit together into `room` tokens, taken in the order given."""
    taken = []
    for number in numbers:
        if games[number].own <= room:
            taken.append(number)
            room -= games[number].own
    return taken


def _assign_batches(games: Sequence[GameSize], batches: list[list[int]], ranks: int) -> list[list[list[int]]]:
    """Give each rank equally many of these batches, so that those of one time are about equally large.

    At each time the largest batch goes to the rank with the fewest tokens so far.
    """
    tokens = {index: packed_tokens(games[number] for number in batch) for index, batch in enumerate(batches)}
    largest_first = sorted(tokens, key=lambda index: -tokens[index])
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(batches), ranks):
        shortest_first = sorted(assigned, key=lambda share: sum(tokens[index] for index in share))
        for share, index in zip(shortest_first, largest_first[start : start + ranks], strict=True):
            share.append(index)
    return [[sorted(batches[index]) for index in share] for share in assigned]


def share_games(
    mini_batches: Sequence[Sequence[ScoredGame]], ranks: Ranks, *, tokens_per_batch: int
) -> list[list[list[ScoredGame]]]:
    """The games that this rank trains on, by mini-batch and micro-batch.

    Called by every rank with the games that it played. Several ranks tell each other the sizes of their
    games, compute the same assignment, and exchange the games once; every rank then has equally many
    micro-batches, some of them perhaps empty.
    """
    if ranks.count == 1:  # no other rank waits, so equal sizes gain nothing
        return [full_batches(games, tokens_per_batch) for games in mini_batches]
    sizes_RM = ranks.gather([[size_of(game) for game in games] for games in mini_batches])
    shares: list[list[list[int]]] = []
    outgoing: list[dict[tuple[int, int], ScoredGame]] = [{} for _ in range(ranks.count)]
    for step, games in enumerate(mini_batches):
        sizes = [size for sizes_M in sizes_RM for size in sizes_M[step]]
        first = sum(len(sizes_M[step]) for sizes_M in sizes_RM[: ranks.rank])  # this rank's first in `sizes`
        mine = {first + number: _without_text(game) for number, game in enumerate(games)}
        assigned = assign_games(sizes, ranks=ranks.count, tokens_per_batch=tokens_per_batch)
        shares.append(assigned[ranks.rank])
        for sent, batches in zip(outgoing, assigned, strict=True):
            sent |= {(step, number): mine[number] for number in chain(*batches) if number in mine}
    received = {key: game for sent in ranks.gather(outgoing) for key, game in sent[ranks.rank].items()}
    return [
        [[received[step, number] for number in batch] for batch in batches]
        for step, batches in enumerate(shares)
    ]


def _without_text(game: ScoredGame) -> ScoredGame:
    """The game as the loss needs it: its tokens, without the text of its turns."""
    return replace(game, trajectory=replace(game.trajectory, turns=[]))
