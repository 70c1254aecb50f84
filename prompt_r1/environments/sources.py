"""What replies: the interface, and environments in this process."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prompt_r1.config.functions import OBJECT_PREFIX, described, import_object, parameters_of
from prompt_r1.endpoint.responses import Outcome
from prompt_r1.errors import EnvError, FatalEnvError, UsageError
from prompt_r1.types import Message


class ReplySource(Protocol):
    """Something that replies. `parameters` is everything that shapes a reply besides messages and sample."""

    name: str
    parameters: Mapping[str, object]

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Outcome:
        """The reply with its token counts, or why there is none.

        `session` is the id of the question, and `sample` the number of the game among its games.
        """

    async def check(self) -> None:
        """Raise UsageError or FatalEnvError if no call can succeed."""


class Answering(Protocol):
    """What a user's environment needs: it takes the chat messages of a game and returns the reply.

    Of `session` (the question's id), `sample` (the number of its game) and `seed` (of the run), it gets those
    that `ask` has as parameters. An environment that answers many dialogues at once may have
    `ask_many(dialogues)` in place of `ask` or besides it, with `sessions`, `samples` and `seed`: it gets
    the calls that are waiting, and returns a reply, or an EnvError, for each.
    """

    def ask(self, messages: list[Message]) -> str | Awaitable[str]:
        """Return the reply. Raise EnvError if the call failed: its game ends, and no other one."""


@dataclass
class WaitingCall:
    """A call that waits for the next batch of `ask_many`."""

    messages: list[Message]
    session: str
    sample: int
    reply: asyncio.Future[object] = field(init=False)


class FreeSource:
    """An object in this process as a source. A plain function runs in a thread, so that it may block.

    Free, unless `characters_per_token` is set: then tokens are estimated from the text's length.
    """

    def __init__(
        self, own: Answering, *, seed: int, name: str = "", characters_per_token: float = math.inf
    ) -> None:
        function = getattr(own, "ask_many", None) or getattr(own, "ask", None)
        if not callable(function):
            raise UsageError(f"the environment {name or own!r} has no method `ask(messages)`")
        self.name = name or str(getattr(own, "name", type(own).__name__))
        self.parameters: Mapping[str, object] = {"seed": seed}
        self._function: Callable[..., Any] = function
        self._in_batches = hasattr(own, "ask_many")
        self._takes = parameters_of(function) & {"session", "sample", "seed", "sessions", "samples"}
        # Equal messages of two questions may differ in reply.
        self.by_session = not self._takes.isdisjoint({"session", "sessions"})
        self._characters_per_token = characters_per_token
        self._waiting: list[WaitingCall] = []  # for the next batch
        self._batches: asyncio.Task[None] | None = None

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Outcome:
        game = {"session": session, "sample": sample, "seed": self.parameters["seed"]}
        own = [Message(role=one["role"], content=one["content"]) for one in messages]
        if self._in_batches:
            text = await self._in_next_batch(WaitingCall(own, session, sample))
        else:
            text = await self._call(own, **{name: game[name] for name in self._takes})
        if not isinstance(text, str):
            raise UsageError(f"the environment {self.name} returned {type(text).__name__}, not a string")
        tokens_in = self._tokens(sum(len(message["content"]) for message in messages))
        return Outcome(
            "ok", text=text, finish="stop", tokens_in=tokens_in, tokens_out=self._tokens(len(text))
        )

    async def _in_next_batch(self, call: "WaitingCall") -> object:
        """The reply to a call, which waits while an earlier batch is answered."""
        call.reply = asyncio.get_running_loop().create_future()
        self._waiting.append(call)
        if self._batches is None or self._batches.done():
            self._batches = asyncio.create_task(self._answer_batches())
        reply = await call.reply
        if isinstance(reply, EnvError):
            raise reply
        return reply

    async def _answer_batches(self) -> None:
        """Answer all waiting calls at once, until none is left."""
        while self._waiting:
            await asyncio.sleep(0)  # let the games of this moment join
            calls = [call for call in self._waiting if not call.reply.done()]  # others were cancelled
            self._waiting = []
            if not calls:
                continue
            games = {
                "sessions": [call.session for call in calls],
                "samples": [call.sample for call in calls],
                "seed": self.parameters["seed"],
            }
            try:
                replies = await self._call(
                    [call.messages for call in calls], **{name: games[name] for name in self._takes}
                )
                if not isinstance(replies, list | tuple) or len(replies) != len(calls):
                    raise UsageError(
                        f"the environment {self.name}: ask_many must return a list of {len(calls)} replies"
                    )
            except (EnvError, FatalEnvError, UsageError) as error:
                for call in calls:
                    if not call.reply.done():
                        call.reply.set_exception(error)
                continue
            for call, reply in zip(calls, replies, strict=True):
                if not call.reply.done():
                    call.reply.set_result(reply)

    async def _call(self, *arguments: object, **game: object) -> object:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(*arguments, **game)
            reply = await asyncio.to_thread(self._function, *arguments, **game)
            # A decorated or partial async function does not look like one.
            return await reply if inspect.isawaitable(reply) else reply
        except (EnvError, FatalEnvError, UsageError):
            raise
        except Exception as error:
            raise UsageError(f"the environment {self.name} raised {described(error)}") from error

    def _tokens(self, characters: int) -> int:
        return math.ceil(characters / self._characters_per_token)

    async def check(self) -> None:
        pass


class MuteEnvironment:
    """Gives every prompt the same reply, without information: the ablations without an environment."""

    def __init__(self, name: str = "nobody") -> None:
        self.name = name

    async def ask(self, messages: list[Message]) -> str:
        return "I have nothing to say about this."


def open_own(spec: str, *, seed: int) -> FreeSource:
    """The object of a SPEC `py:MODULE:NAME` as a source; a class is instantiated. Raises UsageError."""
    own = import_object(spec.removeprefix(OBJECT_PREFIX), where=f"the environment {spec!r}")
    if inspect.isclass(own):
        try:
            own = own()
        except Exception as error:
            raise UsageError(f"the environment {spec!r} raised {described(error)}") from error
    return FreeSource(own, seed=seed, name=spec)
