"""The metrics of a training step: means over its games, with intervals, over all ranks."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import isfinite
from statistics import mean, median
from typing import get_args

from prompt_r1.distributed.ranks import Ranks
from prompt_r1.environments.pool import Pool
from prompt_r1.metrics.statistics import mean_interval
from prompt_r1.options.advantages import has_spread
from prompt_r1.training.results import GameResult, result_of_game
from prompt_r1.types import ScoredGame, Stop

REPLY_WORDS = 6  # of a reply that `same_reply` counts: a bare answer may be right for many questions
REPLY_CHARACTERS = 200  # that two replies are compared by
SAME_REPLY_QUESTIONS = 8  # in a step of fewer questions the same reply may be chance


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
    pairs = [pair for group in games_PG for pair in ranked_pairs(group)]
    pair_count, misranked = ranks.sum([len(pairs), pairs.count(False)])
    replies = [share for shares in ranks.gather(list(map(long_replies, games_PG))) for share in shares]
    return metrics | {
        "reward/misranked": misranked / max(pair_count, 1),
        "groups/dropped": 1 - kept_count / groups,
        "groups/no_spread": without_spread_count / max(kept_count, 1),
        "groups/no_spread_calls": idle_calls,
        "groups/no_spread_usd": idle_usd,
        "env/same_reply": same_reply(replies),
        "tokens/s": metrics["tokens/sampled"] / rollout_seconds,
        "games/s": metrics["games"] / rollout_seconds,
    }


def ranked_pairs(group: Sequence[ScoredGame]) -> list[bool]:
    """For each two games of a question that differ in R_ans: whether the better answer has the higher reward.

    Only games whose gate is open (R_fmt = ε) are compared, so eq. 15 ranks all pairs by their answers; a
    reward of the user's may not.
    """
    rewards = [game.reward for game in group if game.reward is not None and game.reward.gate_is_open]
    return [
        (one.total - other.total) * (one.answer - other.answer) > 0
        for one, other in combinations(rewards, 2)
        if one.answer != other.answer
    ]


def long_replies(group: Sequence[ScoredGame]) -> set[str]:
    """The beginnings of the different replies to the games of a question, without bare answers.

    Words with a digit are taken as equal: an error text may hold a time or the number of a request.
    """
    replies = {turn.reply for game in group for turn in game.trajectory.turns if turn.reply is not None}
    texts = {re.sub(r"\S*\d\S*", "#", reply[:REPLY_CHARACTERS]) for reply in replies}
    return {text for text in texts if len(text.split()) >= REPLY_WORDS}


def same_reply(replies_P: Sequence[set[str]]) -> float:
    """The share of the questions to which the commonest reply was given in some of their games."""
    counts = Counter(reply for replies in replies_P for reply in replies)
    if len(replies_P) < SAME_REPLY_QUESTIONS or not counts:
        return 0.0
    return max(counts.values()) / len(replies_P)


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
