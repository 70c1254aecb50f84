"""Alarms for metrics that have collapsed. An alarm does not stop the run; docs/running.md says what to do.

Some metrics are judged by each value. Others change by chance from step to step, so the medians of their last
WINDOW values are judged. In 72 healthy runs, groups/dropped, reward/misranked and the share of odd replies
(filtered, cut or empty) were 0, and update/kl was at most 0.0006.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median

from prompt_r1.pair.named_agent import teaching_command
from prompt_r1.training.update import GapLimit

Line = Mapping[str, float]  # the metrics of a step

WINDOW = 5
LEARNED_EM = 0.9  # Groups without spread are no alarm where the sampled games have this EM.


class Alarms:
    """Reads the metrics of a run, line by line, and says which of them have collapsed.

    Its state follows from the lines alone, so a resumed run reads the earlier lines again.
    """

    def __init__(self, *, agent: str, gap: GapLimit, own_reward: bool) -> None:
        """Begin without lines.

        agent        the name that the user gave, for the command that teaches the format
        gap          the limit of the gap between engine and policy
        own_reward   whether the reward is the user's. It may have any scale, so it may fall
        """
        self.agent = agent
        self.gap = gap
        self.own_reward = own_reward
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
        problem = self.problem_of_value(metric, value)
        alarm = f"{described(metric, value, values)}: {problem}" if problem else ""
        values.append(value)
        if len(values) < WINDOW:
            return alarm
        now = median(values[-WINDOW:])
        # The first median is not judged, because no median before it shows what is usual.
        problem = self.problem_of_median(metric, now) if medians else ""
        if problem and not alarm:
            alarm = f"{described(metric, now, medians)}: {problem}"
        medians.append(now)
        return alarm

    def problem_of_value(self, metric: str, now: float) -> str:
        """What is wrong with a run in which a metric has this value in a step; "" if nothing is."""
        before = self.values[metric]
        match metric:
            case "groups/dropped" if now > 0:
                return "over a quarter of their games failed (`error` in trajectories/ says why)"
            case "reward/misranked" if now > 0.2:
                return "the reward prefers worse answers"
            # 1.5 times the usual target of PPO (0.01), at which Spinning Up ends an update.
            case "update/kl" if now > 0.015:
                return "the steps are too large, or games are used too often"
            case "env/outcomes" if now > 0.2:
                return "so many replies are filtered, cut or empty (env/outcomes/… in metrics.jsonl)"
            case "format" if now == 0 and not before:
                return f"the agent does not know the format; `{teaching_command(self.agent)}` teaches it"
            # A far too large learning rate destroys the format at once.
            case "format" if now == 0 and max(before) > 0.5:
                return "no game is well formed any more"
            case self.gap.metric if now > self.gap.alarm:
                return "engine and policy disagree"
        return ""

    def problem_of_median(self, metric: str, now: float) -> str:
        """What is wrong with a run in which a window of a metric has this median; "" if nothing is."""
        before = self.medians[metric]
        match metric:
            case "format" if has_halved(now, before):
                return "the agent loses the format"
            case "stop/answered" if has_halved(now, before):
                return "the agent ends fewer games with an answer"
            case "reward/mean" if now < max(before) - 0.5 and not self.own_reward:  # R is in [-ε, 1].
                return "it has fallen by more than 0.5 below its best"
            # "kl" and "entropy" are in nats per token.
            case "kl" if now > 1.0:
                return "the text loses the language of the start model"
            case "entropy" if now < 1e-3:
                return "all games of a group are the same"
            case "entropy" if now > max(1.0, 3 * before[0]):
                return "the text is noise"
            case "grad_norm" if now > 10 * median(before) > 0:
                return "the gradient is over ten times as large as usual"
            case "groups/no_spread" if now >= 1.0:
                return "every advantage is 0"
        return ""


def described(metric: str, value: float, before: Sequence[float]) -> str:
    """A value of a metric, beside the median of the values before it, if there are any."""
    text = f"{metric} is {value:.3g}"
    if before:
        text += f"; its median over the run is {median(before):.3g}"
    return text


def has_halved(now: float, before: Sequence[float]) -> bool:
    """Whether a share is less than half of its highest value before, if that was above 0.2."""
    return max(before) > 0.2 and now < 0.5 * max(before)


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
