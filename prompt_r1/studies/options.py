"""`python -m prompt_r1.studies options`: mini runs with one option each beside the default, over seeds.

Every run has the same questions, the same number of games and a validation every few steps; only the flags of
its variant differ. The same command reuses finished runs and resumes the others.
"""

import argparse
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from prompt_r1.agent.names import RUNS
from prompt_r1.cli.command_line import program_name, run_program
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.fields import POSITIVE, check_number
from prompt_r1.errors import UsageError
from prompt_r1.metrics.statistics import wilson
from prompt_r1.report.svg import COLOURS, Plot, Point, Series, rate_text, svg
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.studies.programs import Flags, add_seeds, train

DEFAULT = "default"
# Name → flags beside the mini preset. docs/options.md explains each.
VARIANTS: dict[str, Flags] = {
    DEFAULT: {},
    "batch-std": {"--advantages": ["group-mean-batch-std"]},
    "no-std": {"--advantages": ["no-std"]},
    "clip-high": {"--clip-high": [0.28]},
    "gspo": {"--ratio": ["sequence"], "--clip": [0.003], "--clip-high": [0.004]},
    "drop-even-groups": {"--drop-even-groups": []},
    "turn-credit": {"--credit": ["turn"]},
    "no-kl": {"--kl-coef": [0]},
    "ahead": {"--ahead": [1]},
    **{f"lora-{rank}": {"--adapter-rank": [rank], "--lr": [2e-3]} for rank in (1, 2, 4, 8, 16, 32)},
}
LEARNED = 0.9  # validation EM


@dataclass(frozen=True)
class Curve:
    """What one run logged: validation EM by step, and the calls of the environment up to each step."""

    em: Mapping[int, float]
    questions: int  # of a validation
    calls: Mapping[int, float]

    def learned(self) -> int | None:
        """The first step whose validation EM is at least LEARNED."""
        return next((step for step, em in self.em.items() if em >= LEARNED), None)


def read_curve(folder: Path) -> Curve:
    """The curve of a run folder. `calls` counts those of training and validation, sent or reused."""
    lines = list(read_metrics(folder))
    em = {int(line["step"]): line["val/em"] for line in lines if "val/em" in line}
    calls, spent = {}, 0.0
    for line in lines:
        spent += line["env/paid"] + line["env/reused"]
        calls[int(line["step"])] = spent
    return Curve(em, int(lines[0]["val/n"]), calls)


def train_variants(
    names: Sequence[str], out: Path, seeds: Sequence[int], *, steps: int, val_every: int, jobs: int
) -> dict[str, dict[int, Curve]]:
    """Train each variant with each seed, `jobs` runs at a time; the curves by name and seed.

    A run may be longer than `steps` from before: the curves have the validations that all runs have.
    """
    runs = [(name, seed) for seed in seeds for name in names]

    def train_one(run: tuple[str, int]) -> None:
        name, seed = run
        flags: Flags = {
            "--seed": [seed],
            "--val-every": [val_every],
            "--test-data": ["none"],
            **VARIANTS[name],
        }
        train(folder_of(out, name, seed), steps, flags)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(train_one, runs))
    curves = {name: {seed: read_curve(folder_of(out, name, seed)) for seed in seeds} for name in names}
    shared = set.intersection(*(set(curve.em) for by_seed in curves.values() for curve in by_seed.values()))
    return {
        name: {seed: _at_steps(curve, shared) for seed, curve in by_seed.items()}
        for name, by_seed in curves.items()
    }


def _at_steps(curve: Curve, steps: Container[int]) -> Curve:
    """The curve with the validations of these steps only."""
    return replace(curve, em={step: em for step, em in curve.em.items() if step in steps})


def folder_of(out: Path, name: str, seed: int) -> Path:
    """The run folder of a variant and seed."""
    return out / f"{name}-seed{seed}"


def pooled(curves: Mapping[int, Curve], step: int) -> Point:
    """Validation EM of all seeds at a step, with Wilson's interval over their questions."""
    right = sum(round(curve.em[step] * curve.questions) for curve in curves.values())
    questions = sum(curve.questions for curve in curves.values())
    return Point(step, right / questions, *wilson(right, questions), questions)


def options_table(curves: Mapping[str, Mapping[int, Curve]]) -> str:
    """A Markdown row for each variant: EM at the last step and over the run, and the way to EM 0.90."""
    seeds = list(next(iter(curves.values())))
    header = ["variant", "val EM at the end", *(f"seed {seed}" for seed in seeds), "mean over the run"]
    header += [f"steps to EM {LEARNED:.2f}", "calls"]
    rows = []
    for name, by_seed in curves.items():
        last = max(next(iter(by_seed.values())).em)
        learned = [curve.learned() for curve in by_seed.values()]
        rows.append(
            [
                name,
                rate_text(pooled(by_seed, last)),
                *(f"{curve.em[last]:.2f}" for curve in by_seed.values()),
                f"{fmean(fmean(curve.em.values()) for curve in by_seed.values()):.3f}",
                ", ".join("never" if step is None else str(step) for step in learned),
                f"{fmean(curve.calls[last] for curve in by_seed.values()):,.0f}",
            ]
        )
    return markdown_table(header, rows)


def options_plot(curves: Mapping[str, Mapping[int, Curve]]) -> Plot:
    """Validation EM by step, all seeds pooled."""
    series = [
        Series(
            name,
            [pooled(by_seed, step) for step in next(iter(by_seed.values())).em],
            dashed=number >= len(COLOURS),  # the colours repeat
        )
        for number, (name, by_seed) in enumerate(curves.items())
    ]
    return Plot("Validation EM by training step", "GRPO step", "EM", series)


def main(arguments: list[str]) -> None:
    """Train and compare variants from a command line."""
    parser = argparse.ArgumentParser(
        program_name("python -m prompt_r1.studies") + " options", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("name", nargs="*", help=f"variants beside the default (all): {', '.join(VARIANTS)}")
    add_seeds(parser)
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps (40)")
    parser.add_argument("--val-every", type=int, default=4, help="steps between validations (4)")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time (2)")
    parser.add_argument(
        "--out", type=Path, default=RUNS / "options", help="folder of the runs (runs/options)"
    )
    given = parser.parse_args(arguments)
    for flag in ("steps", "val_every", "jobs"):
        check_number(f"--{flag.replace('_', '-')}", getattr(given, flag), POSITIVE)
    unknown = [name for name in given.name if name not in VARIANTS]
    if unknown:
        raise UsageError(f"there is no variant {unknown[0]!r}; the variants are {', '.join(VARIANTS)}")

    names = list(dict.fromkeys([DEFAULT, *(given.name or VARIANTS)]))
    curves = train_variants(
        names, given.out, given.seeds, steps=given.steps, val_every=given.val_every, jobs=given.jobs
    )
    table = options_table(curves)
    note = (
        f"Validation EM [95 % Wilson interval], greedy games, {given.steps} steps, seeds "
        f"{', '.join(map(str, given.seeds))}; calls of training and validation, mean of the seeds."
    )
    file = given.out / "options.md"
    file.write_text(f"# {options_plot(curves).title}\n\n![](options.svg)\n\n{table}\n\n{note}\n", "utf-8")
    file.with_suffix(".svg").write_text(svg(options_plot(curves)), "utf-8")
    print(f"\n{file}, .svg\n\n{table}\n\n{note}")


if __name__ == "__main__":
    run_program(main)
