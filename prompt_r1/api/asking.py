"""One question to an agent and its environment: the answer, the dialogue as it arrives, cost and limits."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from prompt_r1.agent.agent import Agent, check_question_lengths
from prompt_r1.cli.dialogue import blocks
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError
from prompt_r1.metrics.text import TextScores, score_text
from prompt_r1.protocol import Codec
from prompt_r1.rollout import play
from prompt_r1.types import Completion, Message, Question, Stop, Trajectory, Turn

Kind = Literal["think", "prompt", "answer", "other", "reply"]
KINDS: dict[str, Kind] = {"think": "think", "interaction_prompt": "prompt", "answer": "answer", "": "other"}


@dataclass(frozen=True)
class Piece:
    """The next part of a dialogue: of a block of the agent's turn, or the environment's whole reply."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Answer:
    """How a question was answered, and what it cost."""

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


@dataclass(frozen=True)
class Limits:
    """The most that one question may cost; 0: no limit. Turns are at most those of the agent's training."""

    turns: int = 0
    calls: int = 0
    usd: float = 0.0
    seconds: float = 0.0


class LimitReached(Exception):
    """A question was given up, because its next call or second would exceed this limit."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class _MeteredCalls:
    """The environment for one question: counts what the calls cost, and stops before they cost too much."""

    def __init__(self, environment: Pool, session: str, *, most_usd: float) -> None:
        self.calls = self.tokens_in = self.tokens_out = 0
        self.usd = 0.0
        self._environment = environment
        self._session = session
        self._most_usd = most_usd

    async def ask(self, messages: list[Message]) -> str:
        if self._most_usd and self.usd + self._environment.most_usd(messages) > self._most_usd:
            raise LimitReached(
                "usd", f"the next call may exceed the limit of ${self._most_usd:g}; spent: ${self.usd:.6f}"
            )
        self.calls += 1
        reply = await self._environment.call(messages, session=self._session)
        self.tokens_in += reply.tokens_in
        self.tokens_out += reply.tokens_out
        self.usd += reply.usd
        return reply.text


class _TurnPieces:
    """Cuts a turn of the agent into pieces while it is sampled."""

    def __init__(self, codec: Codec, on_piece: Callable[[Piece], object]) -> None:
        self._codec = codec
        self._on_piece = on_piece
        self._tokens: list[int] = []
        self._sent: list[int] = []  # characters of each block so far

    def add(self, token: int) -> None:
        """Send what is certain after one more token."""
        self._tokens.append(token)
        self._send(ended=False)

    def end(self, tokens: list[int]) -> None:
        """Send the rest of a finished turn."""
        self._tokens = tokens
        self._send(ended=True)

    def _send(self, *, ended: bool) -> None:
        for number, (tag, content) in enumerate(blocks(self._codec.turn_text(self._tokens), ended=ended)):
            if number == len(self._sent):
                self._sent.append(0)
            if new := content[self._sent[number] :]:
                self._on_piece(Piece(KINDS[tag], new))
            self._sent[number] = len(content)


async def ask_pair(
    agent: Agent,
    environment: Pool,
    question: str,
    *,
    seed: str,
    temperature: float = 0.0,
    limits: Limits | None = None,
    on_piece: Callable[[Piece], object] | None = None,
) -> Answer:
    """Play one game in the running event loop; many may run at once. `on_piece` gets the dialogue.

    Raises LimitReached, QuestionTooLong, and what `Pool.call` raises except EnvError: then `stop` is
    "env_error".
    """
    limits = limits or Limits()
    asked = Question("asked", "asked", question, answers=())
    check_question_lengths([asked], agent.codec, agent.game.max_tokens)
    turns = agent.game.max_turns
    turns = min(turns, limits.turns or turns, limits.calls + 1 if limits.calls else turns)
    settings = replace(agent.game, max_turns=turns)
    calls = _MeteredCalls(environment, question, most_usd=limits.usd)

    async def generate(tokens: list[int], *, max_new: int, seed: str) -> Completion:
        pieces = _TurnPieces(agent.codec, on_piece) if on_piece else None
        completion = await agent.generate(
            tokens,
            max_new=max_new,
            seed=seed,
            temperature=temperature,
            watch=pieces.add if pieces else None,
        )
        if pieces:
            pieces.end(completion.tokens)
        return completion

    async def ask(messages: list[Message]) -> str:
        reply = await calls.ask(messages)
        if on_piece:
            on_piece(Piece("reply", reply))
        return reply

    begin = time.perf_counter()
    try:
        async with asyncio.timeout(limits.seconds or None):
            game = await play(asked, generate, ask, agent.codec, settings, seed=seed)
    except TimeoutError:
        raise LimitReached("seconds", f"no answer within the limit of {limits.seconds:g} s") from None
    written = sum(game.sampled)
    return Answer(
        question=question,
        text=None if game.stop == "env_error" else game.answer,
        stop=game.stop,
        turns=tuple(game.turns),
        calls=calls.calls,
        tokens_read=len(game.tokens) - written,
        tokens_written=written,
        tokens_in=calls.tokens_in,
        tokens_out=calls.tokens_out,
        usd=calls.usd,
        seconds=time.perf_counter() - begin,
        trajectory=game,
        error=game.error,
    )


def raise_for_error(answer: Answer) -> Answer:
    """Raise EnvError if the environment failed; otherwise return the answer."""
    if answer.stop == "env_error":
        raise EnvError(answer.error or "the environment failed")
    return answer
