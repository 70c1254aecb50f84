"""The nouns of Prompt-R1, and the two callables that a game needs.

A *game* is the dialogue about one question: the agent (small, trained) asks the environment (large, frozen)
over several turns and then answers. `Trajectory` records it token by token:

    tokens   | question and instruction | think, prompt | reply | think, prompt | reply | think, answer |
    sampled  | 0 0 0 0 0 0 0 0 0 0 0 0  | 1 1 1 1 1 1 1 | 0 0 0 | 1 1 1 1 1 1 1 | 0 0 0 | 1 1 1 1 1 1 1 |

Only the agent's own tokens (sampled = 1) enter the loss. The other tokens are context.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypedDict

from prompt_r1.spending import Spending

# Why a game ended. "max_tokens": the game or its last turn became too long. "malformed": the agent's turn had
# neither a prompt nor an answer. "env_error": a call of the environment failed.
Stop = Literal["answered", "max_turns", "max_tokens", "malformed", "env_error"]
# The kind of a question decides how evaluations compare answers. The gold answer is a name (qa), a number
# (math), or a long text such as a summary (text).
Kind = Literal["qa", "math", "text"]
Role = Literal["system", "user", "assistant"]


class Message(TypedDict):
    """One chat message, in the form that chat templates and chat-completions endpoints take."""

    role: Role
    content: str


@dataclass(frozen=True)
class Question:
    """A question and its gold answers."""

    id: str
    dataset: str
    text: str
    answers: tuple[str, ...]  # The score of a prediction is its best score over these.
    kind: Kind = "qa"
    # The row's other columns, for a user's own reward or metric.
    extra: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class GameSettings:
    """The limits of a game: how long the agent may play."""

    max_turns: int = 5
    max_new: int = 1024  # The most new tokens in a turn.
    max_tokens: int = 8192  # The most tokens of the whole dialogue.
    max_reply_tokens: int = 1024  # The most tokens of a reply that the agent reads; 0: all of them.


@dataclass(frozen=True)
class Action:
    """What `protocol.parse` found in one turn of the agent: at most one of prompt and answer."""

    think: str | None
    prompt: str | None
    answer: str | None
    clean: bool  # Whether the turn is a think block that is not empty, a prompt or answer, and nothing else.


@dataclass(frozen=True)
class Completion:
    """The tokens that the agent sampled for one turn, with their log-probabilities as sampled."""

    tokens: list[int]  # The last token is a stop token if `finished`.
    logprobs: list[float]  # One for each token, in nats.
    finished: bool  # False: the limit of tokens cut the turn off.


@dataclass(frozen=True)
class Turn:
    """One turn of the agent and the environment's reply."""

    text: str  # The turn as `parse` reads it (see `protocol.Codec.turn_text`).
    action: Action
    reply: str | None  # None: the environment was not asked, or its call failed.
    latency: float = 0.0  # Seconds until the environment replied or failed.


@dataclass
class Trajectory:
    """One game. `tokens` only ever grows: what the agent sampled is never rendered again."""

    question: Question
    tokens: list[int] = field(default_factory=list)  # (T,) the whole dialogue
    sampled: list[bool] = field(default_factory=list)  # (T,) True: the agent's token, which is trained on
    logprobs: list[float] = field(default_factory=list)  # (T,) nats, as sampled; 0 for context
    turns: list[Turn] = field(default_factory=list)
    stop: Stop | None = None  # None: the game has not ended.
    error: str = ""  # What `stop` does not say, such as why the environment failed.
    # What the replies to this game cost, and what its requests may have cost. spending.py defines both sums.
    spent: Spending = field(default_factory=Spending)
    charged: Spending = field(default_factory=Spending)
    seconds: float = 0.0  # How long the game took.

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
        """The number of tokens before the agent's first token.

        These tokens are the opening, which all games of a question share. There must be a sampled token.
        """
        return self.sampled.index(True)

    @property
    def answer(self) -> str | None:
        """The answer of the last turn; None without one."""
        return self.turns[-1].action.answer if self.turns else None


@dataclass(frozen=True)
class Reward:
    """The reward of a game (eqs 12-15)."""

    format: float  # R_fmt
    answer: float  # R_ans
    total: float  # R of eq. 15, unless a user's own reward replaces it
    gate_is_open: bool = False  # Whether the format has earned its full reward, so that the answer counts.


@dataclass(frozen=True)
class ScoredGame:
    """A game, its reward, and how much better it did than the other games of its question."""

    trajectory: Trajectory
    reward: Reward | None  # None: the environment broke the game.
    # None: the game is not trained on. Either it broke, or more than a quarter of its group did.
    advantage: float | None
    # The game's number in its training step, over all ranks: number of the question × group size + sample.
    index: int = 0
    # A user's advantages of the turns, whose mean is `advantage`. (): all tokens have `advantage`.
    turn_advantages: Sequence[float] = ()

    @property
    def has_advantage(self) -> bool:
        """Whether any token of the game has an advantage other than 0."""
        return bool(self.advantage) or any(self.turn_advantages)


class Generate(Protocol):
    """The agent: takes all tokens so far, and returns the tokens of its next turn, at most `max_new`.

    The tokens depend only on the weights, the context and the seed. Games that run at the same time can
    change the last bits of the log-probabilities, but not the tokens (except where rounding decides a tie).
    """

    def __call__(self, tokens: list[int], *, max_new: int, seed: str) -> Awaitable[Completion]: ...


Ask = Callable[[list[Message]], Awaitable[str]]
"""The environment: takes chat messages, and returns its reply.

EnvError ends the game. Any other error ends the run.
"""
