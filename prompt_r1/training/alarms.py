"""Alarms for metrics that have collapsed. An alarm does not stop the run; docs/running.md says what to do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

from prompt_r1.pair.named_agent import teaching_command
from prompt_r1.training.update import Limit

WINDOW = 5


@dataclass(frozen=True)
class Rule:
    """When a metric is wrong, by the median of its last `window` values."""

    metric: str
    window: int  # WINDOW, because a single bad step is noise; 1: the metric can collapse within one step.
    is_wrong: Callable[[float, Sequence[float]], bool]  # the median now, and the medians before
    meaning: str  # what is wrong with the run then


def _has_halved(now: float, before: Sequence[float]) -> bool:
    return max(before) > 0.2 and now < 0.5 * max(before)


# In 72 healthy runs, the metrics with a window of 1 were 0, except update/kl, which was at most 0.0006.
RULES = (
    Rule(
        "groups/dropped",
        1,
        lambda now, before: now > 0,
        "over a quarter of their games failed (`error` in trajectories/ says why)",
    ),
    Rule("reward/misranked", 1, lambda now, before: now > 0.2, "the reward prefers worse answers"),
    Rule(
        "update/kl",
        1,
        # 1.5 times the usual target of PPO (0.01), at which Spinning Up ends an update.
        lambda now, before: now > 0.015,
        "the steps are too large, or games are used too often",
    ),
    Rule("format", WINDOW, _has_halved, "the agent loses the format"),
    Rule("stop/answered", WINDOW, _has_halved, "the agent ends fewer games with an answer"),
    Rule(
        "reward/mean",
        WINDOW,
        lambda now, before: now < max(before) - 0.5,  # R is in [-ε, 1].
        "it has fallen by more than 0.5 below its best",
    ),
    # "kl" and "entropy" are in nats per token.
    Rule("kl", WINDOW, lambda now, before: now > 1.0, "the text loses the language of the start model"),
    Rule(
        "entropy",
        WINDOW,
        lambda now, before: now < 1e-3 or now > max(1.0, 3 * before[0]),
        "if it is low, all games of a group are the same; if it is high, the text is noise",
    ),
    Rule(
        "grad_norm",
        WINDOW,
        lambda now, before: now > 10 * median(before) > 0,
        "the gradient is over ten times as large as usual",
    ),
    Rule("groups/no_spread", WINDOW, lambda now, before: now >= 1.0, "every advantage is 0"),
)


def rules_of(*, gap: Limit, own_reward: bool) -> list[Rule]:
    """The rules of a run. `gap`: the limit of the gap between engine and policy."""
    rules = [*RULES, Rule(gap.metric, 1, lambda now, before: now > gap.alarm, "engine and policy disagree")]
    if own_reward:  # It may have any scale.
        rules = [rule for rule in rules if rule.metric != "reward/mean"]
    return rules


# Zero well-formed games are an alarm if they would happen by chance less than once in 1,000 steps.
CHANCE = 1e-3
LEARNED_EM = 0.9  # Groups without spread are no alarm where the sampled games have this EM.
OUTCOMES = "env/outcomes/"  # prefix of the counts of replies that are filtered, cut or empty
MAX_LABELLED_SHARE = 0.2  # the highest share of such replies without an alarm


@dataclass
class Alarms:
    """Reads the metrics of a run, line by line, and says which of them have collapsed.

    Its state follows from the lines alone, so a resumed run reads the earlier lines again.
    """

    agent: str  # The name that the user gave, for the command that teaches the format.
    rules: Sequence[Rule]
    recent: dict[str, list[float]] = field(default_factory=dict)  # the last values of each metric
    medians: dict[str, list[float]] = field(default_factory=dict)  # the medians of the full windows so far
    highest_format: float = 0.0  # share of well-formed games
    active: set[str] = field(default_factory=set)  # metrics that have collapsed and not recovered

    def read(self, line: Mapping[str, float]) -> list[str]:
        """Read a line, and return a short description of each metric that collapses with it.

        A metric is described again only if it has recovered in between.
        """
        # If the environment broke every group, the other metrics say nothing about the agent.
        if line.get("groups/dropped") == 1:
            line = {"groups/dropped": 1.0}
        # Metrics that this line judges → what is wrong with them, or "".
        wrong = self._broken_rules(line)
        wrong |= self._lost_format(line)
        wrong |= _odd_replies(line)
        new = [text for name, text in wrong.items() if text and name not in self.active]
        self.active -= wrong.keys()
        self.active |= {name for name, text in wrong.items() if text}
        return new

    def _broken_rules(self, line: Mapping[str, float]) -> dict[str, str]:
        """Judge each metric that has a rule. Groups without spread are fine once the answers are right."""
        has_learned = line.get("em", 0.0) >= LEARNED_EM
        wrong = {}
        for rule in self.rules:
            if rule.metric in line and not (rule.metric == "groups/no_spread" and has_learned):
                wrong[rule.metric] = self._judge(rule, line[rule.metric])
        return wrong

    def _judge(self, rule: Rule, value: float) -> str:
        """What is wrong with the next value of a metric; "" if nothing is.

        A value that is not finite is wrong at once. The first median of several values is not judged, because
        no median before it shows what is usual.
        """
        recent = self.recent.setdefault(rule.metric, [])
        medians = self.medians.setdefault(rule.metric, [])
        if not isfinite(value):
            return _compared(rule.metric, value, medians)
        recent.append(value)
        del recent[: -rule.window]
        if len(recent) < rule.window:
            return ""
        now = median(recent)
        can_judge = rule.window == 1 or len(medians) > 0
        text = ""
        if can_judge and rule.is_wrong(now, medians):
            text = f"{_compared(rule.metric, now, medians)}: {rule.meaning}"
        medians.append(now)
        return text

    def _lost_format(self, line: Mapping[str, float]) -> dict[str, str]:
        """Judge a step without a well-formed game: a far too large learning rate destroys the format."""
        self.highest_format = max(self.highest_format, line.get("format", 0.0))
        if line.get("format") != 0:
            return {}
        by_chance = (1 - self.highest_format) ** line.get("games", 0.0)
        if by_chance < CHANCE:
            text = f"format is 0, after {self.highest_format:.3g}: no game is well formed any more"
        elif line.get("step") == 1:
            text = (
                "no game is well formed: the agent does not know the format; "
                f"`{teaching_command(self.agent)}` teaches it"
            )
        else:
            return {}
        return {"format": text}


def _compared(metric: str, value: float, medians: Sequence[float]) -> str:
    """The value of a metric beside the median of its earlier medians, if there are any."""
    text = f"{metric} is {value:.3g}"
    if medians:
        text += f"; its median over the run is {median(medians):.3g}"
    return text


def _odd_replies(line: Mapping[str, float]) -> dict[str, str]:
    """Judge the share of replies that are filtered, cut or empty."""
    calls = line.get("env/calls", 0.0) + line.get("val/calls", 0.0)
    if not calls:
        return {}
    counts = {name: count for name, count in line.items() if name.startswith(OUTCOMES)}
    share = sum(counts.values()) / calls
    if share <= MAX_LABELLED_SHARE:
        return {"env/outcomes": ""}
    most = max(counts, key=counts.__getitem__).removeprefix(OUTCOMES)
    text = f"{share:.0%} of the environment's replies are filtered, cut or empty, most of them: {most}"
    return {"env/outcomes": text}
