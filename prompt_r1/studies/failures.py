"""`studies failures`: break mini runs, and see which alarm comes first.

Every run starts from the agent of the same ten default steps and differs from the healthy run in one fault
(`prompt_r1.studies.faults`, or flags). Validations are always played as they should be, so they measure the
agent. EM has *fallen* at the first validation from which on all are more than FALL below the best before. The
same command reuses finished runs.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from prompt_r1.agent.names import RUNS
from prompt_r1.cli.command_line import did_you_mean, program_name
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.fields import POSITIVE, check_number
from prompt_r1.errors import UsageError
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.studies.faults import FAULTS
from prompt_r1.studies.programs import Flags, add_seeds, train
from prompt_r1.studies.study import Line, pooled_validations, validations
from prompt_r1.training.alarms import Watchdog
from prompt_r1.training.update import limit_of

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
HEALTHY = "healthy"
# The faults in flags, beside those of the healthy run; the others are in code.
FAULTY_FLAGS: dict[str, Flags] = {
    "learning-rate": {"--lr": [1e-2]},
    "leak": {"--reward": ["prompt_r1.studies.faults:pays_for_length"]},
}
FAILURES = (*FAULTY_FLAGS, *FAULTS)


@dataclass(frozen=True)
class Course:
    """What became of one run."""

    lines: Sequence[Line]
    alarm: int | None  # step of the first alarm
    text: str  # of the alarms of that step, one per line
    fall: int | None  # step of the validation at which EM has fallen


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


def course_of(lines: Sequence[Line]) -> Course:
    """What became of the run with these metrics."""
    step, text = first_alarm(lines) or (None, "none")
    em = {at: line["val/em"] for at, line in validations(lines).items()}
    return Course(lines, step, text, step_of_fall(em))


def train_runs(
    names: Sequence[str], out: Path, seeds: Sequence[int], *, steps: int
) -> dict[str, dict[int, Course]]:
    """Train the healthy runs and the failures; what became of them by name and seed."""
    names = [*names, HEALTHY]
    for seed in seeds:
        start: Flags = {"--seed": [seed], "--test-data": ["none"], "--val-every": [START_STEPS]}
        train(out / f"start-seed{seed}", START_STEPS, start)
        common: Flags = {**SMALL, "--seed": [seed], "--agent": [out / f"start-seed{seed}" / "agent"]}
        for name in names:
            flags = {**common, **FAULTY_FLAGS.get(name, {})}
            train(out / f"{name}-seed{seed}", steps, flags, fault=name if name in FAULTS else "")
    return {
        name: {seed: course_of(read_metrics(out / f"{name}-seed{seed}")) for seed in seeds} for name in names
    }


def failures_table(courses: Mapping[str, Mapping[int, Course]]) -> str:
    """A Markdown row for each failure, and for none: when the alarm came and EM fell, and EM at both ends."""
    header = ["fault", "first alarm", "at step", "EM fell at step", "EM at the start", "EM at the end"]
    rows = []
    for name, by_seed in courses.items():
        texts = [text for course in by_seed.values() for text in course.text.splitlines()]
        alarms = dict.fromkeys(text.split(" is ")[0].split(" from ")[0] for text in texts)
        steps = [", ".join(_step(course.alarm) for course in by_seed.values())]
        steps.append(", ".join(_step(course.fall) for course in by_seed.values()))
        pooled = pooled_validations([course.lines for course in by_seed.values()])
        ends = [f"{pooled[0].mean:.2f}", str(pooled[-1])]
        rows.append([name, ", ".join(alarms), *steps, *ends])
    return markdown_table(header, rows)


def _step(step: int | None) -> str:
    return "–" if step is None else str(step)


def main(arguments: list[str]) -> None:
    """Break runs from a command line."""
    parser = argparse.ArgumentParser(
        program_name("python -m prompt_r1.studies") + " failures", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("name", nargs="*", help=f"failures (all): {', '.join(FAILURES)}")
    add_seeds(parser)
    parser.add_argument("--steps", type=int, default=6, help="GRPO steps of each run (6)")
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
    courses = train_runs(names, given.out, given.seeds, steps=given.steps)
    text = failures_table(courses)
    (given.out / "failures.md").write_text(f"{text}\n", "utf-8")
    print(f"\n{given.out}/failures.md\n\n{text}")
