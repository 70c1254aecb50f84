"""Greedy games of held-out questions: validation while training, and the table at its end."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from prompt_r1.agent.agent import Agent, load_agent
from prompt_r1.agent.frame_file import kept_frame
from prompt_r1.cli.fitted_table import fitted_table
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError
from prompt_r1.reward import Rule, score_games
from prompt_r1.rollout import play
from prompt_r1.training.finished import TEST_FILE
from prompt_r1.training.results import GameResult, failed_result, result_of_game, result_of_reply
from prompt_r1.training.run import Run
from prompt_r1.types import Ask, Question, ScoredGame, Trajectory

METRICS = ("em", "f1", "reward", "format", "turns")

PlayOne = Callable[[Question], Awaitable[Trajectory]]


def validate(run: Run, agent: Agent, questions: Sequence[Question], environment: Pool) -> dict[str, float]:
    """The validation metrics of an agent. Called by every rank; its questions are shared out."""
    name = f"validation-{run.state.step:06d}"
    results = play_greedily(run, agent, questions, environment, name=name)
    usd = sum(result.usd for result in results) / max(len(results), 1)
    return {**mean_metrics(results), "calls": float(sum(result.calls for result in results)), "usd": usd}


def compare_on_test(run: Run, start: Path | str, questions: Sequence[Question], environment: Pool) -> str:
    """A table of test questions: the environment alone, the agent before and after training.

    The rows by dataset are written to test.md in the run folder.
    """
    rows: dict[str, list[GameResult]] = {}
    if run.config.env != "none":
        mine = questions[run.ranks.rank :: run.ranks.count]
        rows["environment alone"] = _gathered(run, run.wait_for(ask_directly(mine, environment.ask)))
    for name, path in [("untrained agent", start), ("trained agent", run.folder / "agent")]:
        agent = load_agent(path, run.config, run.ranks.device, frame=kept_frame(run.folder))
        file = f"test-{name.partition(' ')[0]}"
        rows[name] = play_greedily(run, agent, questions, environment, name=file)
        del agent
        gc.collect()  # an engine is part of a reference cycle, and two more agents may not fit in memory
    if run.ranks.first:
        (run.folder / TEST_FILE).write_text(results_table(rows) + "\n", "utf-8")
    return printed_table(rows)


def play_greedily(
    run: Run, agent: Agent, questions: Sequence[Question], environment: Pool, *, name: str
) -> list[GameResult]:
    """One greedy game of each question. Each rank plays its share; the results are on every rank.

    The games are written to trajectories/NAME-rankN.jsonl.
    """

    async def play_one(question: Question) -> Trajectory:
        generate = partial(agent.generate, temperature=0.0)
        seed = f"evaluation/{question.id}"
        ask = environment.ask_in_game(seed, sample=0, session=question.id, deadline=0.0)
        trajectory = await play(question, generate, ask, agent.codec, agent.game, seed=seed)
        trajectory.usd = ask.usd
        return trajectory

    mine = questions[run.ranks.rank :: run.ranks.count]
    counted = run.console.counted(play_one, len(mine))
    games = run.wait_for(play_all(mine, counted, rule=run.config.reward_rule))
    if not run.config.ahead:  # or training games are being played with these weights too
        agent.clear_cache()
    run.log.trajectories(f"{name}-rank{run.ranks.rank}", [[game] for game in games], trained=False)
    return _gathered(run, [result_of_game(game) for game in games])


def _gathered(run: Run, results: list[GameResult]) -> list[GameResult]:
    return [result for share in run.ranks.gather(results) for result in share]


async def play_all(questions: Sequence[Question], play_one: PlayOne, *, rule: Rule) -> list[ScoredGame]:
    """One game of each question, all concurrently."""
    games = await asyncio.gather(*map(play_one, questions))
    rewards = score_games(games, rule=rule)
    return [ScoredGame(game, reward, None) for game, reward in zip(games, rewards, strict=True)]


async def ask_directly(questions: Sequence[Question], ask: Ask) -> list[GameResult]:
    """The environment alone: its reply to the question and "Answer only." is the prediction."""

    async def ask_one(question: Question) -> GameResult:
        try:
            reply = await ask([{"role": "user", "content": f"{question.text} Answer only."}])
        except EnvError as error:
            return failed_result(question, str(error))
        return result_of_reply(question, reply)

    return await asyncio.gather(*map(ask_one, questions))


def mean_metrics(results: Iterable[GameResult]) -> dict[str, float]:
    """The mean of each metric over the results that have it, without failed calls; `n`, `errors`."""
    results = list(results)
    scored = [result for result in results if not result.error]
    games = [(result, result.reward) for result in scored if result.reward is not None]
    columns = {
        "em": [result.em for result in scored],
        "f1": [result.f1 for result in scored],
        "reward": [reward.total for _, reward in games],
        "format": [result.well_formed for result, _ in games],
        "turns": [float(result.turns) for result, _ in games],
    }
    averages = {name: mean(values) for name, values in columns.items() if values}
    return {"n": len(scored), "errors": len(results) - len(scored), **averages}


def results_table(rows: dict[str, list[GameResult]]) -> str:
    """A Markdown table: a row for each method and dataset, and each method's mean over all questions."""
    lines = []
    for method, results in rows.items():
        datasets = sorted({result.dataset for result in results})
        for name in datasets:
            part = [result for result in results if result.dataset == name]
            lines.append([method, name, *_cells(mean_metrics(part))])
        if len(datasets) > 1:
            lines.append([f"**{method}**", "**all**", *_cells(mean_metrics(results))])
    header = ["method", "dataset", "n", "errors", "EM", "F1", "reward", "format", "turns"]
    return markdown_table(header, lines, left=2)


def printed_table(rows: dict[str, list[GameResult]]) -> str:
    """A row for each method, over all questions, fitted to the terminal."""
    means = {method: mean_metrics(results) for method, results in rows.items()}
    header = ["test", "n", "errors", "EM", "F1", "reward", "format", "turns"]
    lines = [[method, *_cells(averages)] for method, averages in means.items()]
    if not any(averages["errors"] for averages in means.values()):
        header, lines = [header[0], header[1], *header[3:]], [[*line[:2], *line[3:]] for line in lines]
    return fitted_table(header, lines)


def _cells(averages: dict[str, float]) -> list[str]:
    numbers = [f"{averages[name]:.3f}" if name in averages else "–" for name in METRICS]
    return [
        str(averages["n"]),
        str(averages["errors"]),
        *(number.replace("-0.000", "0.000") for number in numbers),
    ]
