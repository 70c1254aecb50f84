"""Divide the games of a step into mini-batches, ranks and micro-batches of tensors.

    mini-batch    the games of one optimiser step, over all ranks
    micro-batch   the games that a rank computes in one forward: one packed row (`model.packing`)

row_plans.py decides which games share a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby

import torch
from torch import Tensor

from prompt_r1.model.distributed import Ranks
from prompt_r1.model.packing import Packed, pack
from prompt_r1.training.row_plans import by_opening, divide
from prompt_r1.types import Completion, Question, ScoredGame, Trajectory


@dataclass(frozen=True)
class Batch:
    """A micro-batch: games with N agent tokens."""

    packed: Packed  # the games as one row, for a forward
    # Of each agent token, as in `grpo.LossColumns`:
    engine: Tensor  # (N,) log π_engine
    advantages: Tensor  # (N,)
    weights: Tensor  # (N,)
    game: Tensor  # (N,) int64


def games_to_learn_from(
    games_PG: Sequence[Sequence[ScoredGame]], ranks: Ranks, *, mask_truncated: bool, skip_no_spread: bool
) -> list[list[ScoredGame]]:
    """The games of each group of this rank that enter the loss.

    These games are left out:

    1. games without an advantage
    2. with `mask_truncated`, games that a limit of tokens cut off (DAPO, Yu et al. 2025, arXiv 2503.14476).
       Their rewards still count in mean and std of their group.
    3. with `skip_no_spread`, groups whose advantages are all 0, because their policy gradient is 0. If this
       would leave out all groups of all ranks, it leaves out none, so that the step has an update.

    The means of the loss are over the games that enter it.
    """
    used_PG = []
    for group in games_PG:
        used = [game for game in group if game.advantage is not None]
        if mask_truncated:
            used = [game for game in used if game.trajectory.stop != "max_tokens"]
        used_PG.append(used)
    if skip_no_spread:
        with_spread = [group for group in used_PG if any(game.has_advantage for game in group)]
        if any(ranks.gather(bool(with_spread))):
            return with_spread
    return used_PG


def mini_batches_of(
    games_PG: Sequence[Sequence[ScoredGame]], ranks: Ranks, *, mini_batch: int
) -> list[list[ScoredGame]]:
    """Divide the games of all ranks that enter the loss into optimiser steps.

    Each step covers `mini_batch` played games. Some of them may not enter the loss, so a step may have fewer.
    Each rank gives its own games. The optimiser step of a game follows from its index, so it does not depend
    on the number of ranks. Groups stay whole if `mini_batch` is a multiple of their size.
    """
    sent = []
    for group in games_PG:
        for game in group:
            # The loss reads tokens only. The other columns of a question may be long, and may hold objects
            # that cannot be sent to other ranks.
            question = replace(game.trajectory.question, extra={})
            without_text = replace(game.trajectory, question=question, turns=[])
            sent.append(replace(game, trajectory=without_text))
    games = sorted(ranks.gather_lists(sent), key=lambda game: game.index)
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
    engine: list[float] = []
    game_numbers: list[int] = []
    in_row_order = [game for group in groups for game in group]
    for number, game in enumerate(in_row_order):
        trajectory = game.trajectory
        agent_tokens = sum(trajectory.sampled)
        weights += [token_weight(trajectory)] * agent_tokens
        advantages += token_advantages(game)
        game_numbers += [number] * agent_tokens
        engine += compress(trajectory.logprobs, trajectory.sampled)
    packed = pack([[game.trajectory for game in group] for group in groups], device)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Batch(
        packed,
        engine=column(engine),
        advantages=column(advantages),
        weights=column(weights),
        game=torch.tensor(game_numbers, dtype=torch.long, device=device),
    )


def made_up_game(logprobs: Sequence[float], *, advantage: float) -> ScoredGame:
    """A game of one turn, whose tokens the engine sampled with these log-probabilities."""
    trajectory = Trajectory(Question("made up", "", "", ()))
    trajectory.add_context([0])
    trajectory.add_sampled(Completion([0] * len(logprobs), list(logprobs), finished=True))
    return ScoredGame(trajectory, None, advantage)


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
