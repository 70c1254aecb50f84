"""Metrics of games, over all ranks, with intervals."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import sqrt
from statistics import mean, median, stdev
from typing import TypeVar, get_args

from prompt_r1.distributed import Ranks
from prompt_r1.environments.environment import Environment
from prompt_r1.metrics.em_f1 import exact_match, f1
from prompt_r1.reward import well_formed
from prompt_r1.types import ScoredGame, Stop

# Metrics of a game that has a reward; those of other games count in stop/*, tokens/* and env/* only.
SCORED = ("reward/mean", "reward/format", "reward/answer", "em", "f1", "format", "turns", "game/usd")
WITH_INTERVAL = ("reward/mean", "em", "format")

T = TypeVar("T")
Row = Mapping[str, float]  # the metrics of one game


def metrics_of_game(game: ScoredGame) -> Row:
    """The metrics of one game by name; those in SCORED only if it has a reward.

    EM and F1 are those of the last answer; a game without answer has 0.
    """
    trajectory, answers = game.trajectory, game.trajectory.question.answers
    answer, broken = trajectory.answer or "", trajectory.stop == "env_error"
    replies = sum(turn.reply is not None for turn in trajectory.turns)
    row = {f"stop/{stop}": float(trajectory.stop == stop) for stop in get_args(Stop)}
    row |= {"tokens/game": len(trajectory.tokens), "tokens/sampled": sum(trajectory.sampled)}
    row |= {"env/calls": replies + broken, "env/errors": broken}
    if game.reward is None:
        return row
    return row | {
        "reward/mean": game.reward.total,
        "reward/format": game.reward.format,
        "reward/answer": game.reward.answer,
        "em": exact_match(answer, answers),
        "f1": f1(answer, answers),
        "format": float(well_formed(trajectory)),
        "turns": float(len(trajectory.turns)),
        "game/usd": trajectory.spent.usd,
    }


def game_metrics(rows_PG: Sequence[Sequence[Row]], latencies: Sequence[float]) -> dict[str, float]:
    """Means over the games of a step, and their intervals: ± 1.96 standard errors, 95 % for many questions.

    The games of one question are not independent, so the standard error is that of the questions' means.
    """
    rows = [row for group in rows_PG for row in group]
    scored_PG = [kept for group in rows_PG if (kept := [row for row in group if "em" in row])]
    metrics = {name: _mean([row[name] for group in scored_PG for row in group]) for name in SCORED}
    metrics |= {name: _mean([row[name] for row in rows]) for name in rows[0] if name.startswith("stop/")}
    metrics |= {
        "games": float(len(rows)),
        "tokens/game": _mean([float(row["tokens/game"]) for row in rows]),
        **{
            name: float(sum(row[name] for row in rows))
            for name in ("tokens/sampled", "env/calls", "env/errors")
        },
        "env/latency": median(latencies) if latencies else 0.0,
    }
    # Hard questions are asked longer, so their calls fail more often: what remains may be too easy.
    for kind in ("broken", "whole") if len(rows) > sum(map(len, scored_PG)) else ():
        of_kind = [group for group in rows_PG if (kind == "whole") == all("em" in row for row in group)]
        rewards = [row["reward/mean"] for group in of_kind for row in group if "em" in row]
        metrics |= {f"reward/{kind}_groups": _mean(rewards)} if rewards else {}
    # What the agent can do beside what it does: pass@k with k games of a question, beside pass@1 ("em").
    metrics["em/any"] = _mean([float(any(row["em"] == 1 for row in group)) for group in scored_PG])
    for name in WITH_INTERVAL if len(scored_PG) > 1 else ():
        means = [mean(row[name] for row in group) for group in scored_PG]
        half = 1.96 * stdev(means) / sqrt(len(means))
        metrics |= {f"{name}_low": mean(means) - half, f"{name}_high": mean(means) + half}
    return metrics


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else 0.0


def step_metrics(
    games_PG: list[list[ScoredGame]], ranks: Ranks, *, rollout_seconds: float
) -> dict[str, float]:
    """The metrics of a step over all ranks: its games, its groups, and its speed."""
    rows_PG = [[metrics_of_game(game) for game in group] for group in games_PG]
    replied = [turn for group in games_PG for game in group for turn in game.trajectory.turns]
    latencies = [turn.latency for turn in replied if turn.reply is not None]
    idle = [
        number
        for number, group in enumerate(games_PG)
        if any(game.advantage is not None for game in group) and not any(game.advantage for game in group)
    ]
    pairs = [pair for group in games_PG for pair in ranked_pairs(group)]
    sums = {
        "groups": float(len(games_PG)),
        "kept": float(sum(any(game.advantage is not None for game in group) for group in games_PG)),
        "idle": float(len(idle)),
        "idle calls": float(sum(row["env/calls"] for number in idle for row in rows_PG[number])),
        "idle usd": sum(game.trajectory.spent.usd for number in idle for game in games_PG[number]),
        "pairs": float(len(pairs)),
        "misranked": float(pairs.count(False)),
    }
    total = dict(zip(sums, ranks.sum(list(sums.values())), strict=True))
    metrics = game_metrics(joined(ranks.gather(rows_PG)), joined(ranks.gather(latencies)))
    return metrics | {
        "reward/misranked": total["misranked"] / max(total["pairs"], 1),
        "groups/dropped": 1 - total["kept"] / total["groups"],
        "groups/no_spread": total["idle"] / max(total["kept"], 1),
        "groups/no_spread_calls": total["idle calls"],
        "groups/no_spread_usd": total["idle usd"],
        "tokens/s": metrics["tokens/sampled"] / rollout_seconds,
        "games/s": metrics["games"] / rollout_seconds,
    }


def joined(shares: Sequence[Sequence[T]]) -> list[T]:
    """The shares of all ranks in one list."""
    return [item for share in shares for item in share]


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


def spending(environment: Environment, ranks: Ranks) -> dict[str, float]:
    """Calls and tokens since the last line, over all ranks, and the dollars of the whole run.

    env/lost_usd is the part of env/usd that is charged for attempts without a reply.
    """
    shares = ranks.gather(environment.take_metrics())
    before = environment.budget.before
    now = environment.budget.spent - before
    usd, lost_usd = ranks.sum([now.usd, now.lost_usd])
    dollars = {"env/usd": usd + before.usd, "env/lost_usd": lost_usd + before.lost_usd}
    names = sorted({name for share in shares for name in share})
    return dollars | {name: sum(share.get(name, 0.0) for share in shares) for name in names}
