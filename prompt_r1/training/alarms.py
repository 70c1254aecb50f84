"""Alarms for metrics that have collapsed. An alarm does not stop the run; docs/running.md says what to do."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from prompt_r1.pair.named_agent import teaching_command
from prompt_r1.training.update import Limit

Line = Mapping[str, float]  # the metrics of a step
IsWrong = Callable[[float, Sequence[float], Line], bool]
"""Takes the median of a metric's last values, the medians before, and the metrics of the step."""

# Zero well-formed games are an alarm if they would happen by chance less than once in 1,000 steps.
CHANCE = 1e-3
LEARNED_EM = 0.9  # Groups without spread are no alarm where the sampled games have this EM.
OUTCOMES = "env/outcomes/"  # prefix of the counts of replies that are filtered, cut or empty
ODD_REPLIES = "env/outcomes"  # the share of these replies among all


@dataclass(frozen=True)
class AlarmRule:
    """When a metric is wrong, by the median of its last `window` values."""

    metric: str
    is_wrong: IsWrong
    meaning: str | Callable[[Line], str]  # what is wrong with the run then
    window: int = 5  # because a single bad step is noise; 1: the metric can collapse within one step


def above(limit: float) -> IsWrong:
    """Return a test of whether a metric is above `limit`."""
    return lambda now, before, line: now > limit


def has_halved(now: float, before: Sequence[float], line: Line) -> bool:
    """Whether a share is less than half of the highest before."""
    return max(before) > 0.2 and now < 0.5 * max(before)


def is_lost(now: float, before: Sequence[float], line: Line) -> bool:
    """Whether a share is 0, and not by chance: a far too large learning rate destroys the format at once."""
    highest = max(before, default=0.0)
    return now == 0 and (1 - highest) ** line.get("games", 0.0) < CHANCE


# If several rules of a metric find it wrong, only the first of them is reported. In 72 healthy runs,
# groups/dropped, reward/misranked and the share of odd replies were 0, and update/kl was at most 0.0006.
ALARM_RULES = (
    AlarmRule(
        "groups/dropped",
        above(0),
        "over a quarter of their games failed (`error` in trajectories/ says why)",
        window=1,
    ),
    AlarmRule("reward/misranked", above(0.2), "the reward prefers worse answers", window=1),
    # 1.5 times the usual target of PPO (0.01), at which Spinning Up ends an update.
    AlarmRule("update/kl", above(0.015), "the steps are too large, or games are used too often", window=1),
    AlarmRule(
        ODD_REPLIES,
        above(0.2),
        lambda line: f"replies are filtered, cut or empty, most of them: {most_frequent_outcome(line)}",
        window=1,
    ),
    AlarmRule("format", is_lost, "no game is well formed any more", window=1),
    AlarmRule("format", has_halved, "the agent loses the format"),
    AlarmRule("stop/answered", has_halved, "the agent ends fewer games with an answer"),
    AlarmRule(
        "reward/mean",
        lambda now, before, line: now < max(before) - 0.5,  # R is in [-ε, 1].
        "it has fallen by more than 0.5 below its best",
    ),
    # "kl" and "entropy" are in nats per token.
    AlarmRule("kl", above(1.0), "the text loses the language of the start model"),
    AlarmRule(
        "entropy",
        lambda now, before, line: now < 1e-3 or now > max(1.0, 3 * before[0]),
        "if it is low, all games of a group are the same; if it is high, the text is noise",
    ),
    AlarmRule(
        "grad_norm",
        lambda now, before, line: now > 10 * median(before) > 0,
        "the gradient is over ten times as large as usual",
    ),
    AlarmRule("groups/no_spread", lambda now, before, line: now >= 1.0, "every advantage is 0"),
)


def rules_of(*, agent: str, gap: Limit, own_reward: bool) -> list[AlarmRule]:
    """The rules of a run. `gap`: the limit of the gap between engine and policy.

    `agent` is the name that the user gave, for the command that teaches the format. A user's own reward may
    have any scale, so it has no rule.
    """
    rules = [rule for rule in ALARM_RULES if rule.metric != "reward/mean" or not own_reward]
    unknown_format = f"the agent does not know the format; `{teaching_command(agent)}` teaches it"
    return [
        *rules,
        AlarmRule(
            "format", lambda now, before, line: now == 0 and line.get("step") == 1, unknown_format, window=1
        ),
        AlarmRule(gap.metric, above(gap.alarm), "engine and policy disagree", window=1),
    ]


class Watch:
    """Applies a rule to the values of its metric, one after another."""

    def __init__(self, rule: AlarmRule) -> None:
        self.rule = rule
        self.values: deque[float] = deque(maxlen=rule.window)  # the last values
        self.medians: list[float] = []  # the medians of all full windows so far

    def read(self, line: Line) -> str:
        """What is wrong with the metric in the next line; "" if nothing is.

        A value that is not finite is wrong at once. The first median of several values is not judged, because
        no median before it shows what is usual.
        """
        rule, value = self.rule, line[self.rule.metric]
        if not isfinite(value):
            return self._compared(value)
        self.values.append(value)
        if len(self.values) < rule.window:
            return ""
        now = median(self.values)
        can_judge = rule.window == 1 or len(self.medians) > 0
        text = ""
        if can_judge and rule.is_wrong(now, self.medians, line):
            meaning = rule.meaning if isinstance(rule.meaning, str) else rule.meaning(line)
            text = f"{self._compared(now)}: {meaning}"
        self.medians.append(now)
        return text

    def _compared(self, value: float) -> str:
        """The value beside the median of its earlier medians, if there are any."""
        text = f"{self.rule.metric} is {value:.3g}"
        if self.medians:
            text += f"; its median over the run is {median(self.medians):.3g}"
        return text


class Alarms:
    """Reads the metrics of a run, line by line, and says which of them have collapsed.

    Its state follows from the lines alone, so a resumed run reads the earlier lines again.
    """

    def __init__(self, rules: Iterable[AlarmRule]) -> None:
        self.watches = [Watch(rule) for rule in rules]
        self.active: set[str] = set()  # metrics that have collapsed and not recovered

    def read(self, line: Line) -> list[str]:
        """Read a line, and return a short description of each metric that collapses with it.

        A metric is described again only if it has recovered in between.
        """
        line = judged_metrics(line)
        wrong: dict[str, str] = {}  # metrics of this line → what is wrong with them, or ""
        for watch in self.watches:
            metric = watch.rule.metric
            if metric in line:
                text = watch.read(line)
                wrong[metric] = wrong.get(metric) or text
        new = [text for metric, text in wrong.items() if text and metric not in self.active]
        self.active -= wrong.keys()
        self.active |= {metric for metric, text in wrong.items() if text}
        return new


def judged_metrics(line: Line) -> Line:
    """The metrics of a line that the rules judge, with the share of odd replies among the calls."""
    # If the environment broke every group, the other metrics say nothing about the agent.
    if line.get("groups/dropped") == 1:
        return {"groups/dropped": 1.0}
    judged = dict(line)
    if line.get("em", 0.0) >= LEARNED_EM:
        judged.pop("groups/no_spread", None)
    calls = line.get("env/calls", 0.0) + line.get("val/calls", 0.0)
    if calls:
        judged[ODD_REPLIES] = sum(_outcomes(line).values()) / calls
    return judged


def most_frequent_outcome(line: Line) -> str:
    """The most frequent label of the replies that are filtered, cut or empty, for example "length"."""
    counts = _outcomes(line)
    return max(counts, key=counts.__getitem__)


def _outcomes(line: Line) -> dict[str, float]:
    """The counts of replies that are filtered, cut or empty, by label."""
    return {name.removeprefix(OUTCOMES): count for name, count in line.items() if name.startswith(OUTCOMES)}
