"""Scripted providers for tests of the chat client: what is sent, what is slept."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx

from prompt_r1.endpoint.responses import Outcome, classify
from prompt_r1.environments.chat import ChatEnvironment

KEY = "sk-Secret-0123456789-abcdef"
HELLO = [{"role": "user", "content": "Where is the Louvre?"}]
Respond = Callable[[httpx.Request], Awaitable[httpx.Response]]
NOW = 1_700_000_000.0


def body_of(content: object = "Paris", *, finish: str = "stop", **message: object) -> dict[str, object]:
    return {"choices": [{"message": {"content": content, **message}, "finish_reason": finish}]}


def error_of(message: str, **fields: object) -> dict[str, object]:
    return {"error": {"message": message, **fields}}


def judge(status: int, body: object) -> Outcome:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return classify(status, {}, content, now=NOW)


class Provider:
    """Gives its scripted responses one after the other, the last one for ever; remembers the requests."""

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


class Naps(list[float]):
    """A sleep that only notes how long it should have slept."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        await asyncio.sleep(0)


def chat(respond: Respond, **settings: object) -> ChatEnvironment:
    defaults = {"model": "large", "base_url": "https://llm.test/v1", "api_key": KEY, "sleep": Naps()}
    return ChatEnvironment(transport=httpx.MockTransport(respond), **{**defaults, **settings})


def ask(environment: ChatEnvironment, messages: list[dict[str, str]] = HELLO) -> str:
    async def one_call() -> str:
        try:
            return await environment.ask(messages)
        finally:
            await environment.close()

    return asyncio.run(one_call())


OK = httpx.Response(200, json=body_of())
