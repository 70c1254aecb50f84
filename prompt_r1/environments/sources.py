"""What an environment asks: the interface of a source, the results of an attempt, and objects of the user.

A source makes one attempt. It returns a `Reply`, or raises `Busy` (the same request may get a reply later) or
`Refused` (it will not). environment.py repeats attempts, keeps the budget and writes the journal.
"""

import asyncio
import inspect
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from prompt_r1.errors import EnvError, LimitReached, UsageError
from prompt_r1.settings.functions import parameters_of, user_code
from prompt_r1.types import Message, Spending

# If nobody counts tokens, they are estimated from the number of characters. English text has about four
# characters for each token. Tokens that may be billed are estimated from above.
CHARACTERS_PER_TOKEN = 4
BILLED_CHARACTERS_PER_TOKEN = 3
# The fields of a request that limit the tokens of its reply: OpenAI's newer models take only the second.
REPLY_LIMITS = ("max_tokens", "max_completion_tokens")

# A block of thinking that the server does not separate from the reply. If it has no closing tag, everything
# after its opening tag is thinking. Models write <think>, <thinking>, <thought>, <seed:think>, [THINK] or
# ◁think▷.
THINK = r"(?:seed:)?(?:think|thinking|thought)"
OPENED = rf"[<\[◁]{THINK}[>\]▷]"
CLOSED = rf"[<\[◁]/{THINK}[>\]▷]"
THINKING = re.compile(rf"\s*{OPENED}(.*?)(?:{CLOSED}|\Z)", re.DOTALL | re.IGNORECASE)
LONE_END = re.compile(rf"((?:(?!{OPENED}).)*?){CLOSED}", re.DOTALL | re.IGNORECASE)
# The control tokens that servers leave at the end of a reply, in lower case. Only known tokens count, because
# "<|x|>" and "[|x - y|]" are mathematics. DeepSeek's tokens have "｜" and "▁" in place of "|" and "_".
END_TOKENS = (
    "</s> <eos> <eod> <eot> <pad> <turn|> <end_of_turn> <end_of_text> <end_of_utterance> [eos] [pad] [/inst] "
    "<|im_end|> <|role_end|> <|eot|> <|eot_id|> <|eom_id|> <|eos|> <|pad|> <|return|> <|user|> "
    "<|observation|> <|end|> <|endoftext|> <|endofturn|> <|end_of_text|> <|end_of_turn|> "
    "<|end_of_turn_token|> <|end_of_sentence|> <|end_of_msg|> <|end_response|> [|endofturn|]"
).split()
LONGEST_END_TOKEN = max(len(token) for token in END_TOKENS)

# A call of a user's object may take half an hour, which includes its wait for a thread. The other ranks of a
# run wait an hour for a rank (`start_ranks`).
OWN_CALL_SECONDS = 1800.0


@dataclass(frozen=True)
class Caller:
    """Which game calls."""

    question: str = ""  # the question's id
    sample: int = 0  # the number of the game among the games of its question
    epoch: int = 0  # how often the run has drawn the question before


@dataclass
class Bill:
    """What the calls of a game have cost, and a limit.

    A resumed run plays its games from the journal again. A user's reward may depend on what a game has spent,
    so for `spent`, a reply from the journal counts as if it were paid again.
    """

    max_usd: float = math.inf  # No request starts that may take `charged_usd` above this limit.
    spent: Spending = field(default_factory=Spending)  # the cost of the replies
    charged_usd: float = 0.0  # what the requests were charged, also without a reply

    def check(self, estimate: Spending) -> None:
        """Raise LimitReached if a request with this estimated cost may exceed the limit."""
        if self.charged_usd + estimate.usd > self.max_usd:
            raise LimitReached(
                "usd",
                f"the next request may exceed the limit of ${self.max_usd:g}; spent: ${self.charged_usd:.6f}",
            )


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
    reason: str = ""  # the server's words, if its error became a labelled reply
    tokens_in: int = 0
    tokens_out: int = 0


class Busy(Exception):
    """There is no reply yet: the same request may get a reply later.

    `wait`: for how many seconds the server wants no calls; None if it does not say. `may_be_billed`: whether
    the server may charge for the request, although there is no reply.
    """

    def __init__(self, reason: str, *, wait: float | None = None, may_be_billed: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
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
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.field = field  # the name of a field in the request that the server does not know
        self.concerns_all = concerns_all


class Source(ABC):
    """Something that replies. `parameters` holds all that shapes a reply besides the dialogue."""

    name: str
    parameters: Mapping[str, object]
    samples: bool  # True: it samples, so equal messages may get different replies.
    by_question: bool = False  # True: the reply depends on the question's id too.
    concurrency: int = sys.maxsize  # the most attempts at the same time
    reply_limit: int | None = None  # the most tokens of a reply; None: nothing limits them
    needs_check: bool = False  # True: a wrong setting shows only in a reply.
    left_out: Sequence[str] = ()  # The fields that `leave_out` has removed from the requests, in this order.

    @abstractmethod
    async def attempt(self, messages: list[Message], caller: Caller, *, failures: int = 0) -> Reply:
        """Send one request of a call, after `failures` requests that got no reply.

        Raises Busy, Refused, EnvError, FatalEnvError or UsageError.
        """

    async def close(self) -> None:
        """Close connections. Another attempt opens new ones."""
        return

    def leave_out(self, field: str) -> None:
        """Send no request with this field any more, because the server rejects it."""
        raise NotImplementedError(f"the requests of {self.name} have no field {field}")


def limit_in(fields: Mapping[str, object]) -> int | None:
    """The limit of a reply's tokens in the fields of a request; None if there is none.

    If both names of the limit are given, a server may accept only one of them, so the larger limit counts.
    """
    limits = [fields.get(name) for name in REPLY_LIMITS]
    # llama.cpp and others take -1 for no limit.
    return max((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def with_system(messages: list[Message], system: str) -> list[Message]:
    """The dialogue with `system` as its system message, if it has none and `system` is not empty."""
    if not system or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def reply_of(written: str, *, label: str = "", reasoning: str = "", finish: str = "stop") -> Reply:
    """Make a reply of what a model wrote, without its thinking and the tokens that end it.

    If that leaves no text, the reply gets a label.
    """
    thought, text = cut_thinking(written)
    text = without_end_tokens(text)
    if not text.strip() and not label:
        label = "length" if finish == "length" else "empty"
    return Reply(text, label=label, reasoning=reasoning or thought, finish=finish)


def cut_thinking(written: str) -> tuple[str, str]:
    """Split a text into its thinking and the rest.

    The thinking is in blocks at the beginning. If the chat template has opened the block, it is everything
    before a lone closing tag.
    """
    thoughts, text = [], written
    while block := THINKING.match(text) or LONE_END.match(text):
        thoughts.append(block[1].strip())
        text = text[block.end() :].strip()
    return "\n".join(filter(None, thoughts)), text


def without_end_tokens(text: str) -> str:
    """The text without the control tokens at its end, and without the white space around them."""
    while True:
        stripped = text.rstrip()
        end = stripped[-LONGEST_END_TOKEN:].lower().replace("｜", "|").replace("▁", "_")
        token = next((token for token in END_TOKENS if end.endswith(token)), None)
        if token is None:
            return text
        text = stripped[: -len(token)].rstrip()


class Answering(Protocol):
    """What a user's environment needs: the method `ask` takes the chat messages of a game, and replies.

    `ask` may have the parameters `session` (the question's id), `sample` (the number of the question's game)
    and `seed` (of the run). With an attribute `samples = False`, equal calls are made once.
    """

    def ask(self, messages: list[Message]) -> str | Awaitable[str]:
        """Return the reply. Raise EnvError if the call failed: its game ends, and other games go on."""


class OwnSource(Source):
    """A source that asks an object of the user. If `ask` is no async function, it runs in a thread.

    A class is instantiated, with the seed if it takes a seed. If calls are `priced`, tokens are estimated
    from the length of the texts; otherwise they are 0. `reply_limit` is not enforced: it says how many tokens
    the object writes at most. Raises UsageError.
    """

    def __init__(
        self, own: Any, *, seed: int, name: str = "", priced: bool = False, reply_limit: int | None = None
    ) -> None:
        if inspect.isclass(own):
            arguments = {"seed": seed} if "seed" in parameters_of(own) else {}
            with user_code(f"the environment {name or own!r}"):
                own = own(**arguments)
        function = getattr(own, "ask", None)
        if not callable(function):
            raise UsageError(f"the environment {name or own!r} has no method `ask(messages)`")
        self.name = name or str(getattr(own, "name", type(own).__name__))
        self.parameters: Mapping[str, object] = {"seed": seed}
        self._function: Callable[..., Any] = function
        self._takes = parameters_of(function) & {"session", "sample", "seed"}
        self.by_question = "session" in self._takes
        self.samples = getattr(own, "samples", True)
        self.reply_limit = reply_limit
        self._priced = priced

    async def attempt(self, messages: list[Message], caller: Caller, *, failures: int = 0) -> Reply:
        known = {"session": caller.question, "sample": caller.sample, "seed": self.parameters["seed"]}
        arguments = {name: known[name] for name in self._takes}
        # The user's code gets a copy, which it may change.
        copies = [Message(role=message["role"], content=message["content"]) for message in messages]
        try:
            async with asyncio.timeout(OWN_CALL_SECONDS):
                text = await self._call(copies, **arguments)
        except TimeoutError:
            raise EnvError(f"{self.name} did not reply within {OWN_CALL_SECONDS:g} s") from None
        if not isinstance(text, str):
            raise UsageError(f"the environment {self.name} returned {type(text).__name__}, not a string")
        reply = reply_of(text)
        if not self._priced:
            return reply
        characters = sum(len(message["content"]) for message in messages)
        tokens_in = math.ceil(characters / CHARACTERS_PER_TOKEN)
        tokens_out = math.ceil(len(text) / CHARACTERS_PER_TOKEN)
        return replace(reply, tokens_in=tokens_in, tokens_out=tokens_out)

    async def _call(self, messages: list[Message], **arguments: object) -> object:
        """Call the user's `ask`. Raises UsageError for an error in the user's code."""
        with user_code(f"the environment {self.name}"):
            if inspect.iscoroutinefunction(self._function):
                return await self._function(messages, **arguments)
            reply = await asyncio.to_thread(self._function, messages, **arguments)
            # A decorated or partial async function does not look like one.
            return await reply if inspect.isawaitable(reply) else reply


class MuteEnvironment:
    """Gives every prompt the same reply, without information, for ablations without an environment."""

    name = "nobody"
    samples = False

    async def ask(self, messages: list[Message]) -> str:
        return "I have nothing to say about this."
