"""The alarm over the curves of a run: it tells when training has broken something that worked before."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW = 5  # steps: a single bad step is noise, so every rule reads the median of the last few


def _halved(now: float, history: Sequence[float]) -> bool:
    return now < 0.5 * max(history) and max(history) > 0.2


def _fell(now: float, history: Sequence[float]) -> bool:
    """By more than a quarter of what rewards span, from -1 to 1."""
    return now < max(history) - 0.5


def _far(now: float, history: Sequence[float]) -> bool:
    """Nats a token from the frozen start: the text is no longer the language of the start model."""
    return now > 1.0


def _extreme(now: float, history: Sequence[float]) -> bool:
    """Nats a token: below, every game of a group is the same; above, the text is noise."""
    return now < 1e-3 or now > max(1.0, 3 * history[0])


def _exploded(now: float, history: Sequence[float]) -> bool:
    return now > 10 * median(history) > 0


RULES: dict[str, Callable[[float, Sequence[float]], bool]] = {
    "format": _halved,
    "stop/answered": _halved,
    "reward/mean": _fell,
    "kl": _far,
    "entropy": _extreme,
    "grad_norm": _exploded,
}


@dataclass
class Watchdog:
    """Reads the metric lines of a run, one after the other. All that it knows follows from them: after a
    resume it is given the lines that were written before.
    """

    recent: dict[str, list[float]] = field(default_factory=dict)  # the last values of each curve
    medians: dict[str, list[float]] = field(default_factory=dict)  # of each window so far
    alarming: set[str] = field(default_factory=set)  # curves that have collapsed and not recovered

    def see(self, line: Mapping[str, float]) -> list[str]:
        """The curves that collapse with this line, each in a few words; each is told once, until it recovers.

        A curve is judged from its sixth line on; a value that is not finite is a collapse at once. A step
        whose games the environment broke says nothing of the agent.
        """
        alarms = []
        for name in RULES:
            if name not in line or line.get("groups/dropped") == 1:
                continue
            now, before = self._add(name, line[name])
            collapsed = not math.isfinite(line[name]) or bool(before and RULES[name](now, before))
            if collapsed and name not in self.alarming:
                usual = f", {median(before):.3g} in the middle of the run so far" if before else ""
                shown = now if math.isfinite(line[name]) else line[name]
                alarms.append(f"{name} is {shown:.3g}{usual}")
            (self.alarming.add if collapsed else self.alarming.discard)(name)
        return alarms

    def _add(self, name: str, value: float) -> tuple[float, list[float]]:
        """The median of the window that ends with `value`, and those of the windows before it."""
        recent, medians = self.recent.setdefault(name, []), self.medians.setdefault(name, [])
        if math.isfinite(value):
            recent.append(value)
            del recent[:-WINDOW]
        before = list(medians)
        now = median(recent) if recent else value
        if len(recent) == WINDOW:
            medians.append(now)
        return now, before
