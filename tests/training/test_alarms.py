"""`Alarms`: no alarm for a run that learns, an alarm for each metric that collapses."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from prompt_r1.model.policy import Policy
from prompt_r1.training.alarms import LEARNED_EM, Alarms, rules_of
from prompt_r1.training.update import gap_limit_of
from tests.support import tiny
from tests.support.games import ANY_GAP

RULES = rules_of(agent="my-agent", gap=ANY_GAP, own_reward=False)

Curve = Callable[[int], float]  # the value of a metric in a step

# The metrics of a run that learns, like those of the mini runs.
HEALTHY: dict[str, Curve] = {
    "format": lambda step: min(1.0, 0.85 + step / 200),
    "stop/answered": lambda step: min(1.0, 0.9 + step / 200),
    "reward/mean": lambda step: 0.9 - 0.8 * math.exp(-step / 10),
    "kl": lambda step: 0.002 * step,
    "entropy": lambda step: 0.015 + 0.12 * math.exp(-step / 15),
    "grad_norm": lambda step: 0.1 + 0.2 * math.exp(-step / 15),
}


def noisy_run(later_curves: dict[str, Curve] = HEALTHY) -> list[dict[str, float]]:
    """The metrics of 60 steps, with noise; from step 40 on `later_curves` replace the healthy ones."""
    rng = random.Random(0)
    lines = []
    for step in range(1, 61):
        curves = HEALTHY | later_curves if step >= 40 else HEALTHY
        line = {name: curve(step) * rng.uniform(0.9, 1.1) for name, curve in curves.items()}
        lines.append(line | {"step": step})
    return lines


def alarms(lines: list[dict[str, float]]) -> list[tuple[int, str]]:
    """The step and text of each alarm."""
    return alarms_by(Alarms(agent="my-agent", gap=ANY_GAP, own_reward=False), lines)


def alarms_by(watch: Alarms, lines: list[dict[str, float]]) -> list[tuple[int, str]]:
    """The step and text of each alarm of this watch."""
    return [(int(line["step"]), alarm) for line in lines for alarm in watch.read(line)]


def alarms_for(name: str, values: Sequence[float]) -> list[tuple[int, str]]:
    """The alarms for a run with one metric, from step 0 on."""
    return alarms([{"step": step, name: value} for step, value in enumerate(values)])


def test_a_run_that_learns_gives_no_alarm():
    assert alarms(noisy_run()) == []


FINE = {"format": 1.0, "stop/answered": 1.0, "reward/mean": 0.5, "kl": 0.0, "entropy": 0.2, "grad_norm": 0.3}

# Metric, its usual value, a value just without an alarm and one just with it.
EDGES = [
    ("format", 1.0, 0.51, 0.49),
    ("reward/mean", 0.5, 0.01, -0.01),
    ("reward/mean", -0.4, -0.89, -0.91),
    ("kl", 0.0, 0.99, 1.01),
    ("entropy", 0.2, 0.0011, 0.0009),
    ("entropy", 0.2, 0.99, 1.01),
    ("entropy", 0.5, 1.49, 1.51),
]


@pytest.mark.parametrize(("name", "usual", "fine", "collapsed"), EDGES)
def test_each_metric_has_its_limit(name, usual, fine, collapsed):
    def alarming_after(value: float) -> list[str]:
        values = [usual] * 10 + [value] * 5
        lines = [{"step": step, **FINE, name: value} for step, value in enumerate(values)]
        return [alarm.split()[0] for _, alarm in alarms(lines)]

    assert alarming_after(fine) == [] and alarming_after(collapsed) == [name]


CURVES = [
    # A rate that was never above a fifth cannot collapse.
    ("format", [0.19] * 10 + [0.0] * 10, []),
    ("format", [0.21] * 10 + [0.0] * 10, [12]),
    # The first full window is the reference of the later ones.
    ("kl", [2.0] * 8, [5]),
    ("format", [1.0] + [0.1] * 7, []),
    # The median of five values decides.
    ("format", [1.0] * 10 + [0.1] * 2 + [1.0] * 8, []),
    ("format", [1.0] * 10 + [0.1] * 3 + [1.0] * 7, [12]),
    # The median of the window is 0.46, that of the best window 0.96.
    ("format", [0.3] * 10 + [1.0 - 0.02 * step for step in range(40)], [39]),
    # A fall is measured from the best window, also where the value stays above that of the start.
    ("reward/mean", [-0.9] * 10 + [0.5] * 10 + [-0.2] * 10, [22]),
    # Measured from the first window, 0.5 * 1.05**2: it never trebles from one window to the next.
    ("entropy", [0.5 * 1.05**step for step in range(60)], [27]),
]


@pytest.mark.parametrize(("name", "values", "steps"), CURVES)
def test_the_median_of_a_window_is_compared_with_those_of_the_windows_before(name, values, steps):
    assert [step for step, _ in alarms_for(name, values)] == steps


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_an_alarm_at_once(value):
    lines = noisy_run()
    lines[2]["grad_norm"] = value
    assert [step for step, _ in alarms(lines)] == [3]


@pytest.mark.parametrize(
    ("before", "steps"),
    [
        ([0.94], [1]),
        ([0.3, 0.94, 0.6], [3]),
        ([0.4], []),  # It may be chance, where a step has few games.
    ],
)
def test_well_formed_games_that_fall_to_none_are_an_alarm_in_that_step(before, steps):
    """A learning rate that destroys a model does so before a window of five steps is full."""
    assert [step for step, _ in alarms_for("format", [*before, 0.0, 0.0, 0.0])] == steps


def test_steps_whose_games_the_environment_broke_are_ignored():
    lines = noisy_run()
    for line in lines[40:]:
        line |= {"format": 0.0, "stop/answered": 0.0, "entropy": 0.0, "groups/dropped": 1.0}
    [(step, alarm)] = alarms(lines)
    assert step == 41 and alarm.startswith("groups/dropped is 1: ")


def test_a_users_own_reward_which_may_have_any_scale_may_fall():
    """A reward that went from 50 to 49 was an alarm, because R is at most 1."""
    lines: list[dict[str, float]] = [{"step": step, "reward/mean": 50.0 - step // 10} for step in range(20)]
    assert alarms_by(Alarms(agent="my-agent", gap=ANY_GAP, own_reward=True), lines) == []
    assert [step for step, _ in alarms(lines)] == [12], "by eq. 15 it would be one"


def test_a_metric_that_recovers_and_collapses_again_is_reported_again():
    lines = noisy_run({"format": lambda step: 0.05})
    assert len(alarms([*lines, *noisy_run()[20:40], *lines[40:]])) == 2


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_gap_between_engine_and_policy_is_an_alarm_from_the_first_step(compute):
    """A bug: the watch had no rule for it. It is reported once, until it is small again."""
    limit = gap_limit_of(Policy(tiny.model(), compute_dtype=compute))
    watch = Alarms(agent="my-agent", gap=limit, own_reward=False)
    seen = [
        watch.read({"step": step, limit.metric: share * limit.alarm})
        for step, share in enumerate([1.01, 2, 1, 3])
    ]
    assert [len(alarms) for alarms in seen] == [1, 0, 0, 1], "only a gap above the limit is an alarm"
    assert seen[0][0].startswith(f"{limit.metric} is ") and "disagree" in seen[0][0]


# The highest values that are no alarm, of the metrics that are judged by a single value.
LIMITS = {"groups/dropped": 0.0, "reward/misranked": 0.2, "update/kl": 0.015}


@pytest.mark.parametrize(("metric", "limit"), LIMITS.items())
def test_a_sign_is_an_alarm_in_its_first_step(metric, limit):
    """EM may fall within two steps, before a window of five is full."""
    seen = alarms_for(metric, [0.0, limit, limit + 0.01, limit + 0.02, limit, limit + 0.01])
    assert [step for step, _ in seen] == [2, 5]
    assert all(alarm.startswith(f"{metric} is {limit + 0.01:.3g}") for _, alarm in seen)
    [rule] = [rule for rule in RULES if rule.metric == metric]
    assert all(alarm.endswith(f": {rule.meaning}") for _, alarm in seen)


@pytest.mark.parametrize(("em", "count"), [(0.2, 1), (0.95, 0)])
def test_groups_without_spread_are_an_alarm_unless_the_answers_are_right(em, count):
    """A bug: the console said so in step 1 only, and a run that got stuck later gave no alarm."""
    lines = [{"step": step, "em": em, "groups/no_spread": 0.3 if step < 10 else 1.0} for step in range(20)]
    assert [alarm.split()[0] for _, alarm in alarms(lines)] == ["groups/no_spread"] * count


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_an_agent_without_the_format_is_an_alarm_that_names_the_command_which_teaches_it(spread):
    """An untrained model never wrote the format, and its run ended like a success."""
    line = {"step": 1, "em": 0.2, "format": 0.0, "groups/no_spread": spread}
    [(step, alarm)] = alarms([line, line | {"step": 2}])
    assert step == 1 and "`python -m prompt_r1.training.warm_start --agent my-agent --games mini`" in alarm


@pytest.mark.parametrize(("cut", "filtered", "count"), [(3, 1, 0), (4, 2, 1), (2, 4, 1)])
def test_odd_replies_are_an_alarm_from_a_fifth_of_the_calls_on(cut, filtered, count):
    """With a limit above the server's window every reply was empty, and the only alarm blamed the agent."""
    odd = {"env/outcomes/length": cut, "env/outcomes/content_filter": filtered}
    lines = [{"step": step, "env/calls": 20, **(odd if step in (3, 4, 6) else {})} for step in range(8)]
    found = alarms(lines)
    assert [step for step, _ in found] == [3, 6] * count
    assert all(alarm.startswith("env/outcomes is 0.3") for _, alarm in found)
    greedy = [{"step": 0, "val/calls": 20, **odd}]  # a validation alone
    assert len(alarms(greedy)) == count


def test_groups_without_spread_are_no_alarm_from_the_learned_em_on():
    """At this EM, all games of most questions are right."""

    def told(em: float) -> list[tuple[int, str]]:
        return alarms([{"step": step, "em": em, "groups/no_spread": 1.0} for step in range(9)])

    assert told(LEARNED_EM) == []
    assert len(told(LEARNED_EM - 0.01)) == 1


def test_a_share_that_was_never_above_a_fifth_has_not_halved():
    """So small a share moves by more than its half from one step to the next."""
    assert alarms_for("format", [0.2] * 9 + [0.05] * 9) == []
    assert len(alarms_for("format", [0.21] * 9 + [0.05] * 9)) == 1
