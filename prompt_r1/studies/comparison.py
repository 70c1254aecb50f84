"""`python -m prompt_r1.studies.comparison`: every method in `mini-advice`, on equal terms, over seeds.

A seed is a replication of everything: the world and its questions, the searches, the trainings. For each one
this trains the agents of `prompt-r1` and `grpo-only`, evaluates all methods (each search with the same budget
of calls), and finds the best static prompts by exhaustive search. Then it joins the seeds in Tables 2 and 3.
The same command resumes after a kill, and makes no run and no call twice.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from prompt_r1.agent.names import RUNS
from prompt_r1.cli.command_line import run_program
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.methods import METHODS
from prompt_r1.errors import UsageError
from prompt_r1.studies.programs import Flags, run, train

ENVIRONMENT = "mini-advice"
KINDS = {
    "Table 2": ("bridge", "compare", "pop", "math", "gen"),
    "Table 3 (out of distribution)": ("bridge_ood", "math_ood"),
}
PRICE = "0.15,0.60"  # dollars per million tokens, of both models
CEILING = "best prompt of all"  # by its score on the training questions that the searches see
BOUND = "upper bound of prompts"  # by its score on the test questions themselves
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % points, from 1 degree on


@dataclass(frozen=True)
class Settings:
    """What each seed's commands need."""

    out: Path
    steps: int  # of GRPO
    budget: int  # calls of both models in each search
    examples: int  # training and validation questions that score a prompt in a search
    limit: int  # test questions; 0: all
    methods: Sequence[str]

    def agent(self, seed: int) -> Path:
        """The run of the agent that asks `mini-advice`."""
        return self.out / f"agent-seed{seed}"

    def alone(self, seed: int) -> Path:
        """The run of the agent without environment."""
        return self.out / f"alone-seed{seed}"

    def results(self, seed: int) -> Path:
        """The results folder of evaluate.py."""
        return self.out / f"results-seed{seed}"


@dataclass(frozen=True)
class Measured:
    """One row of the tables."""

    name: str
    # (seed, dataset) → question → score
    scores: Mapping[tuple[int, str], Mapping[str, float]]
    calls_before: float = 0.0  # mean over the seeds: task and optimiser calls, or those of the training
    dollars_before: float = 0.0
    calls: float = 0.0  # per question
    dollars: float = 0.0  # per 1,000 questions


def main(arguments: list[str]) -> None:
    """Make the comparison from a command line."""
    parser = argparse.ArgumentParser("python -m prompt_r1.studies.comparison", description=__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "comparison", help="folder of runs and tables")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="worlds (0 1 2)")
    parser.add_argument("--steps", type=int, default=80, help="GRPO steps of each training (80)")
    parser.add_argument("--budget", type=int, default=2000, help="calls of each prompt search (2000)")
    parser.add_argument("--examples", type=int, default=50, help="questions that score a prompt (50)")
    parser.add_argument("--limit", type=int, default=0, help="test questions of each file (0: all)")
    parser.add_argument("--method", nargs="+", default=METHODS, choices=METHODS, help="methods (all)")
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time (2)")
    given = parser.parse_args(arguments)
    if len(given.seeds) > len(STUDENT) + 1 or min(given.jobs, given.budget, given.steps) < 1:
        raise UsageError("--seeds takes at most 10; --jobs, --budget and --steps must be above 0")
    settings = Settings(given.out, given.steps, given.budget, given.examples, given.limit, given.method)
    begin = time.perf_counter()
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(partial(replicate, settings), given.seeds))
    texts = join(settings, given.seeds)
    (given.out / "comparison.md").write_text("\n\n".join(texts) + "\n", "utf-8")
    print("\n\n".join(texts))
    print(f"\n{given.out / 'comparison.md'} ({time.perf_counter() - begin:.0f} s)")


def replicate(settings: Settings, seed: int) -> None:
    """Train and evaluate with one seed. What is finished is not repeated."""
    if "prompt-r1" in settings.methods or "agent-only" in settings.methods:
        own: Flags = {"--env": [ENVIRONMENT], "--seed": [seed], "--env-price": [PRICE]}
        train(settings.agent(seed), settings.steps, own)
    if "grpo-only" in settings.methods:
        train(settings.alone(seed), settings.steps, {"--env": ["none"], "--seed": [seed]})
    lines: dict[str, Sequence[object]] = {
        "--method": settings.methods,
        "--env": [ENVIRONMENT],
        "--data": ["mini", "mini:ood"],
        "--seed": [seed],
        "--limit": [settings.limit],
        "--env-price": [PRICE],
        "--optimizer-price": [PRICE],
        "--optimize-calls": [settings.budget],
        "--opro-train": [settings.examples],
        "--optimize-val": [settings.examples],
        # These end with the budget.
        "--opro-steps": [10**6],
        "--textgrad-epochs": [10**6],
        "--gepa-calls": [10**9],
        "--sft-lr": ["3e-3"],  # at LLaMA-Factory's rate the mini agent does not learn the format
        "--out": [settings.results(seed)],
    }
    if settings.agent(seed).exists():
        lines["--agent"] = [settings.agent(seed)]
    if "grpo-only" in settings.methods:
        lines["--grpo-agent"] = [settings.alone(seed)]
    run("evaluate", lines, log=settings.results(seed).with_suffix(".log"))


def join(settings: Settings, seeds: Sequence[int]) -> list[str]:
    """The tables as Markdown texts."""
    rows = [measure(settings, method, seeds) for method in settings.methods]
    bests = [best_prompts(settings, seed) for seed in seeds]
    for name in (CEILING, BOUND):
        scores = {key: of for best in bests for key, of in best[name].items()}
        rows.append(Measured(name, scores, calls=1.0))
    texts = [introduction(settings, seeds)]
    for title, all_kinds in KINDS.items():
        kinds = [
            kind for kind in all_kinds if all((seed, kind) in row.scores for row in rows for seed in seeds)
        ]
        if not kinds:  # --limit left none of them
            continue
        texts.append(f"## {title}\n\n{table(rows, kinds, seeds)}")
        texts.append(table_by_kind(rows, kinds, seeds))
    return texts


def introduction(settings: Settings, seeds: Sequence[int]) -> str:
    """What the tables show."""
    return f"""# Every method in {ENVIRONMENT}

Seeds {", ".join(map(str, seeds))}: each has its own world, questions, searches and trainings. Every search
may make {settings.budget:,} calls of both models, and scores prompts on up to {settings.examples} questions.
There is one search for each kind of question, and one on all kinds for the questions out of distribution.
Dollars are at {PRICE} per million tokens, at 4 characters a token.

- *Mean*: the mean over the kinds (EM; F1 for gen), in percent, with a 95 % bootstrap interval over questions.
- *By seed*: the mean of each seed; ± is the half width of Student's 95 % interval of their mean.
- *Below the best prompt*: the difference to the prompt that exhaustive search finds best on the training
  questions that the searches see; its interval is over paired questions. The *upper bound* is the best prompt
  on the test questions themselves: no static prompt scores more.
- *Before*: calls (of both models) and dollars before the first answer: searches, examples, training."""


def table(rows: Sequence[Measured], kinds: Sequence[str], seeds: Sequence[int]) -> str:
    """A row for each method: quality and cost."""
    header = ["method", "mean [95 %]", "by seed", "below the best prompt [95 %]", "calls before", "$ before"]
    header += ["calls / question", "$ / 1,000"]
    ceiling = next(row for row in rows if row.name == CEILING)
    lines = []
    for row in rows:
        groups = [(seed, kind) for seed in seeds for kind in kinds]
        scores = {key: list(row.scores[key].values()) for key in groups}
        gaps = {key: gap(ceiling.scores[key], row.scores[key]) for key in groups}
        by_seed = [fmean(fmean(scores[seed, kind]) for kind in kinds) for seed in seeds]
        lines.append(
            [
                row.name,
                percent(scores),
                spread(by_seed),
                "" if row is ceiling else percent(gaps, sign="+"),
                f"{row.calls_before:,.0f}",
                f"{row.dollars_before:.3f}",
                f"{row.calls:.2f}",
                f"{row.dollars:.4f}",
            ]
        )
    return markdown_table(header, lines)


def table_by_kind(rows: Sequence[Measured], kinds: Sequence[str], seeds: Sequence[int]) -> str:
    """A row for each method, a column for each kind of question."""
    lines = []
    for row in rows:
        cells = [
            percent({(seed, kind): list(row.scores[seed, kind].values()) for seed in seeds}) for kind in kinds
        ]
        lines.append([row.name, *cells])
    return markdown_table(["method", *kinds], lines)


def gap(ceiling: Mapping[str, float], scores: Mapping[str, float]) -> list[float]:
    """The differences to the ceiling, question by question."""
    assert ceiling.keys() == scores.keys(), "not the same questions"
    return [ceiling[question] - score for question, score in scores.items()]


def percent(groups: Mapping[tuple[int, str], Sequence[float]], *, sign: str = "") -> str:
    """The mean of the groups' means in percent, with its interval over questions."""
    from prompt_r1.metrics.statistics import macro_interval

    names = {f"{seed} {kind}": values for (seed, kind), values in groups.items()}
    low, high = macro_interval(names)
    value = 100 * fmean(map(fmean, groups.values()))
    return f"{value:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def spread(by_seed: Sequence[float]) -> str:
    """The value of each seed, and the half width of Student's interval of their mean, in percent."""
    shown = ", ".join(f"{100 * value:.1f}" for value in by_seed)
    if len(by_seed) == 1:
        return shown
    half = STUDENT[len(by_seed) - 2] * stdev(by_seed) / sqrt(len(by_seed))
    return f"{shown} (± {100 * half:.1f})"


def measure(settings: Settings, method: str, seeds: Sequence[int]) -> Measured:
    """A method's scores and costs over the seeds, from the results folders."""
    from prompt_r1.evaluation.aggregate import REPORTED_METRICS, score_predictions
    from prompt_r1.evaluation.predictions import read_predictions

    scores: dict[tuple[int, str], dict[str, float]] = {}
    calls, dollars, calls_before, dollars_before = [], [], [], []
    for seed in seeds:
        found = [
            one
            for one in read_predictions(settings.results(seed) / "predictions.jsonl")
            if one.system.method == method
        ]
        newest = found[-1].setting  # lines of other settings may be there too
        found = [one for one in found if one.setting == newest]
        results = score_predictions(found)
        [system] = results.systems
        for dataset, kind in results.kinds.items():
            scores[seed, dataset] = results.scores(system, dataset, REPORTED_METRICS[kind][0])
        calls.append(fmean(one.calls for one in found))
        dollars.append(1000 * fmean(one.usd for one in found))
        before = preparation(settings, method, seed)
        calls_before.append(before[0])
        dollars_before.append(before[1])
    return Measured(method, scores, fmean(calls_before), fmean(dollars_before), fmean(calls), fmean(dollars))


def preparation(settings: Settings, method: str, seed: int) -> tuple[float, float]:
    """The calls and dollars that a method took before its first answer."""
    from prompt_r1.storage.run_log import read_metrics

    if method in ("prompt-r1", "agent-only"):
        lines = read_metrics(settings.agent(seed))
        calls = sum(line.get("env/paid", 0.0) + line.get("env/reused", 0.0) for line in lines)
        return calls, max((line.get("env/usd", 0.0) for line in lines), default=0.0)  # of the whole run
    path = settings.results(seed) / "preparation.json"
    noted = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for system, spent in noted.items():
        if system.split(" (")[0] == method:
            return spent["task_calls"] + spent["optimizer_calls"], spent["usd"]
    return 0.0, 0.0


def best_prompts(settings: Settings, seed: int) -> dict[str, dict[tuple[int, str], dict[str, float]]]:
    """The test scores of a seed's best prompts: CEILING and BOUND → (seed, dataset) → question → score."""
    from prompt_r1.baselines.optimise import draw_questions
    from prompt_r1.data.named import find_questions
    from prompt_r1.evaluation.predictions import read_predictions
    from prompt_r1.miniworld import make_world
    from prompt_r1.miniworld.advice import AdvisedEnvironment
    from prompt_r1.studies.ceiling import score_every_prompt

    environment = AdvisedEnvironment(make_world(seed), seed=seed)
    train = find_questions(["mini"], "train", seed)
    predictions = read_predictions(settings.results(seed) / "predictions.jsonl")
    test = list(dict.fromkeys(one.question for one in predictions))
    on_test = score_every_prompt(environment, test)
    asked = {question.dataset for question in test}  # --limit may leave none of a kind
    found: dict[str, dict[tuple[int, str], dict[str, float]]] = {CEILING: {}, BOUND: {}}
    for kind in [kind for kinds in KINDS.values() for kind in kinds if kind in asked]:
        # As for the searches: a kind without training questions gets the best prompt for all others.
        own = [question for question in train if question.dataset == kind] or train
        seen = draw_questions(own, settings.examples, seed)
        datasets = list(dict.fromkeys(question.dataset for question in seen))
        best = score_every_prompt(environment, seen).best(datasets)
        found[CEILING][seed, kind] = on_test.of(best, [kind])
        found[BOUND][seed, kind] = on_test.of(on_test.best([kind]), [kind])
    return found


if __name__ == "__main__":
    run_program(main)
