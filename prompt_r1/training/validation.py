"""Greedy games of held-out questions, and the metrics of a validation."""

from collections.abc import Callable, Sequence
from statistics import mean

from prompt_r1.environments.environment import Environment
from prompt_r1.pair.agent import Agent, Sampling, play_question
from prompt_r1.reward import Rule, score_games
from prompt_r1.rollout import play_groups
from prompt_r1.training.metrics import Row, metrics_of_game
from prompt_r1.training.run import Run
from prompt_r1.types import Question, ScoredGame, Trajectory

# The key val/NAME of metrics.jsonl → the metric of a game whose mean it is.
METRICS = {"em": "em", "f1": "f1", "reward": "reward/mean", "format": "format", "turns": "turns"}


def validation_metrics(run: Run, *, name: str) -> dict[str, float]:
    """Play a greedy game of each validation question, and return the metrics val/*. Called by every rank.

    Each rank plays its share of the games, and writes them to trajectories/NAME-rankN.jsonl.
    """
    games = play_share(run, run.agent, run.questions.validation, name=name)
    rows = run.ranks.gather_lists([metrics_of_game(game) for game in games])
    metrics = mean_metrics(rows)
    metrics["calls"] = float(sum(row["env/calls"] for row in rows))
    metrics["usd"] = mean([row["usd"] for row in rows]) if rows else 0.0
    return {f"val/{name}": value for name, value in metrics.items()}


def play_share(
    run: Run,
    agent: Agent,
    questions: Sequence[Question],
    *,
    name: str,
    after_each: Callable[[], object] = lambda: None,
) -> list[ScoredGame]:
    """Play a greedy game of each question of this rank's share. Called by every rank.

    Returns the games of this rank, which it also writes to trajectories/NAME-rankN.jsonl. `after_each` is
    called when a game has ended, so that a progress bar can count the games.
    """
    own = run.ranks.share(questions)
    rule = run.config.reward_rule
    games = run.wait_for(play_greedily(agent, run.environment, own, rule, after_each=after_each))
    agent.engine.drop_cache()
    file = f"{name}-rank{run.ranks.rank}"
    run.ranks.on_every_rank(lambda: run.log.write_games(file, [[game] for game in games]))
    return games


async def play_greedily(
    agent: Agent,
    environment: Environment,
    questions: Sequence[Question],
    rule: Rule,
    *,
    after_each: Callable[[], object],
) -> list[ScoredGame]:
    """Play and score a game of each question, in which the agent takes the most likely tokens."""

    async def play_one(question: Question, *, number: int, sample: int) -> Trajectory:
        game = await play_question(agent, environment, question, Sampling(f"{question.id}/{sample}"))
        after_each()
        return game

    games_PG = await play_groups(dict(enumerate(questions)), 1, play_one)
    trajectories = [group[0] for group in games_PG]
    rewards = score_games(trajectories, rule=rule)
    return [
        ScoredGame(trajectory, reward, advantage=None)
        for trajectory, reward in zip(trajectories, rewards, strict=True)
    ]


def mean_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """The mean of each metric over the games that have it, with the number of games and of failed calls."""
    failed = [row for row in rows if row.get("env/errors")]
    means: dict[str, float] = {"n": len(rows) - len(failed), "errors": len(failed)}
    for name, metric in METRICS.items():
        values = [row[metric] for row in rows if metric in row]
        if values:
            means[name] = mean(values)
    return means
