"""Alarms for collapsing metrics: training has broken something that worked before."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from prompt_r1.training.gap import Limit

WINDOW = 5  # steps: a single bad step is noise, so every rule reads a median


def _halved(now: float, history: Sequence[float]) -> bool:
    return now < 0.5 * max(history) and max(history) > 0.2


def _fell(now: float, history: Sequence[float]) -> bool:
    """By more than a quarter of the range of rewards, -1 to 1."""
    return now < max(history) - 0.5


def _far(now: float, history: Sequence[float]) -> bool:
    """In nats per token: the text has lost the language of the start model."""
    return now > 1.0


def _extreme(now: float, history: Sequence[float]) -> bool:
    """In nats per token. Too low: all games of a group are the same. Too high: the text is noise."""
    return now < 1e-3 or now > max(1.0, 3 * history[0])


def _exploded(now: float, history: Sequence[float]) -> bool:
    return now > 10 * median(history) > 0


def _stale(now: float, history: Sequence[float]) -> bool:
    """In nats per token: with --ahead, games as old as this tell little of the policy that learns."""
    return now > 0.1


RULES: dict[str, Callable[[float, Sequence[float]], bool]] = {
    "format": _halved,
    "stop/answered": _halved,
    "reward/mean": _fell,
    "kl": _far,
    "entropy": _extreme,
    "grad_norm": _exploded,
    "engine/staleness": _stale,
}


@dataclass
class Watchdog:
    """Reads the metric lines of a run in order, and says which metrics have collapsed.

    Its state follows from the lines alone: after a resume it reads the earlier lines again.
    """

    gap: Limit | None = None  # of the distance between engine and policy, judged from the first line on
    recent: dict[str, list[float]] = field(default_factory=dict)  # last values of each metric
    medians: dict[str, list[float]] = field(default_factory=dict)  # of each window so far
    alarming: set[str] = field(default_factory=set)  # metrics that have collapsed and not recovered

    def see(self, line: Mapping[str, float]) -> list[str]:
        """A short description of each metric that collapses with this line.

        A metric is reported once, until it recovers. It is judged from its sixth line on; a value that is not
        finite is a collapse at once. A step whose games the environment broke says nothing about the agent.
        """
        alarms: list[str] = []
        if line.get("groups/dropped") == 1:
            return alarms
        if self.gap is not None and self.gap.metric in line:
            alarms += self._see_gap(self.gap, line[self.gap.metric])
        for name in [name for name in RULES if name in line]:
            value = line[name]
            now, before = self._add(name, value)
            collapsed = not math.isfinite(value) or (bool(before) and RULES[name](now, before))
            if not collapsed:
                self.alarming.discard(name)
            elif name not in self.alarming:
                self.alarming.add(name)
                usual = f"; its median over the run is {median(before):.3g}" if before else ""
                alarms.append(f"{name} is {now if math.isfinite(value) else value:.3g}{usual}")
        return alarms

    def _see_gap(self, limit: Limit, value: float) -> list[str]:
        if value <= limit.alarm:
            self.alarming.discard(limit.metric)
        elif limit.metric not in self.alarming:
            self.alarming.add(limit.metric)
            return [f"{limit.metric} is {value:.3g}, above {limit.alarm:g}: engine and policy disagree"]
        return []

    def _add(self, name: str, value: float) -> tuple[float, list[float]]:
        """The median of the window that ends with `value`, and the medians of the windows before it."""
        recent, medians = self.recent.setdefault(name, []), self.medians.setdefault(name, [])
        if math.isfinite(value):
            recent.append(value)
            del recent[:-WINDOW]
        before = list(medians)
        now = median(recent) if recent else value
        if len(recent) == WINDOW:
            medians.append(now)
        return now, before
