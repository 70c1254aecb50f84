"""Scripted endpoints for tests of the HTTP client, and environments opened as a user's SPEC says."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection
from dataclasses import fields

import httpx
import torch

from prompt_r1.config.environment import EnvironmentConfig
from prompt_r1.distributed import Ranks
from prompt_r1.endpoint.client import ClientLimits, EndpointClient
from prompt_r1.endpoint.request import ApiKey
from prompt_r1.endpoint.responses import Outcome, classify, reply_of
from prompt_r1.environments.chat import ChatEnvironment
from prompt_r1.environments.pool import Pool
from prompt_r1.environments.sources import ReplySource
from prompt_r1.environments.specs import Environments
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


def classify_body(status: int, body: object) -> Outcome:
    """Classify a response with this body: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return classify(status, {}, content, now=NOW)


class Provider:
    """An endpoint that sends scripted responses, the last one repeatedly, and records the requests."""

    def __init__(self, *script: httpx.Response | Exception) -> None:
        self.script = list(script)
        self.requests: list[dict[str, object]] = []
        self.headers: list[httpx.Headers] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        self.headers.append(request.headers)
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        return httpx.Response(step.status_code, headers=step.headers, content=step.content)


class RecordedSleep(list[float]):
    """A replacement of asyncio.sleep that returns at once and records the seconds."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        await asyncio.sleep(0)


def chat(respond: Respond | None = None, *, system: str = "", **settings: object) -> ChatEnvironment:
    """A chat environment: `respond` answers its requests, without a network, if given.

    `settings` are parameters of EndpointClient or fields of ClientLimits.
    """
    names = {field.name for field in fields(ClientLimits)}
    limits = ClientLimits(**{name: settings.pop(name) for name in names & settings.keys()})
    transport = httpx.MockTransport(respond) if respond else None
    defaults = {
        "model": "large",
        "base_url": "https://llm.test/v1",
        "key": ApiKey(KEY),
        "sleep": RecordedSleep(),
    }
    client = EndpointClient(transport=transport, limits=limits, **{**defaults, **settings})
    return ChatEnvironment(client, system=system)


async def reply(source: ReplySource, messages: list[Message] = HELLO) -> str:
    """The text of one call. Raises as a game's call does."""
    return reply_of(await source.call(messages), source.name)


def ask(environment: ChatEnvironment, messages: list[Message] = HELLO) -> str:
    """The text of one call, in an event loop of its own."""

    async def one_call() -> str:
        return await reply(environment, messages)

    return asyncio.run(one_call())


def open_environment(
    spec: str,
    *,
    seed: int = 0,
    other_specs: Collection[str] = (),
    stops_on_failures: bool = True,
    **settings: object,
) -> Pool:
    """Open the environments of a SPEC without a journal. `settings` are fields of EnvironmentConfig."""
    config = EnvironmentConfig(**settings)
    ranks = Ranks(rank=0, count=1, device=torch.device("cpu"))
    environments = Environments(config, seed=seed, folder=None, ranks=ranks, other_specs=other_specs)
    return environments.open(spec, stops_on_failures=stops_on_failures)
