"""Greedy games of held-out questions, and the metrics of a validation."""

from collections.abc import Callable, Sequence
from statistics import mean

from prompt_r1.pair.agent import Agent, Sampling, play_question
from prompt_r1.reward import score_games
from prompt_r1.rollout import play_groups
from prompt_r1.training.metrics import GameMetrics, metrics_of_game
from prompt_r1.training.run import Run
from prompt_r1.types import Question, ScoredGame, Trajectory


def validation_metrics(run: Run, *, step: int) -> dict[str, float]:
    """Play a greedy game of each validation question after a step, and return the metrics val/*.

    Each rank plays its share of the games.
    """
    games = play_share(run, run.agent, run.questions.validation, name=f"validation-{step:06d}")
    measured = run.ranks.gather_lists([metrics_of_game(game) for game in games])
    return {f"val/{metric}": value for metric, value in mean_metrics(measured).items()}


def play_share(
    run: Run,
    agent: Agent,
    questions: Sequence[Question],
    *,
    name: str,
    after_each: Callable[[], object] = lambda: None,
) -> list[ScoredGame]:
    """Play a greedy game of each question of this rank's share.

    Returns the games of this rank, which it also writes to trajectories/NAME-rankN.jsonl. `after_each` is
    called when a game has ended, so that a progress bar can count the games.
    """
    own = run.ranks.share(questions)

    async def play_one(question: Question, *, number: int, sample: int) -> Trajectory:
        game = await play_question(agent, run.environment, question, Sampling(f"{question.id}/{sample}"))
        after_each()
        return game

    async def play_and_score() -> list[ScoredGame]:
        groups = await play_groups(dict(enumerate(own)), 1, play_one)
        trajectories = [game for [game] in groups]
        rewards = score_games(trajectories, rule=run.config.base_rule, own=run.own_reward)
        return [
            ScoredGame(trajectory, reward, advantage=None)
            for trajectory, reward in zip(trajectories, rewards, strict=True)
        ]

    games = run.wait_for(play_and_score())
    agent.engine.drop_cache()
    with run.ranks.shared_errors():
        run.log.write_games(name, [[game] for game in games])
    return games


def mean_metrics(games: Sequence[GameMetrics]) -> dict[str, float]:
    """Means over the games with a score, the numbers of these games and of the broken ones, and the costs."""
    scores = [game.score for game in games if game.score is not None]
    metrics: dict[str, float] = {"n": len(scores), "errors": len(games) - len(scores)}
    if scores:
        metrics["em"] = mean(score.em for score in scores)
        metrics["f1"] = mean(score.f1 for score in scores)
        metrics["reward"] = mean(score.reward.total for score in scores)
        metrics["format"] = mean(float(score.is_well_formed) for score in scores)
        metrics["turns"] = mean(float(score.turns) for score in scores)
    metrics["calls"] = float(sum(game.calls for game in games))
    metrics["usd"] = mean(game.usd for game in games)
    return metrics
