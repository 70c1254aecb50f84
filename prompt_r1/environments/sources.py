"""What an environment asks: the interface of a source, what an attempt comes to, and objects in this process.

A source makes one attempt. It returns a `Reply`, or raises `Busy` (the same request may get a reply later) or
`Refused` (it will not). Retries, budget and journal are the environment's (environment.py).
"""

import asyncio
import inspect
import math
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from prompt_r1.errors import EnvError, FatalEnvError, UsageError
from prompt_r1.settings.functions import described, parameters_of
from prompt_r1.types import Message, Spending

CHARACTERS_PER_TOKEN = 4.0  # of objects in this process, which count no tokens

# Thinking that model and server do not separate from the reply. A block that does not end is thinking too.
THINKING = re.compile(r"\s*(?:<think>(.*?)(?:</think>|\Z)|\[THINK\](.*?)(?:\[/THINK\]|\Z))", re.DOTALL)
# Control tokens that a server leaves at the end of a reply: <|im_end|>, <｜end▁of▁sentence｜>, </s>, [EOS], …
END_TOKENS = re.compile(
    r"(?:\s*(?:<[|｜][^<>\n]{1,40}[|｜]>|</s>|<(?:eos|eod|eot|pad|end_of_\w+)>|\[EOS\]))+\s*\Z", re.IGNORECASE
)


@dataclass
class Caller:
    """Who calls, and what the replies have cost, whether they were paid now or earlier.

    A resumed run plays its games from the journal again, and must reward them the same.
    """

    question: str = ""  # its id
    sample: int = 0  # number of the game among those of its question
    epoch: int = 0  # how often the run has drawn the question before
    spent: Spending = field(default_factory=Spending)
    finish: str = ""  # why the last reply ended: "length" if it was cut by a limit of tokens


@dataclass(frozen=True)
class Reply:
    """What a source replies.

    A label says that it is no ordinary reply, although the dialogue got all that it will get: refusal,
    content_filter, length, context_length or empty. The game goes on with the text that there is.
    """

    text: str
    label: str = ""
    reasoning: str = ""  # the model's thinking: recorded, never part of the text
    finish: str = ""  # the server's finish_reason
    reason: str = ""  # the server's words, if an error became a labelled reply
    tokens_in: int = 0
    tokens_out: int = 0


class Busy(Exception):
    """There is no reply yet: the same request may get one later.

    `wait` are the seconds for which the server asks for no calls. A request that may be billed although its
    reply is lost is charged at its estimate.
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
        self.field = field  # the field of the request that the server does not know
        self.concerns_all = concerns_all


class Source(Protocol):
    """Something that replies. `parameters` is everything but the dialogue that shapes a reply."""

    name: str
    parameters: Mapping[str, object]
    samples: bool  # equal messages may get different replies
    by_question: bool = False  # the reply depends on the question's id too
    concurrency: int = sys.maxsize  # attempts at the same time
    needs_check: bool = False  # whether a wrong setting shows only in a reply

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        """Send one request. Raises Busy, Refused, EnvError, FatalEnvError or UsageError."""

    async def close(self) -> None:
        """Close connections. Another attempt opens new ones."""
        return


def reply_of(written: str, *, label: str = "", reasoning: str = "", finish: str = "stop") -> Reply:
    """A reply from what a model wrote, without its thinking and the tokens that end it.

    It is labelled if that leaves no text.
    """
    thought, text = cut_thinking(written)
    text = END_TOKENS.sub("", text)
    if not text.strip() and not label:
        label = "length" if finish == "length" else "empty"
    return Reply(text, label=label, reasoning=reasoning or thought, finish=finish)


def cut_thinking(written: str) -> tuple[str, str]:
    """The thinking in a text, and the text without it.

    Thinking is in blocks at the beginning, or ends with a lone </think>, if the chat template has opened it.
    """
    thoughts, text = [], written
    while block := THINKING.match(text):
        thoughts.append((block[1] or block[2] or "").strip())
        text = text[block.end() :].strip()
    before, end, after = text.partition("</think>")
    if end and "<think>" not in before:
        thoughts.append(before.strip())
        text = after.strip()
    return "\n".join(filter(None, thoughts)), text


class Answering(Protocol):
    """What a user's environment needs: it takes the chat messages of a game and returns the reply.

    Of `session` (the question's id), `sample` (the number of its game) and `seed` (of the run), it gets those
    that `ask` has as parameters. With an attribute `samples = False`, equal calls are made once.
    """

    def ask(self, messages: list[Message]) -> str | Awaitable[str]:
        """Return the reply. Raise EnvError if the call failed: its game ends, and no other one."""


class OwnSource(Source):
    """An object with `ask` in this process as a source. A plain function runs in a thread: it may block.

    A class is instantiated, with the seed if it takes one. If it is `priced`, tokens are estimated from the
    text's length. Raises UsageError.
    """

    def __init__(self, own: Any, *, seed: int, name: str = "", priced: bool = False) -> None:
        if inspect.isclass(own):
            arguments = {"seed": seed} if "seed" in parameters_of(own) else {}
            try:
                own = own(**arguments)
            except (Exception, SystemExit) as error:
                raise UsageError(f"the environment {name or own!r} raised {described(error)}") from error
        function = getattr(own, "ask", None)
        if not callable(function):
            raise UsageError(f"the environment {name or own!r} has no method `ask(messages)`")
        self.name = name or str(getattr(own, "name", type(own).__name__))
        self.parameters: Mapping[str, object] = {"seed": seed}
        self._function: Callable[..., Any] = function
        self._takes = parameters_of(function) & {"session", "sample", "seed"}
        self.by_question = "session" in self._takes
        self.samples = getattr(own, "samples", True)
        self._characters_per_token = CHARACTERS_PER_TOKEN if priced else math.inf

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        known = {"session": caller.question, "sample": caller.sample, "seed": self.parameters["seed"]}
        own = [Message(role=one["role"], content=one["content"]) for one in messages]
        text = await self._call(own, **{name: known[name] for name in self._takes})
        if not isinstance(text, str):
            raise UsageError(f"the environment {self.name} returned {type(text).__name__}, not a string")
        characters = sum(len(message["content"]) for message in messages)
        tokens_in = math.ceil(characters / self._characters_per_token)
        tokens_out = math.ceil(len(text) / self._characters_per_token)
        return replace(reply_of(text), tokens_in=tokens_in, tokens_out=tokens_out)

    async def _call(self, *arguments: object, **known: object) -> object:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(*arguments, **known)
            reply = await asyncio.to_thread(self._function, *arguments, **known)
            # A decorated or partial async function does not look like one.
            return await reply if inspect.isawaitable(reply) else reply
        except (EnvError, FatalEnvError, UsageError):
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(f"the environment {self.name} raised {described(error)}") from error


class MuteEnvironment:
    """Gives every prompt the same reply, without information: the ablations without an environment."""

    name = "nobody"
    samples = False

    async def ask(self, messages: list[Message]) -> str:
        return "I have nothing to say about this."
