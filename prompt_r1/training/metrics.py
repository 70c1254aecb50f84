"""The metrics of the games of a training step, over all ranks, and what they cost.

The metrics of the update are in update.py. docs/running.md explains every key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import mean, median, stdev
from typing import get_args

from prompt_r1.environments.environment import Environment
from prompt_r1.f1 import exact_match, f1
from prompt_r1.model.distributed import Ranks
from prompt_r1.reward import well_formed
from prompt_r1.spending import Spending
from prompt_r1.types import Reward, ScoredGame, Stop


@dataclass(frozen=True)
class Score:
    """How good a game was."""

    reward: Reward
    em: float  # EM and F1 judge the game's answer. A game without an answer has 0.
    f1: float
    is_well_formed: bool
    turns: int


@dataclass(frozen=True)
class GameMetrics:
    """The measurements of one game, which the ranks exchange in place of the game."""

    stop: Stop | None
    tokens: int  # of the whole dialogue
    sampled_tokens: int
    calls: int  # also the call that failed, and calls whose reply was in the journal
    latencies: list[float]  # seconds of each call with a reply
    usd: float
    score: Score | None  # None: the environment broke the game.
    is_compared: bool  # whether it has an advantage, because its group was compared
    has_advantage: bool  # whether any of its tokens has an advantage other than 0


def metrics_of_game(game: ScoredGame) -> GameMetrics:
    """Measure one game."""
    trajectory = game.trajectory
    latencies = [turn.latency for turn in trajectory.turns if turn.reply is not None]
    score = None
    if game.reward is not None:
        answer, answers = trajectory.answer or "", trajectory.question.answers
        score = Score(
            game.reward,
            em=exact_match(answer, answers),
            f1=f1(answer, answers),
            is_well_formed=well_formed(trajectory),
            turns=len(trajectory.turns),
        )
    return GameMetrics(
        stop=trajectory.stop,
        tokens=len(trajectory.tokens),
        sampled_tokens=sum(trajectory.sampled),
        calls=trajectory.spent.calls,
        latencies=latencies,
        usd=trajectory.spent.usd,
        score=score,
        is_compared=game.advantage is not None,
        has_advantage=game.has_advantage,
    )


def step_metrics(
    games_PG: list[list[ScoredGame]], ranks: Ranks, *, rollout_seconds: float
) -> dict[str, float]:
    """The metrics of a training step over all ranks: its games, its groups and its speed."""
    measured_PG = ranks.gather_lists([[metrics_of_game(game) for game in group] for group in games_PG])
    metrics = game_metrics(measured_PG) | group_metrics(measured_PG)
    metrics["tokens/s"] = metrics["tokens/sampled"] / rollout_seconds
    metrics["games/s"] = metrics["games"] / rollout_seconds
    return metrics


def game_metrics(games_PG: Sequence[Sequence[GameMetrics]]) -> dict[str, float]:
    """Means and sums over the games of a step.

    Games that the environment broke have no score. They count only in games, stop/*, tokens/* and env/*.
    """
    games = [game for group in games_PG for game in group]
    latencies = [seconds for game in games for seconds in game.latencies]
    scores_PG = scores_of(games_PG)
    scores = [score for group in scores_PG for score in group]
    return {
        "reward/mean": _mean([score.reward.total for score in scores]),
        "reward/format": _mean([score.reward.format for score in scores]),
        "reward/answer": _mean([score.reward.answer for score in scores]),
        "em": _mean([score.em for score in scores]),
        "f1": _mean([score.f1 for score in scores]),
        "format": _mean([score.is_well_formed for score in scores]),
        "turns": _mean([score.turns for score in scores]),
        "game/usd": _mean([game.usd for game in games if game.score is not None]),
        **{f"stop/{stop}": _mean([game.stop == stop for game in games]) for stop in get_args(Stop)},
        "tokens/game": _mean([game.tokens for game in games]),
        "tokens/sampled": float(sum(game.sampled_tokens for game in games)),
        "env/calls": float(sum(game.calls for game in games)),
        "env/errors": float(sum(game.stop == "env_error" for game in games)),
        "games": float(len(games)),
        "env/latency": median(latencies) if latencies else 0.0,
        # This is pass@k, where k is the number of a question's games; "em" is pass@1.
        "em/any": _mean([any(score.em == 1 for score in group) for group in scores_PG]),
        **_reward_by_kind_of_group(games_PG),
        **_intervals(scores_PG),
    }


def scores_of(games_PG: Sequence[Sequence[GameMetrics]]) -> list[list[Score]]:
    """The scores of each group. Groups without any are left out."""
    scores_PG = [[game.score for game in group if game.score is not None] for group in games_PG]
    return [scores for scores in scores_PG if scores]


def _intervals(scores_PG: Sequence[Sequence[Score]]) -> dict[str, float]:
    """The intervals of three means: the mean of the questions' means ± 1.96 standard errors.

    The games of one question are not independent, so questions are counted. With many questions the interval
    covers 95 %, which is enough for a curve. A single question gives no interval.
    """
    if len(scores_PG) < 2:
        return {}
    means_of = {
        "reward/mean": [mean(score.reward.total for score in group) for group in scores_PG],
        "em": [mean(score.em for score in group) for group in scores_PG],
        "format": [mean(float(score.is_well_formed) for score in group) for group in scores_PG],
    }
    metrics = {}
    for name, means in means_of.items():
        half_width = 1.96 * stdev(means) / sqrt(len(means))
        metrics[f"{name}_low"] = mean(means) - half_width
        metrics[f"{name}_high"] = mean(means) + half_width
    return metrics


def _reward_by_kind_of_group(games_PG: Sequence[Sequence[GameMetrics]]) -> dict[str, float]:
    """The mean reward in groups with broken games and in whole groups; {} if no game broke.

    Games of hard questions make more calls, so they break more often, and the games that remain may be too
    easy. The two means show whether this is so.
    """
    if all(game.score is not None for group in games_PG for game in group):
        return {}
    rewards: dict[str, list[float]] = {"reward/broken_groups": [], "reward/whole_groups": []}
    for group in games_PG:
        scores = [game.score for game in group if game.score is not None]
        kind = "reward/broken_groups" if len(scores) < len(group) else "reward/whole_groups"
        rewards[kind] += [score.reward.total for score in scores]
    return {name: _mean(values) for name, values in rewards.items() if values}


def group_metrics(games_PG: Sequence[Sequence[GameMetrics]]) -> dict[str, float]:
    """The shares of dropped groups, of groups without spread and of misranked pairs (see `ranked_pairs`).

    Also what the calls of the groups without spread have cost, because nothing is learned from them.
    """
    kept = [group for group in games_PG if any(game.is_compared for game in group)]
    no_spread = [group for group in kept if not any(game.has_advantage for game in group)]
    pairs = [pair for group in scores_of(games_PG) for pair in ranked_pairs(group)]
    return {
        "reward/misranked": pairs.count(False) / max(len(pairs), 1),
        "groups/dropped": 1 - len(kept) / len(games_PG),
        "groups/no_spread": len(no_spread) / max(len(kept), 1),
        "groups/no_spread_calls": float(sum(game.calls for group in no_spread for game in group)),
        "groups/no_spread_usd": float(sum(game.usd for group in no_spread for game in group)),
    }


def ranked_pairs(scores: Sequence[Score]) -> list[bool]:
    """Whether the better answer has the higher reward, for each two games of a question that differ in R_ans.

    Only games with an open gate (R_fmt = ε) are compared. Eq. 15 always ranks them by their answers; a reward
    of the user may not.
    """
    rewards = [score.reward for score in scores if score.reward.gate_is_open]
    ranked = []
    for one, other in combinations(rewards, 2):
        better_answer = one.answer - other.answer
        higher_reward = one.total - other.total
        if better_answer != 0:
            ranked.append(better_answer * higher_reward > 0)
    return ranked


# Calls and dollars


def add_spending(metrics: dict[str, float], environment: Environment, ranks: Ranks) -> None:
    """Add the calls and tokens since they were last added, over all ranks, and the dollars of the whole run.

    env/lost_usd is the part of env/usd that is charged for requests without a reply.
    """
    for share in ranks.gather(environment.take_metrics()):
        for name, count in share.items():
            metrics[name] = metrics.get(name, 0.0) + count
    charged = total_charged(environment, ranks)
    metrics["env/usd"] = charged.usd
    metrics["env/lost_usd"] = charged.lost_usd


def total_charged(environment: Environment, ranks: Ranks) -> Spending:
    """What the whole run has been charged so far, over all ranks."""
    budget = environment.budget
    # Every rank knows what the run was charged before it was resumed, so this is added only once.
    charged_since = ranks.gather(budget.charged - budget.charged_before)
    return sum(charged_since, budget.charged_before)


def _mean(values: Sequence[float]) -> float:
    return float(mean(values)) if values else 0.0
