"""Scripted endpoints for tests of the HTTP client, and environments opened as a user's SPEC says."""

import json
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path

import httpx
import torch

from prompt_r1.environments.budget import Bill
from prompt_r1.environments.endpoint import Endpoint
from prompt_r1.environments.environment import Call, Environment
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.own import OwnSource
from prompt_r1.environments.responses import read_reply
from prompt_r1.environments.sources import Busy, Caller, Refused, Reply, Source
from prompt_r1.environments.specs import check_environment, trusted_names
from prompt_r1.environments.specs import open_environment as open_checked
from prompt_r1.settings.agent import EnvironmentConfig
from prompt_r1.types import Message
from tests.support.clock import run_jumping

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


def read_body(status: int, body: object) -> Reply | Busy | Refused:
    """What a response with this body comes to: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return read_reply(status, {}, content, now=NOW)
    except (Busy, Refused) as problem:
        return problem


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


async def _streamed(respond: Respond, request: httpx.Request) -> httpx.Response:
    """A response that has not been read yet, as one of a network."""
    response = await respond(request)
    stream = httpx.ByteStream(response.content)
    return httpx.Response(response.status_code, headers=response.headers, stream=stream)


def endpoint(respond: Respond | None = None, **settings: object) -> Endpoint:
    """An endpoint: `respond` answers its requests, without a network, if given."""
    transport = httpx.MockTransport(partial(_streamed, respond)) if respond else None
    defaults = {"name": "large", "base_url": "https://llm.test/v1", "key": KEY, "fields": {}, "system": ""}
    return Endpoint(transport=transport, **{**defaults, **settings})


def environment_over(
    respond: Respond | None = None, *, folder: Path | None = None, concurrency: int = 64, **settings: object
) -> Environment:
    """The environment of one endpoint. `settings` are those of the endpoint."""
    return Environment([endpoint(respond, **settings)], journal=Journal(folder), concurrency=concurrency)


async def attempt(source: Source, messages: list[Message] = HELLO, *, sample: int = 0) -> Reply:
    """The reply to one request. Raises Busy and Refused."""
    environment = Environment([source])
    [client] = environment.clients
    return await environment.request(Call(client, messages, Caller("q", sample), Bill()))


async def reply(asked: Environment, messages: list[Message] = HELLO, *, sample: int = 0) -> str:
    """The text of one call. Raises as a game's call does."""
    return (await asked.ask(messages, Caller("q", sample))).text


def ask(asked: Environment, messages: list[Message] = HELLO, *, sample: int = 0) -> str:
    """The text of one call, in an event loop of its own, whose clock jumps over waits."""
    return run_jumping(reply(asked, messages, sample=sample))


def environment_of(own: object) -> Environment:
    """The environment of one object, without journal, price and limits."""
    return Environment([OwnSource(own, seed=0)])


def open_environment(
    spec: str, *, seed: int = 0, others: Collection[str] = (), **settings: object
) -> Environment:
    """Open the environments of a SPEC that the user typed. `settings` are fields of EnvironmentConfig."""
    config, cpu = EnvironmentConfig(**settings), torch.device("cpu")
    trusted = trusted_names(typed=[spec], opened=[spec, *others])
    return open_checked(check_environment(spec, config, trusted=trusted), seed=seed, device=cpu)
