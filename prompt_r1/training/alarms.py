"""Alarms for metrics that have collapsed. An alarm does not stop the run; docs/running.md says what to do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

from prompt_r1.programs.command_line import teaching_command
from prompt_r1.training.update import Limit

# These metrics can collapse within one step. Each has the highest value without an alarm, and the meaning of
# a higher value. In 72 healthy runs all of them were 0, except update/kl, which was at most 0.0006.
LIMITS = {
    "groups/dropped": (0.0, "over a quarter of their games failed (`error` in trajectories/ says why)"),
    "reward/misranked": (0.2, "the reward prefers worse answers"),
    # 1.5 times the usual target of PPO (0.01), at which Spinning Up ends an update.
    "update/kl": (0.015, "the steps are too large, or games are used too often"),
}


def _has_halved(now: float, before: Sequence[float]) -> bool:
    return max(before) > 0.2 and now < 0.5 * max(before)


# These metrics are judged by the median of their last WINDOW values, because a single bad step is noise. Each
# has a function that says whether the median `now` is an alarm after the medians `before`.
WINDOW = 5
COLLAPSES: dict[str, Callable[[float, Sequence[float]], bool]] = {
    "format": _has_halved,
    "stop/answered": _has_halved,
    # The reward has fallen by more than a quarter of its range, -1 to 1.
    "reward/mean": lambda now, before: now < max(before) - 0.5,
    # Above 1 nat per token, the text has lost the language of the start model.
    "kl": lambda now, before: now > 1.0,
    # In nats per token. If it is too low, all games of a group are the same; if too high, the text is noise.
    "entropy": lambda now, before: now < 1e-3 or now > max(1.0, 3 * before[0]),
    "grad_norm": lambda now, before: now > 10 * median(before) > 0,
    # At 1, every advantage of all groups is 0, and nothing is learned.
    "groups/no_spread": lambda now, before: now >= 1.0,
}

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
    gap: Limit  # the limit of the gap between engine and policy
    recent: dict[str, list[float]] = field(default_factory=dict)  # the last WINDOW values of each metric
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
        wrong = {**self._above_limits(line), **self._collapses(line)}
        wrong |= self._lost_format(line)
        wrong |= _odd_replies(line)
        new = [text for name, text in wrong.items() if text and name not in self.active]
        self.active -= wrong.keys()
        self.active |= {name for name, text in wrong.items() if text}
        return new

    def _above_limits(self, line: Mapping[str, float]) -> dict[str, str]:
        """Judge the metrics that can collapse within one step."""
        limits = LIMITS | {self.gap.metric: (self.gap.alarm, "engine and policy disagree")}
        wrong = {}
        for name, (highest, meaning) in limits.items():
            if name in line:
                is_fine = line[name] <= highest  # False for NaN
                wrong[name] = "" if is_fine else f"{name} is {line[name]:.3g}, above {highest:g}: {meaning}"
        return wrong

    def _collapses(self, line: Mapping[str, float]) -> dict[str, str]:
        """Judge metrics by the median of a window, from their sixth value on."""
        has_learned = line.get("em", 0.0) >= LEARNED_EM
        wrong = {}
        for name, has_collapsed in COLLAPSES.items():
            if name in line and not (name == "groups/no_spread" and has_learned):
                wrong[name] = self._judge_window(name, line[name], has_collapsed)
        return wrong

    def _judge_window(
        self, name: str, value: float, has_collapsed: Callable[[float, Sequence[float]], bool]
    ) -> str:
        """What is wrong with a metric; "" if nothing is. A value that is not finite is a collapse at once."""
        recent = self.recent.setdefault(name, [])
        medians = self.medians.setdefault(name, [])
        before = list(medians)
        usual = f"; its median over the run is {median(before):.3g}" if before else ""
        if not isfinite(value):
            return f"{name} is {value:.3g}{usual}"
        recent.append(value)
        del recent[:-WINDOW]
        if len(recent) < WINDOW:
            return ""
        now = median(recent)
        medians.append(now)
        if before and has_collapsed(now, before):
            return f"{name} is {now:.3g}{usual}"
        return ""

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
