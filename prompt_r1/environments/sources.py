"""What an environment asks: the interface of a source, and the results of an attempt.

An attempt is one request. A source returns a `Reply`, or raises `Busy` (the same request may get a reply
later) or `Refused` (it will not). environment.py repeats attempts, keeps the budget and writes the journal.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from prompt_r1.programs.text import printable, without_keys
from prompt_r1.types import Message

# The fields of a request that limit the tokens of its reply: OpenAI's newer models take only the second.
REPLY_LIMITS = ("max_tokens", "max_completion_tokens")

# A call waits for one of the --env-concurrency slots of its environment. No request of the call begins later
# than this many seconds after the call got its slot. A request that begins in time has its whole `timeout`. A
# game of five turns makes up to four calls, which together must take less than the hour that the other ranks
# wait for a rank (`start_ranks`).
CALL_DEADLINE = 600.0

MAX_REASON_CHARACTERS = 300  # characters of a provider's error message


@dataclass(frozen=True)
class Caller:
    """Which game calls."""

    question: str = ""  # the question's id
    sample: int = 0  # the number of the game among the games of its question
    epoch: int = 0  # how often the run has drawn the question before


@dataclass(frozen=True)
class Reply:
    """What a source replies.

    A label marks a reply that is no ordinary text: refusal, content_filter, length, context_length or empty.
    Asking again would bring nothing better, so the game goes on with the text there is.
    """

    text: str
    label: str = ""
    reasoning: str = ""  # The model's thinking is recorded, and is never part of the text.
    finish: str = ""  # the server's finish_reason; "length" if a limit of tokens has cut the reply
    reason: str = ""  # the server's words (`shown_reason`), if its error became a labelled reply
    tokens_in: int = 0
    tokens_out: int = 0


class Busy(Exception):
    """There is no reply yet: the same request may get a reply later.

    `wait`: for how many seconds the server wants no calls; None if it does not say. `may_be_billed`: whether
    the server may charge for the request, although there is no reply.
    """

    def __init__(self, reason: str, *, wait: float | None = None, may_be_billed: bool = False) -> None:
        self.reason = shown_reason(reason)
        super().__init__(self.reason)
        self.wait = wait
        self.may_be_billed = may_be_billed


class NoText(Busy):
    """A complete response without a reply. Several in succession mean that something is set wrongly."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, may_be_billed=True)


class NoServer(Busy):
    """No connection to the server."""


class Refused(Exception):
    """The server rejects this dialogue, or with `concerns_all` every dialogue."""

    def __init__(self, reason: str, *, status: int = 0, field: str = "", concerns_all: bool = False) -> None:
        self.reason = shown_reason(reason)
        super().__init__(self.reason)
        self.status = status
        self.field = field  # the name of a field in the request that the server does not know
        self.concerns_all = concerns_all


class Source(ABC):
    """Something that replies. `parameters` holds all that shapes a reply besides the dialogue."""

    name: str
    parameters: Mapping[str, object]
    # Whether replies are sampled. If so, each game gets replies of its own. The keys of the journal depend on
    # it, so it never changes.
    samples: bool
    reply_limit: int | None = None  # the most tokens of a reply; None: nothing limits them
    timeout: float | None = None  # the longest time of an attempt, in seconds; None: no limit
    resends_slow: bool = False  # True: an attempt that takes much longer than usual is repeated.
    needs_check: bool = False  # True: a wrong setting shows only in a reply.

    @abstractmethod
    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        """Send one request. It is cancelled at its time limit.

        Raises Busy, Refused, EnvError or UsageError.
        """

    async def close(self) -> None:
        """Close connections. Another attempt opens new ones."""
        return


def shown_reason(words: str) -> str:
    """An error text on one line, without keys, cut to MAX_REASON_CHARACTERS, and printable."""
    # Keys are removed before the text is cut, because half a key would not be found.
    line = " ".join(without_keys(words).split())
    return printable(line[:MAX_REASON_CHARACTERS])


def byte_count(text: str) -> int:
    """The bytes of a text in UTF-8, which are an upper bound of its tokens.

    A byte-level tokenizer has no more tokens than bytes. English text has about a quarter as many, but with
    some tokenizers each digit is a token, and a character of another script may be several.
    """
    # A flag or a YAML file may hold half a character (a lone surrogate), which JSON can send.
    return len(text.encode(errors="surrogatepass"))


def limit_in(fields: Mapping[str, object]) -> int | None:
    """The limit of a reply's tokens in the fields of a request; None if there is none.

    If both names of the limit are given, we do not know which one the server uses. So the larger limit
    counts, and there is none if one of the two is no limit.
    """
    limits: list[int] = []
    for name in REPLY_LIMITS:
        if name not in fields:
            continue
        limit = fields[name]
        # llama.cpp and others take -1 for no limit.
        if not isinstance(limit, int) or limit <= 0:
            return None
        limits.append(limit)
    return max(limits, default=None)


def with_system(messages: list[Message], system: str) -> list[Message]:
    """The dialogue with `system` as its system message, if it has none and `system` is not empty."""
    if not system or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]
