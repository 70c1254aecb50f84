"""Alarms for metrics that have collapsed. An alarm does not stop the run; docs/running.md says what to do.

`rules_of` has the rules in a table.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Literal

from prompt_r1.pair.named_agent import teaching_command
from prompt_r1.training.update import GapLimit

Line = Mapping[str, float]  # the metrics of a step

WINDOW = 5
LEARNED_EM = 0.9  # Groups without spread are no alarm where the sampled games have this EM.


@dataclass(frozen=True)
class AlarmRule:
    """When a metric has collapsed, and what that means."""

    metric: str
    # A metric that changes by chance from step to step is judged by the medians of its last WINDOW values.
    judged: Literal["value", "median"]
    has_collapsed: Callable[[float, Sequence[float]], bool]  # takes the value (or median) and those before it
    meaning: str


def rules_of(*, agent: str, gap: GapLimit, own_reward: bool) -> list[AlarmRule]:
    """The rules of a run. If a value and a median of a metric have collapsed, the value is reported.

    agent        the name that the user gave, for the command that teaches the format
    gap          the limit of the gap between engine and policy
    own_reward   whether the reward is the user's. It may have any scale, so it may fall

    In 72 healthy runs, groups/dropped, reward/misranked and env/outcomes were 0, and update/kl was at most
    0.0006. Its limit is 1.5 times the usual target of PPO (0.01), at which Spinning Up ends an update.
    "kl" and "entropy" are in nats per token.
    """
    teach = f"if the agent does not know the format, `{teaching_command(agent)}` teaches it"
    failed_calls = "over a quarter of their games failed (`error` in trajectories/ says why)"
    odd_replies = "so many replies are filtered, cut or empty (env/outcomes/… in metrics.jsonl)"
    fallen_reward = "it has fallen by more than 0.5 below its best"
    rules = [
        AlarmRule("format", "value", is_zero, f"no game is well formed; {teach}"),
        AlarmRule("format", "median", has_halved, "the agent loses the format"),
        AlarmRule("reward/mean", "median", lambda now, before: now < max(before) - 0.5, fallen_reward),
        AlarmRule("reward/misranked", "value", above(0.2), "the reward prefers worse answers"),
        AlarmRule("groups/dropped", "value", above(0.0), failed_calls),
        AlarmRule("groups/no_spread", "median", lambda now, before: now >= 1.0, "every advantage is 0"),
        AlarmRule("env/outcomes", "value", above(0.2), odd_replies),
        AlarmRule("kl", "median", above(1.0), "the text loses the language of the start model"),
        AlarmRule("update/kl", "value", above(0.015), "the steps are too large, or games are used too often"),
        AlarmRule("entropy", "median", lambda now, before: now < 1e-3, "all games of a group are the same"),
        AlarmRule(
            "entropy", "median", lambda now, before: now > max(1.0, 3 * before[0]), "the text is noise"
        ),
        AlarmRule(gap.metric, "value", above(gap.alarm), "engine and policy disagree"),
    ]
    if own_reward:
        return [rule for rule in rules if rule.metric != "reward/mean"]
    return rules


def above(limit: float) -> Callable[[float, Sequence[float]], bool]:
    """A test whether a value is above a limit."""
    return lambda now, before: now > limit


def is_zero(now: float, before: Sequence[float]) -> bool:
    """Whether a share is 0 in the first step, or after more than 0.5. After less, 0 may be chance."""
    return now == 0 and (not before or max(before) > 0.5)


def has_halved(now: float, before: Sequence[float]) -> bool:
    """Whether a share is less than half of its highest value before, if that was above 0.2."""
    return max(before) > 0.2 and now < 0.5 * max(before)


class Alarms:
    """Reads the metrics of a run, line by line, and says which of them have collapsed.

    Its state follows from the lines alone, so a resumed run reads the earlier lines again.
    """

    def __init__(self, *, agent: str, gap: GapLimit, own_reward: bool) -> None:
        """Begin without lines, with the rules of a run (`rules_of`)."""
        self.rules = rules_of(agent=agent, gap=gap, own_reward=own_reward)
        self.values = defaultdict[str, list[float]](list)  # metric → its finite values
        self.medians = defaultdict[str, list[float]](list)  # metric → the medians of its windows
        self.active: set[str] = set()  # metrics that have collapsed and not recovered

    def read(self, line: Line) -> list[str]:
        """Read a line, and return a short description of each metric that collapses with it.

        A metric is described again only if it has recovered in between.
        """
        new = []
        for metric, value in judged_metrics(line).items():
            alarm = self._alarm(metric, value)
            if not alarm:
                self.active.discard(metric)
            elif metric not in self.active:
                self.active.add(metric)
                new.append(alarm)
        return new

    def _alarm(self, metric: str, value: float) -> str:
        """Describe what is wrong with the next value of a metric; "" if nothing is."""
        values, medians = self.values[metric], self.medians[metric]
        if not isfinite(value):
            return described(metric, value, values)
        alarm = self._by_rules(metric, "value", value, values)
        values.append(value)
        if len(values) >= WINDOW:
            now = median(values[-WINDOW:])
            # The first median is not judged, because no median before it shows what is usual.
            if medians and not alarm:
                alarm = self._by_rules(metric, "median", now, medians)
            medians.append(now)
        return alarm

    def _by_rules(self, metric: str, judged: str, now: float, before: Sequence[float]) -> str:
        """Describe what the rules for the values or the medians of a metric find; "" if they find nothing."""
        for rule in self.rules:
            if (rule.metric, rule.judged) == (metric, judged) and rule.has_collapsed(now, before):
                return f"{described(metric, now, before)}: {rule.meaning}"
        return ""


def described(metric: str, value: float, before: Sequence[float]) -> str:
    """A value of a metric, beside the median of the values before it, if there are any."""
    text = f"{metric} is {value:.3g}"
    if before:
        text += f"; its median over the run is {median(before):.3g}"
    return text


def judged_metrics(line: Line) -> Line:
    """The metrics of a line that are judged, with the share of odd replies among the calls."""
    # If the environment broke every group, the other metrics say nothing about the agent.
    if line.get("groups/dropped") == 1:
        return {"groups/dropped": 1.0}
    judged = dict(line)
    if line.get("em", 0.0) >= LEARNED_EM:
        judged.pop("groups/no_spread", None)
    calls = line.get("env/calls", 0.0) + line.get("val/calls", 0.0)
    if calls:
        odd = [count for name, count in line.items() if name.startswith("env/outcomes/")]
        judged["env/outcomes"] = sum(odd) / calls
    return judged
