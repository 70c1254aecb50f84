"""Games of held-out questions, mostly greedy: validation and test."""

import asyncio
from collections.abc import Sequence
from functools import partial
from statistics import mean

from prompt_r1.environments.environment import Caller, Environment
from prompt_r1.errors import EnvError
from prompt_r1.f1 import exact_match, f1
from prompt_r1.pair.agent import Agent, load_agent, play_question
from prompt_r1.programs.tables import markdown_table, text_table
from prompt_r1.reward import score_games
from prompt_r1.rollout import play_groups
from prompt_r1.training.metrics import Row, metrics_of_game
from prompt_r1.training.run import Run
from prompt_r1.types import Message, Question, ScoredGame

TEST_FILE = "test.md"  # in the run folder: the table of the test, which is played last
# Columns of the tables, and the metrics of a game that they are means of.
METRICS = {"em": "em", "f1": "f1", "reward": "reward/mean", "format": "format", "turns": "turns"}
COLUMNS = ["n", "errors", "EM", "F1", "reward", "format", "turns"]


def validation_metrics(run: Run, *, step: int) -> dict[str, float]:
    """The metrics val/* of the agent after a step. Called by every rank; the questions are shared out."""
    rows = play_share(run, run.agent, run.questions.validation, name=f"validation-{step:06d}")
    metrics = {
        **mean_metrics(rows),
        "calls": float(sum(row["env/calls"] for row in rows)),
        "usd": mean([row["usd"] for row in rows]) if rows else 0.0,
    }
    return {f"val/{name}": value for name, value in metrics.items()}


def compare_on_test(run: Run) -> str:
    """A table of test questions: the environment alone, the agent before and after training.

    The rows by dataset are written to test.md in the run folder.
    """
    questions = run.questions.test
    datasets = [question.dataset for question in questions]
    rows: dict[str, list[Row]] = {}
    if run.config.env != "none":
        alone = ask_directly(run.ranks.share(questions), run.environment)
        rows["environment alone"] = run.ranks.gather_lists(run.wait_for(alone))
    for name, path in [("untrained agent", run.start), ("trained agent", run.folder / "agent")]:
        agent = load_agent(path, run.config, run.ranks.device)
        rows[name] = play_share(run, agent, questions, name=f"test-{name.partition(' ')[0]}")
        del agent
    table = results_table(rows, datasets) + "\n"
    run.ranks.from_first(lambda: (run.folder / TEST_FILE).write_text(table, "utf-8"))
    return text_table(["test", *COLUMNS], [[method, *_cells(own)] for method, own in rows.items()])


def play_share(run: Run, agent: Agent, questions: Sequence[Question], *, name: str) -> list[Row]:
    """The metrics of a greedy game of each question, in the order of the questions, on every rank.

    Each rank plays its share, and writes it to trajectories/NAME-rankN.jsonl.
    """
    play, share = partial(play_question, agent, run.environment), run.ranks.share(questions)
    games_PG = run.wait_for(play_groups(share, 1, play, seeds=[question.id for question in share]))
    trajectories = [game for [game] in games_PG]
    rewards = score_games(trajectories, rule=run.config.reward_rule)
    games = [ScoredGame(*pair, None) for pair in zip(trajectories, rewards, strict=True)]
    agent.engine.clear_cache()
    file = f"{name}-rank{run.ranks.rank}"
    run.ranks.run(lambda: run.log.trajectories(file, [[game] for game in games]))
    return run.ranks.gather_lists([metrics_of_game(game) for game in games])


async def ask_directly(questions: Sequence[Question], environment: Environment) -> list[Row]:
    """The environment alone: its reply to the question and "Answer only." is the prediction."""

    async def ask_one(question: Question) -> Row:
        try:
            messages: list[Message] = [{"role": "user", "content": f"{question.text} Answer only."}]
            reply = await environment.ask(messages, Caller(question.id))
        except EnvError:
            return {"env/errors": 1}
        return {"em": exact_match(reply, question.answers), "f1": f1(reply, question.answers)}

    return await asyncio.gather(*map(ask_one, questions))


def mean_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """The mean of each metric over the games that have it, without failed calls; `n`, `errors`."""
    errors = sum(bool(row.get("env/errors")) for row in rows)
    columns = {name: [row[metric] for row in rows if metric in row] for name, metric in METRICS.items()}
    return {
        "n": len(rows) - errors,
        "errors": errors,
        **{name: mean(values) for name, values in columns.items() if values},
    }


def results_table(rows_of: dict[str, list[Row]], datasets: Sequence[str]) -> str:
    """A Markdown table: a row for each method and dataset, and each method's mean over all questions.

    `datasets` has the dataset of each question, in the order of the rows.
    """
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
