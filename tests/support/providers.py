"""Scripted endpoints for tests of the HTTP client, and environments opened as a user's SPEC says."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection

import httpx
import torch

from prompt_r1.environments.endpoint import Endpoint
from prompt_r1.environments.environment import Caller, Environment
from prompt_r1.environments.responses import Attempt, classify
from prompt_r1.environments.sources import Call, Outcome, OwnSource, Source
from prompt_r1.environments.specs import open_environment as open_spec
from prompt_r1.settings.agent import EnvironmentConfig
from prompt_r1.types import Message

KEY = "sk-Secret-0123456789-abcdef"
HELLO: list[Message] = [{"role": "user", "content": "Where is the Louvre?"}]
Respond = Callable[[httpx.Request], Awaitable[httpx.Response]]
NOW = 1_700_000_000.0  # epoch seconds


def body_of(content: object = "Paris", *, finish: str = "stop", **message: object) -> dict[str, object]:
    """The body of a chat completion."""
    return {"choices": [{"message": {"content": content, **message}, "finish_reason": finish}]}


def error_of(message: str, **fields: object) -> dict[str, object]:
    """The body of an error response."""
    return {"error": {"message": message, **fields}}


OK = httpx.Response(200, json=body_of())


def classify_body(status: int, body: object) -> Attempt:
    """Classify a response with this body: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return classify(status, {}, content, now=NOW)


class Provider:
    """An endpoint that sends scripted responses, the last one repeatedly, and records the requests."""

    def __init__(self, *script: httpx.Response | Exception) -> None:
        self.script = list(script)
        self.requests: list[dict[str, object]] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        return httpx.Response(step.status_code, headers=step.headers, content=step.content)


class RecordedSleep(list[float]):
    """A replacement of asyncio.sleep that returns at once and records the seconds."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        await asyncio.sleep(0)


class MovingClock(RecordedSleep):
    """Moves the clock of the event loop too, so that deadlines are reached."""

    async def __call__(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        time_of = loop.time
        loop.time = lambda: time_of() + seconds  # type: ignore[method-assign]
        await super().__call__(seconds)
        await asyncio.sleep(0)  # timers that are due run
        await asyncio.sleep(0)


class RecordedAccount:
    """Counts the requests of a call, and those that may be billed although they brought no reply."""

    def __init__(self) -> None:
        self.requests = self.lost = 0
        self.running = False

    async def begin(self) -> None:
        self.requests += 1
        self.running = True

    def give_up(self, lost: bool) -> None:
        self.lost += lost and self.running
        self.running = False


def endpoint(respond: Respond | None = None, **settings: object) -> Endpoint:
    """An endpoint: `respond` answers its requests, without a network, if given."""
    transport = httpx.MockTransport(respond) if respond else None
    defaults = {"name": "large", "base_url": "https://llm.test/v1", "key": KEY, "sleep": MovingClock()}
    return Endpoint(transport=transport, **{**defaults, **settings})


async def outcome_of(
    source: Source,
    messages: list[Message] = HELLO,
    account: RecordedAccount | None = None,
    *,
    sample: int = 0,
) -> Outcome:
    """The outcome of one call."""
    account = account or RecordedAccount()
    return await source.reply(Call(messages, sample, "q", account.begin, account.give_up))


def environment_over(respond: Respond, **settings: object) -> Environment:
    """The environment of one endpoint."""
    return Environment([endpoint(respond, **settings)])


async def reply(source: Source, messages: list[Message] = HELLO) -> str:
    """The text of one call. Raises as a game's call does."""
    return await Environment([source]).ask(messages, Caller("q"))


def ask(source: Source, messages: list[Message] = HELLO) -> str:
    """The text of one call, in an event loop of its own."""
    return asyncio.run(reply(source, messages))


def environment_of(own: object) -> Environment:
    """The environment of one object, without journal, price and limits."""
    return Environment([OwnSource(own, seed=0)])


def open_environment(
    spec: str, *, seed: int = 0, others: Collection[str] = (), **settings: object
) -> Environment:
    """Open the environments of a SPEC that the user typed. `settings` are fields of EnvironmentConfig."""
    config, cpu = EnvironmentConfig(**settings), torch.device("cpu")
    return open_spec(spec, config, typed=[spec], others=others, seed=seed, device=cpu)
