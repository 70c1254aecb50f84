"""A cost-aware advantage: of two right games of a question, the cheaper one is better (`--cost-weight`)."""

from collections.abc import Sequence
from dataclasses import replace

from prompt_r1.types import ScoredGame

MOST_WEIGHT = 0.5  # with more, a cheap wrong game could beat a dear right one


def charge_costs(
    games_PG: Sequence[Sequence[ScoredGame]], *, weight: float, unit: str
) -> list[list[ScoredGame]]:
    """Subtract from the advantage of each right game what it cost beyond the other right games of its group.

        Â'_i = Â_i - W R⁺_i (c_i - c̄) / max_j c_j          W: weight, R⁺ = min(1, max(0, R))
        c̄    = Σ_j R⁺_j c_j / Σ_j R⁺_j                     j: the games of the group with R_j > 0

    The reward, and with it the gate of eq. 15, stays as it is: R > 0 says that the gate is open and that the
    answer earned something. Other games keep their advantage, so a wrong game gains nothing from being cheap,
    and a group without a right game learns nothing about cost. The term sums to 0 over a group.

    A right game (R = 1) stays above every game with R ≤ 0: their distance is at least 1 / std ≥ 0.65 for R in
    [-1.5, 1], and the term is less than W ≤ 0.5. Costs count relative to the dearest right game of the group,
    so neither their unit matters nor that hard questions need more calls. The term is not divided by the
    group's std: between games with equal rewards, one token more would then be a disadvantage of 1.

    As in xRouter (arXiv 2510.08439), cost counts only with success. `unit`: usd or calls.
    """
    if not weight:
        return [list(group) for group in games_PG]
    return [_charge(group, weight, unit) for group in games_PG]


def _charge(group: Sequence[ScoredGame], weight: float, unit: str) -> list[ScoredGame]:
    rightness = [_rightness(game) for game in group]  # R⁺
    costs = [cost_of(game, unit) for game in group]
    dearest = max((cost for cost, right in zip(costs, rightness, strict=True) if right), default=0.0)
    if not dearest:
        return list(group)
    paid = sum(cost * right for cost, right in zip(costs, rightness, strict=True))
    centre = paid / sum(rightness)
    return [
        game
        if game.advantage is None
        else replace(game, advantage=game.advantage - weight * right * (cost - centre) / dearest)
        for game, right, cost in zip(group, rightness, costs, strict=True)
    ]


def _rightness(game: ScoredGame) -> float:
    if game.reward is None or game.advantage is None:
        return 0.0
    return min(1.0, max(0.0, game.reward.total))


def cost_of(game: ScoredGame, unit: str) -> float:
    """The dollars of a game's replies, or their number."""
    if unit == "usd":
        return game.trajectory.usd
    return float(sum(turn.reply is not None for turn in game.trajectory.turns))
