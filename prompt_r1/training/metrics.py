"""Metrics of games, over all ranks, with intervals; alarms for metrics that collapse.

docs/running.md says what to do after each alarm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isfinite, sqrt
from statistics import mean, median, stdev
from typing import get_args

from prompt_r1.environments.environment import Environment
from prompt_r1.f1 import exact_match, f1
from prompt_r1.model.distributed import Ranks
from prompt_r1.programs.command_line import teaching_command
from prompt_r1.reward import well_formed
from prompt_r1.training.update import Limit
from prompt_r1.types import ScoredGame, Stop

# Metrics of a game that has a reward; those of other games count in stop/*, tokens/* and env/* only.
SCORED = ("reward/mean", "reward/format", "reward/answer", "em", "f1", "format", "turns", "game/usd")
WITH_INTERVAL = ("reward/mean", "em", "format")

WINDOW = 5  # steps: a single bad step is noise, so every rule reads a median
CHANCE = 1e-3  # probability below which it is no accident that no game of a step is well formed
LEARNED_EM = 0.9  # of the sampled games: groups without spread are then right, and no alarm
ODD = "env/outcomes/"  # counts of replies that are filtered, cut or empty, by label
MOST_ODD = 0.2  # the highest share of them without an alarm

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
    row |= {"env/calls": replies + broken, "env/errors": broken, "usd": trajectory.spent.usd}
    if game.advantage is not None:
        row["advantage"] = game.advantage
    if game.reward is None:
        return row
    return row | {
        "reward/mean": game.reward.total,
        "reward/format": game.reward.format,
        "reward/answer": game.reward.answer,
        "gate": game.reward.gate_is_open,
        "em": exact_match(answer, answers),
        "f1": f1(answer, answers),
        "format": float(well_formed(trajectory)),
        "turns": float(len(trajectory.turns)),
        "game/usd": trajectory.spent.usd,
    }


def game_metrics(rows_PG: Sequence[Sequence[Row]], latencies: Sequence[float]) -> dict[str, float]:
    """Means over the games of a step, and their intervals: ± 1.96 standard errors, 95 % for many questions.

    The games of one question are not independent, so the interval is that of the mean over questions, of a
    normal distribution: enough for a curve.
    """
    rows = [row for group in rows_PG for row in group]
    scored_PG = [kept for group in rows_PG if (kept := [row for row in group if "em" in row])]
    metrics = {name: _mean([row[name] for group in scored_PG for row in group]) for name in SCORED}
    shares = [name for name in rows[0] if name.startswith("stop/")]
    metrics |= {name: _mean([row[name] for row in rows]) for name in (*shares, "tokens/game")}
    for name in ("tokens/sampled", "env/calls", "env/errors"):
        metrics[name] = float(sum(row[name] for row in rows))
    metrics |= {"games": float(len(rows)), "env/latency": median(latencies) if latencies else 0.0}
    # Hard questions are asked longer, so their calls fail more often: what remains may be too easy.
    if len(rows) > sum(map(len, scored_PG)):
        for kind in ("broken", "whole"):
            of_kind = [group for group in rows_PG if (kind == "whole") == all("em" in row for row in group)]
            rewards = [row["reward/mean"] for group in of_kind for row in group if "em" in row]
            metrics |= {f"reward/{kind}_groups": _mean(rewards)} if rewards else {}
    # What the agent can do beside what it does: pass@k with k games of a question, beside pass@1 ("em").
    metrics["em/any"] = _mean([float(any(row["em"] == 1 for row in group)) for group in scored_PG])
    if len(scored_PG) > 1:  # nothing is known from a single question
        for name in WITH_INTERVAL:
            means = [mean(row[name] for row in group) for group in scored_PG]
            half = 1.96 * stdev(means) / sqrt(len(means))
            metrics |= {f"{name}_low": mean(means) - half, f"{name}_high": mean(means) + half}
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(mean(values)) if values else 0.0


def step_metrics(
    games_PG: list[list[ScoredGame]], ranks: Ranks, *, rollout_seconds: float
) -> dict[str, float]:
    """The metrics of a step over all ranks: its games, its groups, and its speed."""
    rows_PG = ranks.gather_lists([[metrics_of_game(game) for game in group] for group in games_PG])
    turns = [turn for group in games_PG for game in group for turn in game.trajectory.turns]
    latencies = ranks.gather_lists([turn.latency for turn in turns if turn.reply is not None])
    metrics = game_metrics(rows_PG, latencies)
    kept = [group for group in rows_PG if any("advantage" in row for row in group)]
    idle = [group for group in kept if not any(row.get("advantage") for row in group)]
    pairs = [pair for group in rows_PG for pair in ranked_pairs(group)]
    return metrics | {
        "reward/misranked": pairs.count(False) / max(len(pairs), 1),
        "groups/dropped": 1 - len(kept) / len(rows_PG),
        "groups/no_spread": len(idle) / max(len(kept), 1),
        "groups/no_spread_calls": float(sum(row["env/calls"] for group in idle for row in group)),
        "groups/no_spread_usd": float(sum(row["usd"] for group in idle for row in group)),
        "tokens/s": metrics["tokens/sampled"] / rollout_seconds,
        "games/s": metrics["games"] / rollout_seconds,
    }


def ranked_pairs(group: Sequence[Row]) -> list[bool]:
    """For each two games of a question that differ in R_ans: whether the better answer has the higher reward.

    Only games whose gate is open (R_fmt = ε) are compared, so eq. 15 ranks all pairs by their answers; a
    reward of the user's may not.
    """
    total, answer = "reward/mean", "reward/answer"
    return [
        (one[total] - other[total]) * (one[answer] - other[answer]) > 0
        for one, other in combinations([row for row in group if row.get("gate")], 2)
        if one[answer] != other[answer]
    ]


def spending(environment: Environment, ranks: Ranks) -> dict[str, float]:
    """Calls and tokens since the last line, over all ranks, and the dollars of the whole run.

    env/lost_usd is the part of env/usd that is charged for attempts without a reply.
    """
    shares = ranks.gather(environment.take_metrics())
    budget = environment.budget
    spent = sum(ranks.gather(budget.spent - budget.before), budget.before)
    dollars = {"env/usd": spent.usd, "env/lost_usd": spent.lost_usd}
    names = sorted({name for share in shares for name in share})
    return dollars | {name: sum(share.get(name, 0.0) for share in shares) for name in names}


def _odd_replies(line: Mapping[str, float], calls: float) -> str:
    """An alarm for too many replies that are filtered, cut or empty; "" if there are fewer."""
    counts = {name: count for name, count in line.items() if name.startswith(ODD)}
    share = min(sum(counts.values()) / calls, 1.0)  # the check's call is none of a game
    if share <= MOST_ODD:
        return ""
    label = max(counts, key=counts.__getitem__).removeprefix(ODD)
    return f"{share:.0%} of the environment's replies are filtered, cut or empty, most of them: {label}"


def _halved(now: float, history: Sequence[float]) -> bool:
    return now < 0.5 * max(history) and max(history) > 0.2


# Whether a metric has collapsed, from the median of its window and those of the windows before.
RULES: dict[str, Callable[[float, Sequence[float]], bool]] = {
    "format": _halved,
    "stop/answered": _halved,
    # By more than a quarter of the range of rewards, -1 to 1.
    "reward/mean": lambda now, history: now < max(history) - 0.5,
    # In nats per token: the text has lost the language of the start model.
    "kl": lambda now, history: now > 1.0,
    # In nats per token. Too low: all games of a group are the same. Too high: the text is noise.
    "entropy": lambda now, history: now < 1e-3 or now > max(1.0, 3 * history[0]),
    "grad_norm": lambda now, history: now > 10 * median(history) > 0,
    # In all groups: every advantage is 0, and nothing is learned.
    "groups/no_spread": lambda now, history: now >= 1.0,
}


# Metrics, the value above which one step is an alarm, and what that means. They are means over all tokens or
# questions of a step. In 72 healthy runs they were at most 0, and update/kl at most 0.0006.
SIGNS = {
    "groups/dropped": (0.0, "over a quarter of their games failed (`error` in trajectories/ says why)"),
    "reward/misranked": (0.2, "the reward prefers worse answers"),
    # 1.5 times the usual target of PPO (0.01), at which Spinning Up ends an update.
    "update/kl": (0.015, "the steps are too large, or games are used too often"),
}


@dataclass
class Watchdog:
    """Reads the metric lines of a run in order, and says which metrics have collapsed.

    Its state follows from the lines alone: after a resume it reads the earlier lines again.
    """

    agent: str  # as the user named it, for the command that teaches it the format
    gap: Limit  # of the distance between engine and policy, judged from the first line on
    recent: dict[str, list[float]] = field(default_factory=dict)  # last values of each metric
    medians: dict[str, list[float]] = field(default_factory=dict)  # of each window so far
    highest_format: float = 0.0  # share of well-formed games, of all lines so far
    alarming: set[str] = field(default_factory=set)  # metrics that have collapsed and not recovered

    def see(self, line: Mapping[str, float]) -> list[str]:
        """A short description of each metric that collapses with this line.

        A metric is reported once, until it recovers. One of RULES is judged from its sixth line on; a value
        that is not finite is a collapse at once. A step whose games the environment broke says nothing about
        the agent, and one whose answers are nearly all right needs no spread.
        """
        if line.get("groups/dropped") == 1:
            line = {"groups/dropped": 1.0}
        signs = SIGNS | {self.gap.metric: (self.gap.alarm, "engine and policy disagree")}
        wrong: dict[str, str] = {}  # what is wrong with each metric of the line; "": nothing
        for name, (highest, meaning) in signs.items():
            if name in line:
                alarm = f"{name} is {line[name]:.3g}, above {highest:g}: {meaning}"
                wrong[name] = "" if line[name] <= highest else alarm
        right = line.get("em", 0.0) >= LEARNED_EM
        for name in RULES:
            if name in line and not (right and name == "groups/no_spread"):
                wrong[name] = self._judge_window(name, line[name])
        # A learning rate that is far too large can destroy the format in a single step.
        self.highest_format = max(self.highest_format, line.get("format", 0.0))
        if line.get("format") == 0 and (1 - self.highest_format) ** line.get("games", 0.0) < CHANCE:
            wrong["format"] = f"format is 0, after {self.highest_format:.3g}: no game is well formed any more"
        elif line.get("format") == 0 and line.get("step") == 1:
            wrong["format"] = (
                "no game is well formed: the agent does not know the format; "
                f"`{teaching_command(self.agent)}` teaches it"
            )
        if calls := line.get("env/calls", 0.0) + line.get("val/calls", 0.0):
            wrong["env/outcomes"] = _odd_replies(line, calls)
        alarms = [text for name, text in wrong.items() if text and name not in self.alarming]
        self.alarming -= wrong.keys()
        self.alarming |= {name for name, text in wrong.items() if text}
        return alarms

    def _judge_window(self, name: str, value: float) -> str:
        """Judge the median of the window that ends with `value` by those of the windows before it."""
        recent, medians = self.recent.setdefault(name, []), self.medians.setdefault(name, [])
        before = list(medians)
        if isfinite(value):
            recent.append(value)
            del recent[:-WINDOW]
        now = median(recent) if recent else value
        if len(recent) == WINDOW:
            medians.append(now)
        usual = f"; its median over the run is {median(before):.3g}" if before else ""
        if not isfinite(value):
            return f"{name} is {value:.3g}{usual}"
        return f"{name} is {now:.3g}{usual}" if before and RULES[name](now, before) else ""
