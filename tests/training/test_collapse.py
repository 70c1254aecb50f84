"""The alarm over the curves: silent on runs that learn, loud on runs that break."""

import json
import math
import random
from collections.abc import Callable

import pytest

from prompt_r1.training.collapse import Watchdog

Curve = Callable[[int], float]

# A run of 60 steps that learns, as the mini runs do.
HEALTHY: dict[str, Curve] = {
    "format": lambda step: min(1.0, 0.85 + step / 200),
    "stop/answered": lambda step: min(1.0, 0.9 + step / 200),
    "reward/mean": lambda step: 0.9 - 0.8 * math.exp(-step / 10),
    "kl": lambda step: 0.002 * step,
    "entropy": lambda step: 0.015 + 0.12 * math.exp(-step / 15),
    "grad_norm": lambda step: 0.1 + 0.2 * math.exp(-step / 15),
}


def run(name: str = "", collapse: Curve = lambda step: 0.0) -> list[dict[str, float]]:
    """The lines of a noisy run; from step 40 on the curve called `name` is `collapse`."""
    rng, lines = random.Random(0), []
    for step in range(1, 61):
        curves = {**HEALTHY, name: collapse} if name and step >= 40 else HEALTHY
        lines.append(
            {key: curve(step) * rng.uniform(0.9, 1.1) for key, curve in curves.items()} | {"step": step}
        )
    return lines


def alarms(lines: list[dict[str, float]]) -> list[tuple[int, str]]:
    watchdog = Watchdog()
    return [(int(line["step"]), alarm) for line in lines for alarm in watchdog.see(line)]


def test_a_run_that_learns_gives_no_alarm():
    assert alarms(run()) == []


COLLAPSES: dict[str, Curve] = {
    "format": lambda step: 0.05,
    "stop/answered": lambda step: 0.9 * 0.7 ** (step - 40),
    "reward/mean": lambda step: 0.9 - 0.1 * (step - 40),
    "kl": lambda step: 0.1 * 1.5 ** (step - 40),
    "entropy": lambda step: 0.02 * 0.5 ** (step - 40),
    "grad_norm": lambda step: 0.1 * 2.0 ** (step - 40),
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_curve_that_collapses_is_told_once_and_by_its_name(name):
    [(step, alarm)] = alarms(run(name, COLLAPSES[name]))
    assert 40 < step < 60 and alarm.startswith(f"{name} is ")


STEADY = {
    "format": 1.0,
    "stop/answered": 1.0,
    "reward/mean": 0.5,
    "kl": 0.0,
    "entropy": 0.2,
    "grad_norm": 0.3,
}

# Curve, its usual value, the last value without an alarm and the first one with it.
LIMITS = [
    ("format", 1.0, 0.51, 0.49),
    ("stop/answered", 0.6, 0.31, 0.29),
    ("reward/mean", 0.5, 0.01, -0.01),
    ("reward/mean", -0.4, -0.89, -0.91),
    ("kl", 0.0, 0.99, 1.01),
    ("entropy", 0.2, 0.0011, 0.0009),
    ("entropy", 0.2, 0.99, 1.01),
    ("entropy", 0.5, 1.49, 1.51),
    ("grad_norm", 0.3, 2.9, 3.1),
    ("grad_norm", 0.02, 0.19, 0.21),
]


@pytest.mark.parametrize(("name", "usual", "fine", "collapsed"), LIMITS)
def test_each_curve_has_its_limit(name, usual, fine, collapsed):
    def after(value: float) -> list[str]:
        values = [usual] * 10 + [value] * 5
        told = alarms([{"step": step, **STEADY, name: value} for step, value in enumerate(values)])
        return [alarm.split()[0] for _, alarm in told]

    assert after(fine) == [] and after(collapsed) == [name]


@pytest.mark.parametrize(("usual", "told"), [(0.19, 0), (0.21, 1)])
def test_a_rate_that_was_never_above_a_fifth_has_nothing_to_lose(usual, told):
    lines = [{"step": step, "format": usual if step < 10 else 0.0} for step in range(20)]
    assert len(alarms(lines)) == told


def test_a_slow_decline_is_measured_from_the_best_window():
    values = [0.3] * 10 + [1.0 - 0.02 * step for step in range(40)]
    [(step, _)] = alarms([{"step": step, "format": value} for step, value in enumerate(values)])
    assert step == 10 + 29  # the median of its window is 0.46, that of the best window 0.96


def test_gradients_that_begin_after_steps_without_any_have_not_exploded():
    """Groups whose games are all alike have no gradient."""
    values = [0.0] * 10 + [0.3] * 10
    assert alarms([{"step": step, "grad_norm": value} for step, value in enumerate(values)]) == []


def test_a_curve_is_judged_from_its_sixth_line_on():
    """A window that is not full has no median to speak of, and the first full one is the measure."""
    assert [step for step, _ in alarms([{"step": step, "kl": 2.0} for step in range(1, 9)])] == [6]
    values = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert alarms([{"step": step, "format": value} for step, value in enumerate(values)]) == []


def test_the_middle_of_five_lines_is_what_counts():
    for bad, told in ((2, 0), (3, 1)):
        lines = [{"step": step, "format": 0.0 if 10 <= step < 10 + bad else 1.0} for step in range(20)]
        assert len(alarms(lines)) == told


def test_text_that_turns_to_noise_is_an_alarm_too():
    assert [alarm.split()[0] for _, alarm in alarms(run("entropy", lambda step: 4.0))] == ["entropy"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_an_alarm_at_once(value):
    lines = run()
    lines[2]["grad_norm"] = value
    assert [step for step, _ in alarms(lines)] == [3]


def test_a_single_bad_step_is_noise():
    lines = run()
    lines[45] |= {"format": 0.0, "reward/mean": -1.0, "kl": 50.0, "grad_norm": 90.0}
    assert alarms(lines) == []


def test_steps_whose_games_the_environment_broke_say_nothing_of_the_agent():
    lines = run()
    for line in lines[40:]:
        line |= {"format": 0.0, "stop/answered": 0.0, "entropy": 0.0, "groups/dropped": 1.0}
    assert alarms(lines) == []


def test_an_agent_that_begins_with_nothing_has_nothing_to_lose():
    quiet = dict.fromkeys(HEALTHY, 0.0) | {"entropy": 4.0, "reward/mean": -1.0}
    assert alarms([{"step": step, **quiet} for step in range(30)]) == []


def test_a_curve_that_recovers_and_collapses_again_is_told_again():
    lines = run("format", COLLAPSES["format"])
    told = alarms([*lines, *run()[20:40], *lines[40:]])
    assert len(told) == 2


def test_a_watchdog_that_is_given_the_lines_again_goes_on_as_before():
    lines = run("kl", COLLAPSES["kl"])
    fresh, at = Watchdog(), 50
    for line in json.loads(json.dumps(lines[:at])):
        fresh.see(line)
    told = [alarm for line in lines[at:] for alarm in fresh.see(line)]
    assert told == [alarm for step, alarm in alarms(lines) if step > at]
