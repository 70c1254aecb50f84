"""One question to a pair: answer, stream, cost and limits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from prompt_r1.agent.agent import Agent, check_question_lengths
from prompt_r1.cli.dialogue import blocks
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError
from prompt_r1.metrics.em_f1 import TextScores, score_text
from prompt_r1.playing import PlaySettings, play_question
from prompt_r1.types import Question, Stop, Trajectory, Turn

Kind = Literal["think", "prompt", "answer", "other", "reply"]
KINDS: dict[str, Kind] = {"think": "think", "interaction_prompt": "prompt", "answer": "answer", "": "other"}


@dataclass(frozen=True)
class Piece:
    """The next part of a dialogue: of a block of the agent's turn, or the environment's whole reply."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Answer:
    """How a question was answered, and what it cost: a view of its game."""

    question: str
    text: str | None  # None: the game ended without an answer
    stop: Stop
    turns: tuple[Turn, ...]
    calls: int  # of the environment
    tokens_read: int  # by the agent: question, instruction and replies
    tokens_written: int  # by the agent
    tokens_in: int  # that the environment read
    tokens_out: int  # that it wrote
    usd: float  # of the environment's calls; 0 without a price
    seconds: float
    trajectory: Trajectory
    error: str = ""  # why the environment failed, when stop is "env_error"

    def __str__(self) -> str:
        return self.text or ""

    def score(self, *gold: str) -> TextScores:
        """EM, SM, F1 and math against the gold answers."""
        return score_text(self.text or "", gold)


class _Pieces:
    """Cuts the dialogue of a game into pieces while it is played."""

    wants_tokens = True

    def __init__(self, on_piece: Callable[[Piece], object]) -> None:
        self._on_piece = on_piece
        self._sent: list[int] = []  # characters of each block of the turn so far

    def turn(self, text: str, *, ended: bool) -> None:
        """Send what is new and certain in a turn."""
        for number, (tag, content) in enumerate(blocks(text, ended=ended)):
            if number == len(self._sent):
                self._sent.append(0)
            if new := content[self._sent[number] :]:
                self._on_piece(Piece(KINDS[tag], new))
            self._sent[number] = len(content)
        if ended:
            self._sent = []

    def reply(self, text: str) -> None:
        self._on_piece(Piece("reply", text))


async def ask_pair(
    agent: Agent,
    environment: Pool,
    question: str,
    how: PlaySettings,
    *,
    seed: str,
    on_piece: Callable[[Piece], object] | None = None,
) -> Answer:
    """Play one game in the running event loop. `on_piece` gets the dialogue.

    Raises QuestionTooLong, and what `play_question` raises: if the environment failed, `stop` is "env_error".
    """
    question = question.encode("utf-8", "replace").decode()  # lone surrogates have no UTF-8
    asked = Question(question, "asked", question, answers=())
    check_question_lengths([Question("", "asked", question, ())], agent.codec, agent.game)
    listener = _Pieces(on_piece) if on_piece else None
    game = await play_question(agent, environment, asked, how, seed=seed, listener=listener)
    written = sum(game.sampled)
    return Answer(
        question=question,
        text=game.answer,
        stop=game.stop,
        turns=tuple(game.turns),
        calls=game.spent.calls,
        tokens_read=len(game.tokens) - written,
        tokens_written=written,
        tokens_in=game.spent.tokens_in,
        tokens_out=game.spent.tokens_out,
        usd=game.spent.usd,
        seconds=game.seconds,
        trajectory=game,
        error=game.error,
    )


def raise_for_error(answer: Answer) -> Answer:
    """Raise EnvError if the environment failed; otherwise return the answer."""
    if answer.stop == "env_error":
        raise EnvError(answer.error or "the environment failed")
    return answer
