"""The metrics of a training step: means over its games, with intervals, over all ranks."""

from collections.abc import Sequence
from math import isfinite
from statistics import mean, median
from typing import get_args

from prompt_r1.distributed.ranks import Ranks
from prompt_r1.environments.pool import Pool
from prompt_r1.metrics.statistics import mean_interval
from prompt_r1.options.advantages import has_spread
from prompt_r1.training.results import GameResult, result_of_game
from prompt_r1.types import ScoredGame, Stop


def game_metrics(games: Sequence[GameResult]) -> dict[str, float]:
    """Means over the games of a step; games that the environment broke count in stop/* and env/* only."""
    scored = [(game, game.reward) for game in games if game.reward is not None]
    latencies = [seconds for game in games for seconds in game.latencies]
    metrics = {
        "reward/mean": _mean([reward.total for _, reward in scored]),
        "reward/format": _mean([reward.format for _, reward in scored]),
        "reward/answer": _mean([reward.answer for _, reward in scored]),
        "em": _mean([game.em for game, _ in scored]),
        "f1": _mean([game.f1 for game, _ in scored]),
        "format": _mean([game.well_formed for game, _ in scored]),
        "turns": _mean([float(game.turns) for game, _ in scored]),
        "games": float(len(games)),
        "game/usd": _mean([game.usd for game, _ in scored]),
        "tokens/game": _mean([float(game.tokens) for game in games]),
        "tokens/sampled": float(sum(game.sampled for game in games)),
        "env/calls": float(sum(game.calls for game in games)),
        "env/errors": float(sum(game.stop == "env_error" for game in games)),
        "env/latency": median(latencies) if latencies else 0.0,
    }
    ends = {f"stop/{stop}": _mean([float(game.stop == stop) for game in games]) for stop in get_args(Stop)}
    return metrics | ends | _intervals(games)


def _intervals(games: Sequence[GameResult]) -> dict[str, float]:
    """NAME_low and NAME_high: 95 % over other questions. The games of one question are not independent."""
    scored = [(game, game.reward) for game in games if game.reward is not None]
    if not scored:
        return {}
    questions = [game.question for game, _ in scored]
    columns = {
        "reward/mean": [reward.total for _, reward in scored],
        "em": [game.em for game, _ in scored],
        "format": [game.well_formed for game, _ in scored],
    }
    intervals = {name: mean_interval(values, questions) for name, values in columns.items()}
    return {
        f"{name}_{end}": value
        for name, interval in intervals.items()
        for end, value in zip(("low", "high"), interval, strict=True)
        if isfinite(value)  # nothing is known from a single question
    }


def _mean(values: list[float]) -> float:
    return mean(values) if values else 0.0


def step_metrics(
    games_PG: list[list[ScoredGame]], ranks: Ranks, *, rollout_seconds: float
) -> dict[str, float]:
    """The metrics of a step over all ranks: its games, its groups, and its speed."""
    results = [result_of_game(game) for group in games_PG for game in group]
    metrics = game_metrics([game for share in ranks.gather(results) for game in share])
    kept = [group for group in games_PG if any(game.advantage is not None for game in group)]
    without_spread = [group for group in kept if not has_spread(group)]
    idle = [result_of_game(game) for group in without_spread for game in group]
    calls, usd = sum(game.calls for game in idle), sum(game.usd for game in idle)
    kept_count, without_spread_count, groups, idle_calls, idle_usd = ranks.sum(
        [len(kept), len(without_spread), len(games_PG), calls, usd]
    )
    return metrics | {
        "groups/dropped": 1 - kept_count / groups,
        "groups/no_spread": without_spread_count / max(kept_count, 1),
        "groups/no_spread_calls": idle_calls,
        "groups/no_spread_usd": idle_usd,
        "tokens/s": metrics["tokens/sampled"] / rollout_seconds,
        "games/s": metrics["games"] / rollout_seconds,
    }


def spending(environment: Pool, ranks: Ranks) -> dict[str, float]:
    """Calls and tokens since the last line, over all ranks, and the dollars of the whole run.

    env/usd was spent on replies; at most env/lost_usd more was billed for lost attempts.
    """
    shares = ranks.gather(environment.take_metrics())
    before = environment.budget.before
    now = environment.budget.spent - before
    usd, lost_usd = ranks.sum([now.usd, now.lost_usd])
    dollars = {"env/usd": usd + before.usd, "env/lost_usd": lost_usd + before.lost_usd}
    names = sorted({name for share in shares for name in share})
    return dollars | {name: sum(share.get(name, 0.0) for share in shares) for name in names}
