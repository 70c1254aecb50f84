"""A user's own environment: any object with `ask(messages) -> str`, a function or a coroutine function.

In Python it is given to `prompt_r1.load(…, env=OBJECT)`; on the command line its SPEC is `py:MODULE:NAME`.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from prompt_r1.config.functions import OBJECT_PREFIX, described, import_object
from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.metered import FreeSource, MeteredEnvironment
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError, FatalEnvError, UsageError
from prompt_r1.options.routes import AGENT_ROUTE
from prompt_r1.types import Message


class Answering(Protocol):
    """What a user's environment needs: it takes the chat messages of a game and returns the reply."""

    def ask(self, messages: list[Message]) -> str | Awaitable[str]:
        """Return the reply. Raise EnvError if the call failed: its game ends, and no other one."""


class OwnEnvironment:
    """Adapts a user's object to `Environment`. A plain function runs in a thread, so that it may block."""

    def __init__(self, own: Answering, *, name: str = "") -> None:
        if not callable(getattr(own, "ask", None)):
            raise UsageError(f"the environment {name or own!r} has no method `ask(messages)`")
        self.name = name or str(getattr(own, "name", type(own).__name__))
        self._own = own

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        copy = [Message(role=message["role"], content=message["content"]) for message in messages]
        try:
            if inspect.iscoroutinefunction(self._own.ask):
                reply = await self._own.ask(copy)
            else:
                reply = await asyncio.to_thread(cast(Callable[[list[Message]], str], self._own.ask), copy)
        except (EnvError, FatalEnvError, UsageError):
            raise
        except Exception as error:
            raise UsageError(f"the environment {self.name} raised {described(error)}") from error
        if not isinstance(reply, str):
            raise UsageError(f"the environment {self.name} returned {type(reply).__name__}, not a string")
        return reply

    async def close(self) -> None:
        pass


def open_own(spec: str) -> OwnEnvironment:
    """The environment of a SPEC `py:MODULE:NAME`; a class is instantiated. Raises UsageError."""
    own: Answering = import_object(spec.removeprefix(OBJECT_PREFIX), where=f"the environment {spec!r}")
    return OwnEnvironment(_instance(own, spec) if inspect.isclass(own) else own, name=spec)


def _instance(kind: Callable[[], Answering], spec: str) -> Answering:
    try:
        return kind()
    except Exception as error:
        raise UsageError(f"the environment {spec!r} raised {described(error)}") from error


def pool_of(own: Answering, *, route: str = "session") -> Pool:
    """A pool of one object, without journal, price and limits."""
    source = FreeSource(OwnEnvironment(own), seed=0)
    budget = Budget()
    metered = MeteredEnvironment(source, journal=Journal(None), budget=budget, price=Price())
    return Pool([metered], budget=budget, route=AGENT_ROUTE if route == AGENT_ROUTE else "session")
