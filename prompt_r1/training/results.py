"""The result of one question, for the metrics of a training step and for validation."""

from dataclasses import dataclass

from prompt_r1.metrics.text import exact_match, f1
from prompt_r1.reward import well_formed
from prompt_r1.types import Question, Reward, ScoredGame, Stop


@dataclass(frozen=True)
class GameResult:
    """One question and how it was answered, in numbers.

    `reward` is None for a game that the environment broke, and where no game was played: then the fields from
    `stop` on mean nothing.
    """

    question: str  # id
    dataset: str
    prediction: str
    em: float
    f1: float
    error: str = ""  # why the environment failed: not scored, counted apart
    reward: Reward | None = None
    stop: Stop = "answered"
    well_formed: float = 0.0  # 1: every turn was clean and the last one answered
    turns: int = 0
    calls: int = 0
    latencies: tuple[float, ...] = ()  # seconds
    sampled: int = 0  # agent tokens
    tokens: int = 0  # all tokens
    usd: float = 0.0  # of the replies


def result_of_game(game: ScoredGame) -> GameResult:
    """EM, F1 and the counts of a game; its reward is taken over as it was scored."""
    trajectory, question = game.trajectory, game.trajectory.question
    broken = trajectory.stop == "env_error"
    answer = "" if broken else trajectory.answer or ""
    replied = [turn for turn in trajectory.turns if turn.reply is not None]
    return GameResult(
        question=question.id,
        dataset=question.dataset,
        prediction=answer,
        em=0.0 if broken else exact_match(answer, question.answers),
        f1=0.0 if broken else f1(answer, question.answers),
        error=(trajectory.error or "the environment failed") if broken else "",
        reward=game.reward,
        stop=trajectory.stop,
        well_formed=0.0 if broken else float(well_formed(trajectory)),
        turns=len(trajectory.turns),
        calls=len(replied) + broken,
        latencies=tuple(turn.latency for turn in replied),
        sampled=sum(trajectory.sampled),
        tokens=len(trajectory.tokens),
        usd=trajectory.usd,
    )


def result_of_reply(question: Question, reply: str) -> GameResult:
    """The environment's own answer, without a game."""
    em, score = exact_match(reply, question.answers), f1(reply, question.answers)
    return GameResult(question.id, question.dataset, reply, em, score)


def failed_result(question: Question, error: str) -> GameResult:
    """A question for which the environment, asked without a game, failed."""
    return GameResult(question.id, question.dataset, "", 0.0, 0.0, error=error)
