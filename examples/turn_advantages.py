"""Advantages by turn: `python train.py --advantage-function examples.turn_advantages:by_turn`.

Eq. 16 gives all tokens of a game the same advantage, so a good question is blamed for a wrong answer. MT-GRPO
(Zeng et al. 2025, arXiv 2505.11821) also compares each turn that asks with the same turn of the other games:

    A_it = Â_i + λ (M_it - mean(M_1t … M_Gt)) / (std(M_1t … M_Gt) + 1e-6)        if turn t asks
           Â_i                                                                   if turn t is the game's last

Â_i is the advantage of eq. 16. M_it of eq. 12 is 1 if turn t of game i has a thought, a prompt and a reply.
The mean is over the games in which turn t asks. (MT-GRPO has two turns, and λ weights Â_i of the first.)
"""

from collections.abc import Callable, Sequence

from prompt_r1.grpo import group_advantages
from prompt_r1.reward import is_good_turn
from prompt_r1.types import ScoredGame, Trajectory

LAMBDA = 0.5


def by_turn(games: Sequence[ScoredGame]) -> list[list[float]]:
    """For each game of a group, the advantage of each of its turns, by the M_t of eq. 12."""
    return compare_turns(games, lambda game, turn: is_good_turn(game.turns[turn]))


def compare_turns(
    games: Sequence[ScoredGame], quality: Callable[[Trajectory, int], float]
) -> list[list[float]]:
    """For each game of a group, the advantage of each of its turns.

    `quality` takes a game and the number of a turn that asks, and takes the place of M.
    """
    advantages = [[game.advantage] * len(game.trajectory.turns) for game in games]
    longest = max(map(len, advantages))
    for turn in range(longest - 1):
        asking = [number for number, turns in enumerate(advantages) if turn < len(turns) - 1]
        qualities = [float(quality(games[number].trajectory, turn)) for number in asking]
        for number, advantage in zip(asking, group_advantages(qualities), strict=True):
            advantages[number][turn] += LAMBDA * advantage
    return advantages
