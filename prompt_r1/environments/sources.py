"""What replies: the interface of a source, and objects in this process as sources."""

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from prompt_r1.errors import EnvError, FatalEnvError, UsageError
from prompt_r1.settings.functions import described, parameters_of
from prompt_r1.types import Message

# ok       a reply
# outcome  no ordinary reply, but one that the dialogue caused (refusal, content filter, context too long):
#          the game continues with the text there is, and the journal records the label
# failed   the same call may succeed later
# refused  the provider rejects this dialogue, or all of them: known once it has replied to another
Verdict = Literal["ok", "outcome", "failed", "refused"]

CHARACTERS_PER_TOKEN = 4.0  # of objects in this process, which count no tokens

# Where the thinking of a reply ends and its text begins, where model and server do not separate them. A tag
# is <think>, [THINK], <seed:think>, <|begin_of_thought|>, <think duration="3">, ◁think▷ …
KIND = r"(?:think(?:ing)?|thoughts?|reasoning|reflection|analysis)(?:\s[^<>\[\]\n]{0,60})?\|?[>\]▷]"
OPENED = rf"[<\[◁]\|?(?:\w+:|begin_of_|start_)?{KIND}"
CLOSED = rf"[<\[◁]\|?(?:/(?:\w+:)?|end_of_|end_){KIND}"
THINKING = (
    # a tag begins the reply; without an end, all of it is thinking
    re.compile(rf"(?:\s*{OPENED}(.*?)(?:{CLOSED}|\Z))+(.*)", re.DOTALL | re.IGNORECASE),
    # an end alone (the template wrote the start) begins a line or follows a sentence; others are mentions
    re.compile(
        rf"((?:(?!{OPENED}).)*?)(?:(?:\A\s*|\n[ \t]*){CLOSED}|(?<=[.!?。])\s?{CLOSED}(?=\S|\s*\n|\Z))(.*)",
        re.DOTALL | re.IGNORECASE,
    ),
    # gpt-oss: the text is the channel "final"; the second form has lost its special tokens
    re.compile(
        r"\s*(?:<\|start\|>\w*)?(?=<\|channel\|>)(.*?)(?:<\|channel\|>final.{0,60}?<\|message\|>|\Z)(.*)",
        re.DOTALL,
    ),
    re.compile(r"\s*(analysis.*?)assistantfinal(.*)", re.DOTALL),
)


@dataclass(frozen=True)
class Outcome:
    """What came of a call."""

    verdict: Verdict
    text: str = ""  # the reply
    label: str = ""  # of an "outcome": refusal, content_filter, length, context_length or empty
    reason: str = ""  # why there is no reply; the provider's message where it sent one
    finish: str = ""  # the provider's finish_reason
    reasoning: str = ""  # the model's thinking: recorded, never part of the reply
    tokens_in: int = 0
    tokens_out: int = 0

    @property
    def replied(self) -> bool:
        """Whether there is a reply, so that the call is not sent again."""
        return self.verdict in ("ok", "outcome")


AskOutcome = Callable[[list[Message]], Awaitable[Outcome]]  # a paid call


def without_thinking(outcome: Outcome) -> Outcome:
    """The outcome with the thinking in its text as its reasoning, and a label if that leaves no text."""
    if found := next(filter(None, (pattern.fullmatch(outcome.text) for pattern in THINKING)), None):
        thought, text = found[1].strip(), re.sub(r"\A<\|\w+\|>|<\|\w+\|>\Z", "", found[2].strip())
        outcome = replace(outcome, text=text, reasoning=outcome.reasoning or thought)
    if outcome.text.strip() or outcome.verdict != "ok":
        return outcome
    return replace(outcome, verdict="outcome", label="length" if outcome.finish == "length" else "empty")


@dataclass(frozen=True)
class Call:
    """One call, as a source gets it: the dialogue, the game, and two functions that account for requests."""

    messages: list[Message]
    sample: int  # number of the game among those of its question
    session: str  # id of the question
    begin: Callable[[], Awaitable[None]]  # before each request: reserves its estimated cost, and may wait
    give_up: Callable[[bool], None]  # after a request without a reply; True: it may be billed all the same


class Source(Protocol):
    """Something that replies. `parameters` is everything but the dialogue that shapes a reply."""

    name: str
    parameters: Mapping[str, object]
    samples: bool  # equal messages may get different replies
    by_session: bool = False  # the reply depends on the question's id too

    async def reply(self, call: Call) -> Outcome:
        """The reply with its token counts, or why there is none. Awaits `call.begin` before it starts."""

    async def check(self, ask: AskOutcome) -> None:
        """Raise UsageError or FatalEnvError if no call can succeed. What it asks is paid for."""
        return


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
        self.by_session = "session" in self._takes
        self.samples = getattr(own, "samples", True)
        self._characters_per_token = CHARACTERS_PER_TOKEN if priced else math.inf

    async def reply(self, call: Call) -> Outcome:
        await call.begin()
        game = {"session": call.session, "sample": call.sample, "seed": self.parameters["seed"]}
        own = [Message(role=one["role"], content=one["content"]) for one in call.messages]
        text = await self._call(own, **{name: game[name] for name in self._takes})
        if not isinstance(text, str):
            raise UsageError(f"the environment {self.name} returned {type(text).__name__}, not a string")
        characters = sum(len(message["content"]) for message in call.messages)
        tokens_in = math.ceil(characters / self._characters_per_token)
        tokens_out = math.ceil(len(text) / self._characters_per_token)
        return Outcome("ok", text=text, finish="stop", tokens_in=tokens_in, tokens_out=tokens_out)

    async def _call(self, *arguments: object, **game: object) -> object:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(*arguments, **game)
            reply = await asyncio.to_thread(self._function, *arguments, **game)
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
