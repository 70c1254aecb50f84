"""What the curves of a training are made of: one record a game, gathered over the ranks, and their means."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean, median
from typing import get_args

from prompt_r1.distributed.ranks import Ranks
from prompt_r1.environments.pool import Pool
from prompt_r1.metrics.statistics import mean_interval
from prompt_r1.reward import Rule, score
from prompt_r1.training.batch import Sample
from prompt_r1.training.validation import judge
from prompt_r1.types import Reward, Stop, Trajectory


@dataclass(frozen=True)
class Record:
    """A finished game in numbers. `reward` is None for a game that the environment broke."""

    question: str  # id
    stop: Stop
    reward: Reward | None
    em: float
    f1: float
    well_formed: float
    turns: int
    calls: int
    latencies: tuple[float, ...]  # seconds
    sampled: int  # agent tokens
    tokens: int  # all tokens


def record(trajectory: Trajectory, *, rule: Rule) -> Record:
    """A game's record; broken games have no reward."""
    result = judge(trajectory, rule=rule)
    asked = [turn for turn in trajectory.turns if turn.reply is not None]
    return Record(
        question=trajectory.question.id,
        stop=trajectory.stop,
        reward=None if trajectory.stop == "env_error" else score(trajectory, rule=rule),
        em=result.em,
        f1=result.f1,
        well_formed=result.format or 0.0,
        turns=len(trajectory.turns),
        calls=len(asked) + (trajectory.stop == "env_error"),
        latencies=tuple(turn.latency for turn in asked),
        sampled=sum(trajectory.sampled),
        tokens=len(trajectory.tokens),
    )


def game_metrics(records: Sequence[Record]) -> dict[str, float]:
    """Means over the games of a step; games that the environment broke count in stop/* and env/* only."""
    scored = [(game, game.reward) for game in records if game.reward is not None]
    latencies = [seconds for game in records for seconds in game.latencies]
    metrics = {
        "reward/mean": _mean([reward.total for _, reward in scored]),
        "reward/format": _mean([reward.format for _, reward in scored]),
        "reward/answer": _mean([reward.answer for _, reward in scored]),
        "em": _mean([game.em for game, _ in scored]),
        "f1": _mean([game.f1 for game, _ in scored]),
        "format": _mean([game.well_formed for game, _ in scored]),
        "turns": _mean([float(game.turns) for game, _ in scored]),
        "games": float(len(records)),
        "tokens/game": _mean([float(game.tokens) for game in records]),
        "tokens/sampled": float(sum(game.sampled for game in records)),
        "env/calls": float(sum(game.calls for game in records)),
        "env/errors": float(sum(game.stop == "env_error" for game in records)),
        "env/latency": median(latencies) if latencies else 0.0,
    }
    ends = {f"stop/{stop}": _mean([float(game.stop == stop) for game in records]) for stop in get_args(Stop)}
    return metrics | ends | _intervals(records)


def _intervals(records: Sequence[Record]) -> dict[str, float]:
    """NAME_low and NAME_high: 95 % over other questions. The games of one question are not independent."""
    scored = [(game, game.reward) for game in records if game.reward is not None]
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
    groups_PG: list[list[Trajectory]],
    samples_PG: list[list[Sample]],
    rule: Rule,
    ranks: Ranks,
    rollout_seconds: float,
) -> dict[str, float]:
    """The curves of a step, over all ranks: its games, its groups, and its speed."""
    records = [record(game, rule=rule) for group in groups_PG for game in group]
    metrics = game_metrics([game for share in ranks.gather(records) for game in share])
    flat = [all(sample.advantage == 0 for sample in group) for group in samples_PG if group]
    kept, without_spread, groups = ranks.sum([len(flat), sum(flat), len(groups_PG)])
    return metrics | {
        "groups/dropped": 1 - kept / groups,
        "groups/no_spread": without_spread / max(kept, 1),
        "tokens/s": metrics["tokens/sampled"] / rollout_seconds,
        "games/s": metrics["games"] / rollout_seconds,
    }


def spending(environment: Pool, ranks: Ranks) -> dict[str, float]:
    """Calls and tokens since the last line, over all ranks, and the dollars of the whole run."""
    shares = ranks.gather(environment.take_metrics())
    budget = environment.budget
    usd = ranks.sum([budget.spent.usd - budget.before.usd])[0] + budget.before.usd
    names = sorted({name for share in shares for name in share})
    return {"env/usd": usd, **{name: sum(share.get(name, 0.0) for share in shares) for name in names}}
