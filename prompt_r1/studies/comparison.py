"""`python -m prompt_r1.studies.comparison`: every method in `mini-advice`, over seeds.

A seed is a replication of everything: the world and its questions, the searches, the trainings. For each one
this trains the agents of `prompt-r1` and `grpo-only`, evaluates all methods (each search with the same budget
of calls), and finds the best static prompts by exhaustive search. Then it joins the seeds in Tables 2 to 4.
The same command resumes after a kill, and makes no run and no call twice.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from prompt_r1.agent.names import RUNS
from prompt_r1.baselines.ask_once import task_score
from prompt_r1.baselines.optimise import draw_questions
from prompt_r1.cli.command_line import run_program
from prompt_r1.config.fields import NOT_NEGATIVE, POSITIVE, check_number
from prompt_r1.config.methods import METHODS
from prompt_r1.data.questions import find_questions
from prompt_r1.evaluation.predictions import Prediction, read_predictions
from prompt_r1.evaluation.systems import FROM_START
from prompt_r1.miniworld import make_questions, make_world
from prompt_r1.miniworld.advice import AdvisedEnvironment
from prompt_r1.miniworld.demonstrations import decompose
from prompt_r1.miniworld.environment import MiniReply
from prompt_r1.studies.ceiling import score_every_prompt
from prompt_r1.studies.programs import Flags, add_seeds, run, train
from prompt_r1.studies.seeds import PREDICTIONS, Measured, measure, table

ENVIRONMENT = "mini-advice"
TRAINED = {"prompt-r1", "agent-only", "self-consistency"}  # the last one counts the agent's calls
ABLATIONS = ("agent-only", "untrained", "direct", "prompt-r1")  # the rows of Table 4
KINDS = {
    "Table 2": ("bridge", "compare", "pop", "math", "gen"),
    "Table 3 (out of distribution)": ("bridge_ood", "math_ood"),
}
ALL_KINDS = [kind for kinds in KINDS.values() for kind in kinds]
PRICE = "0.15,0.60"  # dollars per million tokens, of both models
CEILING = "best prompt of all"  # by its score on the training questions that the searches see
SCRIPT = "scripted decomposition"
BOUND = "upper bound of prompts"  # by its score on the test questions themselves


@dataclass(frozen=True)
class Settings:
    """What each seed's commands need."""

    out: Path
    steps: int  # of GRPO
    budget: int  # calls of both models in each search
    examples: int  # training and validation questions that score a prompt in a search
    limit: int  # test questions; 0: all
    methods: Sequence[str]

    def folder(self, name: str, seed: int) -> Path:
        """The run of an agent (that asks `mini-advice`, or is "alone"), or the "results" of evaluate.py."""
        return self.out / f"{name}-seed{seed}"


def main(arguments: list[str]) -> None:
    """Make the comparison from a command line."""
    parser = argparse.ArgumentParser("python -m prompt_r1.studies.comparison", description=__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "comparison", help="folder of runs and tables")
    add_seeds(parser)
    parser.add_argument("--steps", type=int, default=80, help="GRPO steps of each training (80)")
    parser.add_argument("--budget", type=int, default=2000, help="calls of each prompt search (2000)")
    parser.add_argument("--examples", type=int, default=50, help="questions that score a prompt (50)")
    parser.add_argument("--limit", type=int, default=0, help="test questions of each file (0: all)")
    methods = f"{', '.join(METHODS)} (all)"
    parser.add_argument("--method", nargs="+", metavar="NAME", default=METHODS, choices=METHODS, help=methods)
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time (2)")
    given = parser.parse_args(arguments)
    for flag in ("steps", "budget", "examples", "jobs"):
        check_number(f"--{flag}", getattr(given, flag), POSITIVE)
    check_number("--limit", given.limit, NOT_NEGATIVE)
    settings = Settings(given.out, given.steps, given.budget, given.examples, given.limit, given.method)
    given.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    seeds = list(dict.fromkeys(given.seeds))  # one that is given twice would be trained twice in one folder
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(partial(compare, settings), seeds))
    text = "\n\n".join(join(settings, seeds))
    (given.out / "comparison.md").write_text(f"{text}\n", "utf-8")
    print(f"{text}\n\n{given.out / 'comparison.md'} ({time.perf_counter() - begin:.0f} s)")


def compare(settings: Settings, seed: int) -> None:
    """Train and evaluate all methods with one seed. What is finished is not repeated."""
    agent = settings.folder("agent", seed)
    if not TRAINED.isdisjoint(settings.methods):
        own: Flags = {"--env": [ENVIRONMENT], "--seed": [seed], "--env-price": [PRICE]}
        train(agent, settings.steps, own)
    if "grpo-only" in settings.methods:
        train(settings.folder("alone", seed), settings.steps, {"--env": ["none"], "--seed": [seed]})
    results = settings.folder("results", seed)
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
        "--out": [results],
    }
    if agent.exists():
        lines["--agent"] = [agent]
    elif not set(FROM_START).isdisjoint(settings.methods):
        lines["--agent"] = ["mini"]  # else evaluate.py takes the newest mini run, whichever it is
    if "grpo-only" in settings.methods:
        lines["--grpo-agent"] = [settings.folder("alone", seed)]
    run("evaluate", lines, log=results.with_suffix(".log"))


def join(settings: Settings, seeds: Sequence[int]) -> list[str]:
    """The tables as Markdown texts."""
    results = {seed: settings.folder("results", seed) for seed in seeds}
    rows = [measure(results, method) for method in settings.methods]
    rows += best_prompts(settings, seeds)
    rows.append(scripted_decomposition(settings, seeds))
    texts = [introduction(settings, seeds)]
    for title, wanted in KINDS.items():
        kinds = kinds_of(rows, wanted, seeds)
        if kinds:  # --limit may leave none of them
            texts.append(f"## {title}\n\n{table(rows, kinds, seeds, CEILING, 'below the best prompt')}")
    return [*texts, *ablation_tables(rows, seeds)]


def ablation_tables(rows: Sequence[Measured], seeds: Sequence[int]) -> list[str]:
    """Table 4: what is missing without the environment, the training or the agent."""
    rows = [row for name in ABLATIONS for row in rows if row.name == name]
    if len(rows) < 2 or rows[-1].name != "prompt-r1":
        return []
    kinds = kinds_of(rows, ALL_KINDS, seeds)
    return [f"## Table 4 (ablations)\n\n{table(rows, kinds, seeds, 'prompt-r1', 'below prompt-r1')}"]


def kinds_of(rows: Sequence[Measured], wanted: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """The kinds of which every method has answers with every seed."""
    return [kind for kind in wanted if all((seed, kind) in row.scores for row in rows for seed in seeds)]


def introduction(settings: Settings, seeds: Sequence[int]) -> str:
    """What the tables show."""
    return f"""# Every method in {ENVIRONMENT}

Seeds {", ".join(map(str, seeds))}: each has its own world, questions, searches and trainings. Every search
may make {settings.budget:,} calls of both models, and scores prompts on up to {settings.examples} questions.
There is one search for each kind of question, and one on all kinds for the questions out of distribution.
Dollars are at {PRICE} per million tokens, at 4 characters a token.

- *Mean*: the mean over the kinds (EM; F1 for gen), in percent, with a 95 % interval over questions and seeds.
- *By seed*: the mean of each seed.
- *Below the best prompt*: the difference to the prompt that exhaustive search finds best on the training
  questions that the searches see (out of distribution: on those of the sister kind); its interval is over
  paired questions and seeds. The *upper bound* is the best prompt on the test questions themselves: no static
  prompt scores more.
- *Scripted decomposition* asks one clear question per step and answers with the last reply. It reads the
  meaning of a question, which no method sees, and is what asking step by step can reach here.
- *Before*: calls (of both models) and dollars before the first answer: searches, examples, training.
- Table 4 has means over all kinds."""


def best_prompts(settings: Settings, seeds: Sequence[int]) -> list[Measured]:
    """The test scores of each seed's best prompts: the rows CEILING and BOUND."""
    ceiling, bound = {}, {}
    for seed in seeds:
        environment = AdvisedEnvironment(make_world(seed), seed=seed)
        train = find_questions(["mini"], "train", seed)
        predictions = read_predictions(settings.folder("results", seed) / PREDICTIONS)
        test = list(dict.fromkeys(one.question for one in predictions))
        on_test = score_every_prompt(environment, test)
        asked = {question.dataset for question in test}  # --limit may leave none of a kind
        for kind in [kind for kind in ALL_KINDS if kind in asked]:
            # A kind without training questions has the best prompt of its sister.
            own = [question for question in train if question.dataset == kind.removesuffix("_ood")]
            seen = draw_questions(own, settings.examples, seed)
            datasets = list(dict.fromkeys(question.dataset for question in seen))
            best = score_every_prompt(environment, seen).best(datasets)
            ceiling[seed, kind] = on_test.of(best, [kind])
            bound[seed, kind] = on_test.of(on_test.best([kind]), [kind])
    return [Measured(CEILING, ceiling, calls=1.0), Measured(BOUND, bound, calls=1.0)]


def scripted_decomposition(settings: Settings, seeds: Sequence[int]) -> Measured:
    """The test scores of a script that knows each question's meaning and asks one clear question per step."""
    scores: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    asked = []
    for seed in seeds:
        world = make_world(seed)
        environment = AdvisedEnvironment(world, seed=seed)
        answered = {
            one.question.id for one in read_predictions(settings.folder("results", seed) / PREDICTIONS)
        }
        minis = [*make_questions(world, "test", 320, seed), *make_questions(world, "ood", 128, seed)]
        for mini in (mini for mini in minis if mini.question.id in answered):
            plan, reply = decompose(mini.slots), MiniReply("", "")
            for turn in plan:
                reply = environment.reply(turn.prompt.format(value=reply.value))
            score = task_score(Prediction(mini.question, reply.value))
            scores[seed, mini.question.dataset][mini.question.id] = score
            asked.append(len(plan))
    return Measured(SCRIPT, scores, calls=fmean(asked))


if __name__ == "__main__":
    run_program(main)
