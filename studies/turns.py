"""Proposition 1: more interactions give more correct answers: `python -m studies.turns RUN …`.

The proof is about the accuracy of what the agent knows after t interactions (eq. 31). So each game is played
for t interactions. Then we begin the agent's next turn with a thought and an opening <answer> tag, and the
agent writes the answer. A game that ends earlier keeps its answer.
"""

import argparse
import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from prompt_r1.errors import UsageError
from prompt_r1.f1 import exact_match
from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.questions import mini_questions
from prompt_r1.model.machine import pick_device
from prompt_r1.pair.agent import Agent, load_agent
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.tables import markdown_table
from prompt_r1.rollout import play
from prompt_r1.types import Completion, Generate, Question, Trajectory
from studies.seeds import Scores, of_dataset, percent

Table = dict[tuple[str, int], Scores]
"""(agent, interactions) → scores."""

MAX_INTERACTIONS = 3
# The warm-start demonstrations end with these thoughts, so the agent knows how to continue after them.
THOUGHT_BEFORE_ASKING = "<think>I think I know this.</think>\n<answer>"
THOUGHT_AFTER_ASKING = "<think>Now I know the answer.</think>\n<answer>"


def answer_in_turn(turn: int, generate: Generate, prefix: list[int]) -> Generate:
    """The same agent, except that its turn number `turn` (from 1) starts with the tokens of `prefix`."""

    async def generate_or_answer(tokens: list[int], *, max_new: int, seed: str) -> Completion:
        this_turn = int(seed.rsplit("/", 1)[1])
        if this_turn != turn:
            return await generate(tokens, max_new=max_new, seed=seed)
        left = max(1, max_new - len(prefix))
        rest = await generate([*tokens, *prefix], max_new=left, seed=seed)
        logprobs = [0.0] * len(prefix) + rest.logprobs
        return Completion([*prefix, *rest.tokens], logprobs, rest.finished)

    return generate_or_answer


async def play_and_answer(
    agent: Agent, environment: MiniEnvironment, questions: list[Question], interactions: int
) -> list[Trajectory]:
    """Play a greedy game of each question. The agent answers after at most `interactions` interactions."""
    prefix = agent.codec.encoder.trusted(THOUGHT_AFTER_ASKING if interactions else THOUGHT_BEFORE_ASKING)
    greedy = partial(agent.engine.generate, temperature=0.0)
    generate = answer_in_turn(interactions + 1, greedy, prefix)
    rules = replace(agent.game, max_turns=interactions + 1)
    games = [
        play(question, generate, environment.ask, agent.codec, rules, seed=f"study/{question.id}")
        for question in questions
    ]
    return await asyncio.gather(*games)


def scores_of_run(folder: Path, number: int, limit: int) -> Table:
    """Score greedy games of a mini run on its first `limit` test questions.

    Raises UsageError for any other run.
    """
    trained = resolve_agent(str(folder))
    config = trained.config
    if not trained.trained or config.env != "mini":
        raise UsageError(f"{folder} is not a run with the environment mini, which the study needs")
    environment = MiniEnvironment(seed=config.seed)
    questions = mini_questions(config.seed, "test")[:limit]
    paths = {"untrained": trained.before_training().make(config.seed), "trained": trained.make(config.seed)}
    table: Table = {}
    for name, path in paths.items():
        agent = load_agent(path, config, pick_device("cpu"))
        for interactions in range(MAX_INTERACTIONS + 1):
            scores = table[name, interactions] = {}
            for game in asyncio.run(play_and_answer(agent, environment, questions, interactions)):
                question = game.question
                em = exact_match(game.answer or "", question.answers)
                scores.setdefault((number, question.dataset), {})[question.id] = em
    return table


def rows_of(table: Table) -> list[list[str]]:
    """Rows for both agents on all questions, and for the trained agent on each kind of question."""
    untrained = [table["untrained", interactions] for interactions in range(MAX_INTERACTIONS + 1)]
    trained = [table["trained", interactions] for interactions in range(MAX_INTERACTIONS + 1)]
    rows = [
        ["untrained, all", *(percent(scores) for scores in untrained)],
        ["trained, all", *(percent(scores) for scores in trained)],
    ]
    for kind in sorted({kind for _, kind in trained[0]}):
        row = [f"trained, {kind}"]
        for scores in trained:
            row.append(percent(of_dataset(scores, kind)))
        rows.append(row)
    return rows


def main(arguments: list[str]) -> None:
    """Print EM in percent after 0 to MAX_INTERACTIONS interactions, with 95 % intervals."""
    parser = argparse.ArgumentParser("python -m studies.turns", description=__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="folders of mini runs, one for each seed")
    parser.add_argument("--limit", type=int, default=320, help="test questions (320: all)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # More threads do not make a tiny model faster.
    table: Table = {}
    for number, folder in enumerate(given.run):
        for cell, scores in scores_of_run(folder, number, given.limit).items():
            table.setdefault(cell, {}).update(scores)
    header = [f"after {interactions} interactions" for interactions in range(MAX_INTERACTIONS + 1)]
    print(markdown_table(["agent, questions", *header], rows_of(table)))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
