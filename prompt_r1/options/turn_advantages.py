"""Advantages of single turns (`--advantages turn`).

    Â_t = (R - E_t) - mean over siblings of (R - E_t)        no division by a standard deviation

E_t is what the game would have scored had it ended before turn t: the reward that turn t cannot change, with
the cap of eq. 12 and the gate of eq. 15. The siblings are the other games of the group with the same tokens
before turn t. If there are none, they are all others, each at its turn t, or at its last if it ended earlier.

What is subtracted from R depends only on the tokens before turn t and on other games, so its product with
∇ log π(turn t) has expectation 0, and Σ_t Â_t ∇ log π(turn t) is an unbiased estimate of the gradient of
E[R]. A mean that includes the game's own reward (eq. 16) shrinks it by (G - 1) / G; a division by the
standard deviation of the group changes its direction. The token weights of the loss are another matter: the
paper's 1 / |u| for each game (eq. 17) favours short games, with any advantages.

The baseline of a state that siblings share is that of Kool et al. (2019, "Buy 4 REINFORCE samples, get a
baseline for free!") at turn t; a value estimate of each step of a text as in VinePPO (Kazemnejad et al. 2024,
arXiv 2410.01679), but without further games.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from prompt_r1.reward import Rule, score
from prompt_r1.types import ScoredGame, Trajectory

Groups = list[list[ScoredGame]]


def turn_advantages(games_PG: Groups, rule: Rule) -> Groups:
    """An advantage for each turn of the games that are trained on; `advantage` is that of the first turn."""
    credited_PG = []
    for group in games_PG:
        intact = [game for game in group if game.advantage is not None]
        credited_PG.append(
            [game if game.advantage is None else _with_turn_advantages(game, intact, rule) for game in group]
        )
    return credited_PG


def _with_turn_advantages(game: ScoredGame, group: Sequence[ScoredGame], rule: Rule) -> ScoredGame:
    others = [other for other in group if other is not game]
    advantages = []
    for turn, start in enumerate(turn_starts(game.trajectory)):
        before = game.trajectory.tokens[:start]
        siblings = [
            other
            for other in others
            if turn < len(other.trajectory.turns) and other.trajectory.tokens[:start] == before
        ]
        baseline = fmean(_yet_to_earn(sibling, turn, rule) for sibling in siblings or others)
        advantages.append(_yet_to_earn(game, turn, rule) - baseline)
    return replace(game, advantage=advantages[0], turn_advantages=tuple(advantages))


def turn_starts(trajectory: Trajectory) -> list[int]:
    """The position of the first token of each of the agent's turns."""
    pairs = enumerate(pairwise(trajectory.sampled), start=1)
    return [position for position, (before, sampled) in pairs if sampled and not before]


def _yet_to_earn(game: ScoredGame, turn: int, rule: Rule) -> float:
    """R - E_t; for a game that ended before this turn, that of its last turn.

    A user's own reward says nothing about games that are cut short: then E_t is 0.
    """
    assert game.reward is not None, "a game that is trained on has a reward"
    if rule.own:
        return game.reward.total
    turns = game.trajectory.turns
    ended_before = replace(game.trajectory, turns=turns[: min(turn, len(turns) - 1)])
    return game.reward.total - score(ended_before, rule=rule).total
