"""Greedy games of held-out questions: what they measure, and the table of the test."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean

from prompt_r1.environments.environment import Caller, Environment
from prompt_r1.errors import EnvError
from prompt_r1.f1 import exact_match, f1
from prompt_r1.pair.agent import Agent, play_question
from prompt_r1.programs.tables import markdown_table, text_table
from prompt_r1.reward import Rule, score_games
from prompt_r1.rollout import play_groups
from prompt_r1.training.metrics import Row
from prompt_r1.types import Message, Question, ScoredGame

TEST_FILE = "test.md"  # in the run folder: the table of the test by dataset
# Columns of the tables, and the metrics of a game that they are means of.
METRICS = {"em": "em", "f1": "f1", "reward": "reward/mean", "format": "format", "turns": "turns"}
COLUMNS = ["n", "errors", "EM", "F1", "reward", "format", "turns"]


async def play_greedily(
    agent: Agent, environment: Environment, questions: Sequence[Question], rule: Rule
) -> list[ScoredGame]:
    """A scored game of each question; the agent takes the most likely tokens."""
    play = partial(play_question, agent, environment)
    seeds = [question.id for question in questions]
    games_PG = await play_groups(questions, 1, play, seeds=seeds)
    trajectories = [group[0] for group in games_PG]
    rewards = score_games(trajectories, rule=rule)
    return [
        ScoredGame(trajectory, reward, advantage=None)
        for trajectory, reward in zip(trajectories, rewards, strict=True)
    ]


async def ask_directly(questions: Sequence[Question], environment: Environment) -> list[Row]:
    """The environment alone: its reply to the question and "Answer only." is the prediction."""

    async def ask_one(question: Question) -> Row:
        messages: list[Message] = [{"role": "user", "content": f"{question.text} Answer only."}]
        try:
            reply = await environment.ask(messages, Caller(question.id))
        except EnvError:
            return {"env/errors": 1}
        return {"em": exact_match(reply, question.answers), "f1": f1(reply, question.answers)}

    return await asyncio.gather(*map(ask_one, questions))


def validation_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """The metrics val/* of the games of a validation."""
    metrics = mean_metrics(rows)
    metrics["calls"] = float(sum(row["env/calls"] for row in rows))
    metrics["usd"] = mean([row["usd"] for row in rows]) if rows else 0.0
    return {f"val/{name}": value for name, value in metrics.items()}


def mean_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """The mean of each metric over the games that have it; their number, and that of failed calls."""
    errors = sum(bool(row.get("env/errors")) for row in rows)
    means: dict[str, float] = {"n": len(rows) - errors, "errors": errors}
    for name, metric in METRICS.items():
        values = [row[metric] for row in rows if metric in row]
        if values:
            means[name] = mean(values)
    return means


def tables_of_test(rows_of: Mapping[str, list[Row]], datasets: Sequence[str]) -> tuple[str, str]:
    """The test as Markdown, by method and dataset, and for a terminal, by method alone.

    `datasets` has the dataset of each question, in the order of the rows.
    """
    by_dataset = results_table(rows_of, datasets) + "\n"
    total = text_table(["test", *COLUMNS], [[method, *_cells(rows)] for method, rows in rows_of.items()])
    return by_dataset, total


def results_table(rows_of: Mapping[str, list[Row]], datasets: Sequence[str]) -> str:
    """A Markdown table: a row for each method and dataset, and each method's mean over all questions."""
    lines, names = [], sorted(set(datasets))
    for method, rows in rows_of.items():
        for name in names:
            part = [row for row, dataset in zip(rows, datasets, strict=True) if dataset == name]
            lines.append([method, name, *_cells(part)])
        if len(names) > 1:
            lines.append([f"**{method}**", "**all**", *_cells(rows)])
    return markdown_table(["method", "dataset", *COLUMNS], lines, left=2)


def _cells(rows: Sequence[Row]) -> list[str]:
    means = mean_metrics(rows)
    numbers = [f"{means[name]:z.3f}" if name in means else "–" for name in METRICS]
    return [str(means["n"]), str(means["errors"]), *numbers]
