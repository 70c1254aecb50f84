"""Alarms for collapsing metrics; docs/running.md says what to do after each."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from prompt_r1.training.update import Limit

WINDOW = 5  # steps: a single bad step is noise, so every rule reads a median
HAD_FORMAT = 0.5  # of the games were well formed: then that none is cannot be chance
LEARNED_EM = 0.9  # of the sampled games: groups without spread are then right, and no alarm


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


@dataclass(frozen=True)
class Sign:
    """What a metric means that is above `highest` in a single step."""

    highest: float
    meaning: str


# Means over all tokens or questions of a step, so one step is enough. In 72 healthy runs they were at most 0,
# 0.44, and update/kl at most 0.0006 in the three that have it.
SIGNS = {
    "reward/misranked": Sign(0.2, "the reward prefers worse answers"),
    # 1.5 times the usual target of PPO (0.01), at which Spinning Up ends an update.
    "update/kl": Sign(0.015, "the steps are too large, or games are used too often"),
}


@dataclass
class Watchdog:
    """Reads the metric lines of a run in order, and says which metrics have collapsed.

    Its state follows from the lines alone: after a resume it reads the earlier lines again.
    """

    gap: Limit | None = None  # of the distance between engine and policy, judged from the first line on
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
            return []
        signs: dict[str, Sign] = {}
        if self.gap is not None:
            signs[self.gap.metric] = Sign(self.gap.alarm, "engine and policy disagree")
        wrong: dict[str, str] = {}  # what is wrong with each metric of the line; "": nothing
        for name, sign in (signs | SIGNS).items():
            if name in line:
                alarm = f"{name} is {line[name]:.3g}, above {sign.highest:g}: {sign.meaning}"
                wrong[name] = "" if line[name] <= sign.highest else alarm
        right = line.get("em", 0.0) >= LEARNED_EM
        for name in RULES:
            if name in line and not (right and name == "groups/no_spread"):
                wrong[name] = self._judge_window(name, line[name])
        # A learning rate that is far too large can destroy the format in a single step.
        self.highest_format = max(self.highest_format, line.get("format", 0.0))
        if line.get("format") == 0 and self.highest_format > HAD_FORMAT:
            wrong["format"] = f"format is 0, after {self.highest_format:.3g}: no game is well formed any more"
        alarms = [text for name, text in wrong.items() if text and name not in self.alarming]
        self.alarming -= wrong.keys()
        self.alarming |= {name for name, text in wrong.items() if text}
        return alarms

    def _judge_window(self, name: str, value: float) -> str:
        """Judge the median of the window that ends with `value` by those of the windows before it."""
        recent, medians = self.recent.setdefault(name, []), self.medians.setdefault(name, [])
        before = list(medians)
        if math.isfinite(value):
            recent.append(value)
            del recent[:-WINDOW]
        now = median(recent) if recent else value
        if len(recent) == WINDOW:
            medians.append(now)
        usual = f"; its median over the run is {median(before):.3g}" if before else ""
        if not math.isfinite(value):
            return f"{name} is {value:.3g}{usual}"
        return f"{name} is {now:.3g}{usual}" if before and RULES[name](now, before) else ""
