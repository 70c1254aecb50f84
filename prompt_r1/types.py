"""The nouns of Prompt-R1, and the two callables that a game needs.

A *game* is the dialogue about one question: the agent (small, trained) asks the environment (large, frozen)
over several turns and then answers. `Trajectory` records it token by token:

    tokens   | question and instruction | think, prompt | reply | think, prompt | reply | think, answer |
    sampled  | 0 0 0 0 0 0 0 0 0 0 0 0  | 1 1 1 1 1 1 1 | 0 0 0 | 1 1 1 1 1 1 1 | 0 0 0 | 1 1 1 1 1 1 1 |

Only the agent's own tokens (sampled = 1) enter the loss; the rest is context.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from operator import add, mul, sub
from typing import Literal, Protocol, TypedDict

# Why a game ended. "max_tokens": game or last turn too long; "malformed": neither prompt nor answer.
Stop = Literal["answered", "max_turns", "max_tokens", "malformed", "env_error"]
Kind = Literal["qa", "math", "text"]  # how answers are compared, in evaluations


class Message(TypedDict):
    """One chat message, in the form that chat templates and chat-completions endpoints take."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Question:
    """A question and its gold answers."""

    id: str
    dataset: str
    text: str
    answers: tuple[str, ...]  # a prediction is scored against the best of them
    kind: Kind = "qa"
    extra: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)  # other columns


@dataclass(frozen=True)
class Spending:
    """Calls with their tokens and dollars.

    An attempt that brought no reply, but may have been billed, is charged as a call at its estimate.
    """

    calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float = 0.0
    lost_usd: float = 0.0  # the part of `usd` that attempts without a reply may have cost

    def __add__(self, other: "Spending") -> "Spending":
        return Spending(*map(add, self.amounts, other.amounts))

    def __sub__(self, other: "Spending") -> "Spending":
        return Spending(*map(sub, self.amounts, other.amounts))

    def __mul__(self, count: int) -> "Spending":
        return Spending(*map(mul, self.amounts, [count] * len(self.amounts)))

    def __str__(self) -> str:
        parts = ["1 call" if self.calls == 1 else f"{self.calls:,} calls"]
        if self.tokens:
            parts.append(f"{self.tokens_in:,} + {self.tokens_out:,} tokens")
        if self.usd:
            parts.append(f"${self.usd:,.4f}")
        lost = f" (${self.lost_usd:,.4f} of it estimated, for lost attempts)" if self.lost_usd else ""
        return ", ".join(parts) + lost

    @property
    def amounts(self) -> list[float]:
        """All fields, in their order. `dataclasses.astuple` would copy each deeply, ten times slower."""
        return list(vars(self).values())

    @property
    def tokens(self) -> int:
        return self.tokens_in + self.tokens_out


@dataclass(frozen=True)
class GameSettings:
    """The rules of a game: how long the agent may play."""

    max_turns: int = 5
    max_new: int = 1024  # new tokens in a turn
    max_tokens: int = 8192  # tokens of the whole dialogue
    max_reply_tokens: int = 1024  # tokens of a reply that the agent reads; 0: all


@dataclass(frozen=True)
class Action:
    """What `protocol.parse` found in one turn of the agent: at most one of prompt and answer."""

    think: str | None
    prompt: str | None
    answer: str | None
    clean: bool  # one think block, not empty, then one prompt or answer block, and nothing else


@dataclass(frozen=True)
class Completion:
    """What the agent sampled for one turn, with its log-probabilities under the sampling distribution."""

    tokens: list[int]  # end with a stop token if `finished`
    logprobs: list[float]  # nats, one per token
    finished: bool  # False: cut off by the token limit


@dataclass(frozen=True)
class Turn:
    """One turn of the agent and the environment's reply."""

    text: str  # as `parse` reads it: with a <think> that the template opened, without the stop token
    action: Action
    reply: str | None  # None: the environment was not asked, or its call failed
    latency: float = 0.0  # seconds until the environment replied or failed


@dataclass
class Trajectory:
    """One game. `tokens` only ever grows: what the agent sampled is never rendered again."""

    question: Question
    tokens: list[int] = field(default_factory=list)  # (T,) the whole dialogue
    sampled: list[bool] = field(default_factory=list)  # (T,) True: the agent's token, which is trained on
    logprobs: list[float] = field(default_factory=list)  # (T,) nats, when it was sampled; 0 for context
    turns: list[Turn] = field(default_factory=list)
    stop: Stop = "max_turns"
    error: str = ""  # why the environment failed, when stop is "env_error"
    spent: Spending = field(default_factory=Spending)  # on the replies
    seconds: float = 0.0  # of the whole game

    def add_context(self, tokens: list[int]) -> None:
        """Append tokens that the agent did not write: the question, a reply, role markers."""
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def add_sampled(self, completion: Completion) -> None:
        """Append the agent's own tokens."""
        self.tokens += completion.tokens
        self.sampled += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs

    @property
    def opening_length(self) -> int:
        """The number of tokens before the agent's first token. All games of a question share them."""
        return self.sampled.index(True)

    @property
    def answer(self) -> str | None:
        return self.turns[-1].action.answer if self.turns else None


@dataclass(frozen=True)
class Reward:
    """R_fmt, R_ans and R of eqs 12-15, and the state of the gate."""

    format: float
    answer: float  # counts if the gate is open
    total: float  # R, or a user's own reward
    gate_is_open: bool = False  # R_fmt = ε: the answer counts


@dataclass(frozen=True)
class ScoredGame:
    """A game, its reward, and how much better it did than the other games of its question."""

    trajectory: Trajectory
    reward: Reward | None  # None: the environment broke the game
    advantage: float | None  # None: not trained on, because the game or too much of its group broke
    index: int = 0  # among all games of a training step: question by question, over all ranks


class Generate(Protocol):
    """The agent: all tokens so far in, the tokens of its next turn (at most `max_new`) out.

    The tokens depend on the weights, the context and the seed only. Which games run at the same time can
    change the last bits of log-probabilities.
    """

    def __call__(self, tokens: list[int], *, max_new: int, seed: str) -> Awaitable[Completion]: ...


Ask = Callable[[list[Message]], Awaitable[str]]
"""The environment: chat messages in, its reply out. EnvError ends the game, any other error the run."""
