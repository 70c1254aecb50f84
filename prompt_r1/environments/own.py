"""An object of the user as a source: `--env py:MODULE:NAME`."""

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from prompt_r1.chat_template import encodable
from prompt_r1.environments.reply_text import reply_of
from prompt_r1.environments.sources import CALL_DEADLINE, Caller, Reply, Source, byte_count
from prompt_r1.errors import EnvError, UsageError
from prompt_r1.settings.functions import user_code
from prompt_r1.types import Message

# The tokens of a user's object are estimated, as a quarter of the bytes, which is usual for English text.
BYTES_PER_TOKEN = 4


class Answering(Protocol):
    """What a user's environment needs: the method `ask` takes the chat messages of a game, and replies.

    `ask` may have a second parameter, `caller`, which says whose game calls. With an attribute
    `samples = False`, equal calls are made once, if `ask` has no `caller`.
    """

    def ask(self, messages: list[Message]) -> str | Awaitable[str]:
        """Return the reply. Raise EnvError if the call failed: its game ends, and other games go on.

        A call that failed is charged at its estimate, because what it asked may have been billed.
        """


class OwnSource(Source):
    """A source that asks an object of the user.

    If `ask` is no async function, each call runs in a thread, so that all other games go on while it waits.
    If `own` is a class, it is instantiated. `seed` is only part of the journal's keys. If calls are `priced`,
    tokens are estimated from the length of the texts; otherwise they are 0. `reply_limit` is not enforced: it
    says how many tokens the object writes at most. Raises UsageError for an object without `ask`, and for an
    error in its class.
    """

    timeout = CALL_DEADLINE

    def __init__(
        self, own: Any, *, seed: int, name: str = "", priced: bool = False, reply_limit: int | None = None
    ) -> None:
        if inspect.isclass(own):
            with user_code(f"the environment {name or own!r}"):
                own = own()
        function = getattr(own, "ask", None)
        if not callable(function):
            raise UsageError(f"the environment {name or own!r} has no method `ask(messages)`")
        self.name = name or str(getattr(own, "name", type(own).__name__))
        self.parameters: Mapping[str, object] = {"seed": seed}
        self._function: Callable[..., Any] = function
        self._takes_caller = "caller" in inspect.signature(function).parameters
        # An object that knows the caller may reply to each game differently.
        self.samples = self._takes_caller or getattr(own, "samples", True)
        self.reply_limit = reply_limit
        self._priced = priced

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        # The user's code gets a copy, which it may change.
        copies = [Message(role=message["role"], content=message["content"]) for message in messages]
        text = await self._call(copies, caller)
        if not isinstance(text, str):
            raise UsageError(f"the environment {self.name} returned {type(text).__name__}, not a string")
        text = encodable(text)
        reply = reply_of(text)
        if not self._priced:
            return reply
        bytes_sent = sum(byte_count(message["content"]) for message in messages)
        tokens_in = math.ceil(bytes_sent / BYTES_PER_TOKEN)
        tokens_out = math.ceil(byte_count(text) / BYTES_PER_TOKEN)
        return replace(reply, tokens_in=tokens_in, tokens_out=tokens_out)

    async def _call(self, messages: list[Message], caller: Caller) -> object:
        """Call the user's `ask`. Raises UsageError for an error in the user's code."""
        arguments = {"caller": caller} if self._takes_caller else {}
        what = f"the environment {self.name}"

        def ask() -> object:
            # `user_code` converts errors inside the thread, because a future cannot hold a StopIteration.
            with user_code(what, passes=(EnvError,)):
                return self._function(messages, **arguments)

        reply = ask() if inspect.iscoroutinefunction(self._function) else await in_daemon_thread(ask)
        # A decorated async function does not look like one, so a thread may return a coroutine.
        with user_code(what, passes=(EnvError,)):
            return await reply if inspect.isawaitable(reply) else reply


async def in_daemon_thread(call: Callable[[], object]) -> object:
    """Return what `call` returns in a thread of its own.

    A thread cannot be stopped, so the thread of a call that was cancelled or too slow goes on. It takes no
    thread from another call, and the program does not wait for it at its end, as it would with a pool.
    """
    result: Future[object] = Future()
    # Marked as running, the future cannot be cancelled. A cancelled one would take no result.
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)


class MuteEnvironment:
    """Gives every prompt the same reply, without information, for ablations without an environment."""

    name = "nobody"
    samples = False

    async def ask(self, messages: list[Message]) -> str:
        return "I have nothing to say about this."
