"""The best prompt of `studies.advice`, by trying all: `python -m studies.best_prompt FOLDER --seed 0`.

FOLDER is the --out of an `evaluate.py` with the same seed and `--data mini mini:ood`. The answers with the
best prompts are appended to its predictions as the method "best prompt", so `python -m studies.seeds` shows
them beside the searches.

A prompt changes the replies of AdvisedEnvironment only by the advice in it. So the combinations of all pieces
of advice stand for all prompts. Each is scored on the questions that a search with
`--optimize-examples 50` sees: 50 training questions of each kind, and 50 of all kinds for the questions
out of distribution.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean

from prompt_r1.environments.asking import IN_TAGS, read_answer
from prompt_r1.evaluation.predictions import FILE, Prediction, PredictionFile, System
from prompt_r1.evaluation.searches import ALL, Data, data_of_searches, draw, task_score
from prompt_r1.miniworld.questions import mini_questions
from prompt_r1.programs.command_line import run_program
from prompt_r1.spending import Spending
from prompt_r1.types import Message, Question
from studies.advice import ADVICE, AdvisedEnvironment

EXAMPLES = 50  # training questions that score a prompt
SYSTEM = System("best prompt", "py:studies.advice:AdvisedEnvironment")


def all_prompts() -> list[str]:
    """A prompt for each combination of advice, the shortest first."""
    pieces = [f"{phrase.capitalize()}." for phrase in ADVICE]
    chosen = chain.from_iterable(combinations(pieces, count) for count in range(len(pieces) + 1))
    return [" ".join(each) for each in chosen]


async def answer(environment: AdvisedEnvironment, prompt: str, question: Question) -> Prediction:
    """The environment's answer to a question under a system message."""
    messages: list[Message] = [
        {"role": "system", "content": prompt},
        {"role": "user", "content": question.text + IN_TAGS},
    ]
    reply = await environment.ask(messages)
    found, formatted = read_answer(reply, IN_TAGS)
    return Prediction(SYSTEM, question, 0, found, reply, format=formatted, spent=Spending(calls=1))


async def best_prompt(environment: AdvisedEnvironment, questions: Sequence[Question]) -> str:
    """The prompt with the best mean score on the questions; of equal prompts, the shortest."""
    means = {}
    for prompt in all_prompts():
        answers = [await answer(environment, prompt, question) for question in questions]
        means[prompt] = fmean(map(task_score, answers))
    return max(means, key=lambda prompt: means[prompt])


async def write_answers(folder: Path, seed: int) -> None:
    """Find the best prompt of each search, print it, and append its answers to the test questions."""
    environment = AdvisedEnvironment(seed=seed)
    data = Data(mini_questions(seed, "train"), mini_questions(seed, "validation"))
    test = mini_questions(seed, "test") + mini_questions(seed, "test", "ood")
    prompts = {}
    for name, own_data in data_of_searches(test, data).items():
        drawn = draw(own_data.train, EXAMPLES, seed=seed)
        prompts[name] = await best_prompt(environment, drawn)
        print(f"{name}: {prompts[name]}")
    answers = PredictionFile(folder / FILE)
    for question in test:
        prompt = prompts.get(question.dataset, prompts[ALL])
        answers.add(await answer(environment, prompt, question))
    answers.close()


def main(arguments: list[str]) -> None:
    """Write the answers from a command line."""
    parser = argparse.ArgumentParser("python -m studies.best_prompt", description=__doc__)
    parser.add_argument("folder", type=Path, help="--out of evaluate.py")
    parser.add_argument("--seed", type=int, default=0, help="its seed (0)")
    given = parser.parse_args(arguments)
    asyncio.run(write_answers(given.folder, given.seed))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
