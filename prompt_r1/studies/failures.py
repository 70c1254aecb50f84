"""`python -m prompt_r1.studies failures`: break mini runs, and see which alarm comes first.

Every run starts from the agent of the same ten default steps and differs from the healthy run in one fault
(`prompt_r1.studies.faults`, or flags). Validations are always played as they should be, so they measure the
agent. EM has *fallen* at the first validation from which on all are more than FALL below the best before. An
alarm *leads* if it comes at an earlier step. The same command reuses finished runs.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from prompt_r1.agent.names import RUNS
from prompt_r1.cli.command_line import did_you_mean, program_name
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.fields import POSITIVE, check_number
from prompt_r1.errors import UsageError
from prompt_r1.metrics.statistics import wilson
from prompt_r1.report.svg import Point, rate_text
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.studies.programs import Flags, add_seeds, train
from prompt_r1.training.alarms import Watchdog
from prompt_r1.training.logprob_gap import limit_of

START_STEPS = 10  # of the default run whose agent every run starts from
# Half a step of the mini preset, and a validation every second step.
SMALL: Flags = {
    "--questions": [8],
    "--mini-batch": [20],
    "--val-limit": [50],
    "--val-every": [2],
    "--test-data": ["none"],
}
FALL = 0.15  # of validation EM
FAULTS = "prompt_r1.studies.faults"
HEALTHY = "healthy"
Line = Mapping[str, float]


@dataclass(frozen=True)
class FailureCase:
    """A fault that a run is given."""

    flags: Flags = field(default_factory=dict)  # beside the healthy run's
    in_code: bool = True  # the fault of this name in faults.py; False: the flags alone
    steps: int = 6


FAILURES: dict[str, FailureCase] = {
    "learning-rate": FailureCase({"--lr": [1e-2]}, in_code=False),
    "leak": FailureCase({"--reward": [f"{FAULTS}:pays_for_length"]}, in_code=False),
    "error-texts": FailureCase(),
    "stale": FailureCase(),
    "sampler": FailureCase(),
    "displacement": FailureCase(steps=4),
    "no-spread": FailureCase(),
    "mask": FailureCase(),
    "re-rendered": FailureCase(),
}


@dataclass(frozen=True)
class Course:
    """What became of one run."""

    lines: Sequence[Line]
    alarm: int | None  # step of the first alarm
    text: str  # of the alarms of that step, one per line
    fall: int | None  # step of the validation at which EM has fallen

    @property
    def em(self) -> dict[int, float]:
        """Validation EM by step."""
        return validation_em(self.lines)

    @property
    def leads(self) -> bool | None:
        """Whether the alarm came before the fall; None: EM did not fall."""
        return None if self.fall is None else self.alarm is not None and self.alarm < self.fall


def validation_em(lines: Sequence[Line]) -> dict[int, float]:
    """Validation EM by step."""
    return {int(line["step"]): line["val/em"] for line in lines if "val/em" in line}


def step_of_fall(em: Mapping[int, float]) -> int | None:
    """The first validation from which on all are more than FALL below the best before it."""
    steps = sorted(em)
    for number, step in enumerate(steps[1:], 1):
        best = max(em[earlier] for earlier in steps[:number])
        if all(em[later] < best - FALL for later in steps[number:]):
            return step
    return None


def first_alarm(lines: Sequence[Line]) -> tuple[int, str] | None:
    """The first step with an alarm of the console or of the watchdog, and its alarms, one per line."""
    watchdog = Watchdog(limit_of(torch.float32))
    for line in lines:
        alarms = watchdog.see(line)
        if line["step"] == 1 and line["groups/no_spread"] == 1:
            alarms.insert(0, "nothing can be learned from step 1")
        if alarms:
            return int(line["step"]), "\n".join(alarms)
    return None


def read_course(folder: Path) -> Course:
    """What became of the run of a folder."""
    lines = list(read_metrics(folder))
    step, text = first_alarm(lines) or (None, "none")
    return Course(lines, step, text, step_of_fall(validation_em(lines)))


def train_runs(
    names: Sequence[str], out: Path, seeds: Sequence[int], *, most_steps: int
) -> dict[str, dict[int, Course]]:
    """Train the healthy runs and the failures; what became of them by name and seed."""
    cases = {name: FAILURES[name] for name in names} | {HEALTHY: FailureCase(in_code=False)}
    for seed in seeds:
        start: Flags = {"--seed": [seed], "--test-data": ["none"], "--val-every": [START_STEPS]}
        train(out / f"start-seed{seed}", START_STEPS, start)
        common: Flags = {**SMALL, "--seed": [seed], "--agent": [out / f"start-seed{seed}" / "agent"]}
        for name, case in cases.items():
            folder, steps = out / f"{name}-seed{seed}", min(case.steps, most_steps)
            train(folder, steps, {**common, **case.flags}, fault=name if case.in_code else "")
    return {name: {seed: read_course(out / f"{name}-seed{seed}") for seed in seeds} for name in cases}


def pooled(courses: Mapping[int, Course], place: int) -> Point:
    """EM of all seeds at their first (0) or last (-1) common validation, with Wilson's interval."""
    step = sorted(set.intersection(*(set(course.em) for course in courses.values())))[place]
    questions = int(sum(course.lines[0]["val/n"] for course in courses.values()))
    right = round(sum(course.em[step] * course.lines[0]["val/n"] for course in courses.values()))
    return Point(step, right / questions, *wilson(right, questions), questions)


def failures_table(courses: Mapping[str, Mapping[int, Course]]) -> str:
    """A Markdown row for each failure, and for none: when the alarm came and EM fell, and EM at both ends."""
    header = ["fault", "first alarm", "at step", "EM fell at step", "EM at the start", "EM at the end"]
    rows = []
    for name, by_seed in courses.items():
        texts = [text for course in by_seed.values() for text in course.text.splitlines()]
        alarms = dict.fromkeys(text.split(" is ")[0].split(" from ")[0] for text in texts)
        steps = [", ".join(_step(course.alarm) for course in by_seed.values())]
        steps.append(", ".join(_step(course.fall) for course in by_seed.values()))
        ends = [f"{pooled(by_seed, 0).mean:.2f}", rate_text(pooled(by_seed, -1))]
        rows.append([name, ", ".join(alarms), *steps, *ends])
    return markdown_table(header, rows)


def _step(step: int | None) -> str:
    return "–" if step is None else str(step)


def leading(courses: Mapping[str, Mapping[int, Course]]) -> str:
    """A sentence about all runs: how many alarms led, and how many healthy runs gave one."""
    broken = [course for name, by_seed in courses.items() if name != HEALTHY for course in by_seed.values()]
    fallen = [course for course in broken if course.fall is not None]
    false = [course for course in courses[HEALTHY].values() if course.alarm is not None]
    led = [course for course in fallen if course.leads]
    others = [course for course in broken if course.fall is None]
    noticed = [course for course in others if course.alarm is not None]
    return (
        f"EM fell in {len(fallen)} of {len(broken)} broken runs, and the alarm came before in {len(led)} of "
        f"them. Of the {len(others)} runs whose EM did not fall, {len(noticed)} gave an alarm. Of "
        f"{len(courses[HEALTHY])} healthy runs, {len(false)} did."
    )


def main(arguments: list[str]) -> None:
    """Break runs from a command line."""
    parser = argparse.ArgumentParser(
        program_name("python -m prompt_r1.studies") + " failures", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("name", nargs="*", help=f"failures (all): {', '.join(FAILURES)}")
    add_seeds(parser)
    parser.add_argument("--steps", type=int, default=10, help="most GRPO steps of a run (10)")
    parser.add_argument(
        "--out", type=Path, default=RUNS / "failures", help="folder of the runs (runs/failures)"
    )
    given = parser.parse_args(arguments)
    check_number("--steps", given.steps, POSITIVE)
    for name in given.name:
        if name not in FAILURES:
            known = ", ".join(FAILURES)
            raise UsageError(f"there is no failure {name!r}{did_you_mean(name, FAILURES)}; there are {known}")

    names = list(dict.fromkeys(given.name or FAILURES))
    courses = train_runs(names, given.out, given.seeds, most_steps=given.steps)
    text = f"{failures_table(courses)}\n\n{leading(courses)}"
    (given.out / "failures.md").write_text(f"{text}\n", "utf-8")
    print(f"\n{given.out}/failures.md\n\n{text}")
