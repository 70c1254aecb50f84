"""What replies: the interface of a source, and environments in this process as sources (mini, none, py:)."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

from prompt_r1.config.functions import OBJECT_PREFIX, described, import_object
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
    that `ask` has as parameters.
    """

    def ask(self, messages: list[Message]) -> str | Awaitable[str]:
        """Return the reply. Raise EnvError if the call failed: its game ends, and no other one."""


class FreeSource:
    """An object in this process as a source. A plain function runs in a thread, so that it may block.

    Free, unless `characters_per_token` is set: then tokens are estimated from the text's length.
    """

    def __init__(
        self, own: Answering, *, seed: int, name: str = "", characters_per_token: float = math.inf
    ) -> None:
        if not callable(getattr(own, "ask", None)):
            raise UsageError(f"the environment {name or own!r} has no method `ask(messages)`")
        self.name = name or str(getattr(own, "name", type(own).__name__))
        self.parameters: Mapping[str, object] = {"seed": seed}
        self._own = own
        self._takes = _parameters(own.ask) & {"session", "sample", "seed"}
        self.by_session = "session" in self._takes  # equal messages of two questions may differ in reply
        self._characters_per_token = characters_per_token

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Outcome:
        game = {"session": session, "sample": sample, "seed": self.parameters["seed"]}
        own = [Message(role=one["role"], content=one["content"]) for one in messages]
        text = await self._ask(own, **{name: game[name] for name in self._takes})
        tokens_in = self._tokens(sum(len(message["content"]) for message in messages))
        return Outcome(
            "ok", text=text, finish="stop", tokens_in=tokens_in, tokens_out=self._tokens(len(text))
        )

    async def _ask(self, messages: list[Message], **game: object) -> str:
        ask = cast(Callable[..., Any], self._own.ask)
        try:
            if inspect.iscoroutinefunction(ask):
                reply = await ask(messages, **game)
            else:
                reply = await asyncio.to_thread(ask, messages, **game)
        except (EnvError, FatalEnvError, UsageError):
            raise
        except Exception as error:
            raise UsageError(f"the environment {self.name} raised {described(error)}") from error
        if not isinstance(reply, str):
            raise UsageError(f"the environment {self.name} returned {type(reply).__name__}, not a string")
        return reply

    def _tokens(self, characters: int) -> int:
        return math.ceil(characters / self._characters_per_token)

    async def check(self) -> None:
        pass


def _parameters(function: Callable[..., object]) -> set[str]:
    """The names of a function's parameters."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some that are written in C have none
        return set()


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
