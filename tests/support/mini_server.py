"""The mini environment as an OpenAI-compatible endpoint, with faults, latencies and a key.

    python -m tests.support.mini_server --port 8100 --fail 0.1
    python train.py --env mini@http://127.0.0.1:8100/v1

Plain asyncio. The replies are those of the mini environment.
"""

import argparse
import asyncio
import json
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import TypeVar

from prompt_r1.miniworld import MiniEnvironment, make_world
from prompt_r1.types import Message

T = TypeVar("T")
COMPLETION = "POST /v1/chat/completions"
# Options of a short training.
GAMES = [
    *"--questions 4 --group-size 4 --mini-batch 16 --max-new 64 --max-tokens 900".split(),
    *"--max-turns 3 --val-limit 2 --lr 1e-4".split(),
]

# What a request gets in place of an ordinary response.
FAULTS = {
    "500": "an error of the server",
    "429": "too many requests, with Retry-After",
    "reset": "a connection that is reset within the response",
    "hang": "no response at all",
    "garbage": "HTML instead of JSON",
    "duplicate": "the response twice",
    "stall": "a pause of a second within the response",
    "types": "JSON of wrong types",
    "usage": "token counts that cannot be right",
}
REPLYING = ("duplicate", "stall", "usage")  # the reply can be read
BILLED = ("reset", "hang", "garbage", "types")  # a provider may bill the reply, but it is lost
DEFAULT_FAULTS = ("500", "429", "reset", "hang", "garbage")
LONGEST_HANG = 600.0  # seconds
STALL = 1.0  # seconds
WRONG_TYPES: tuple[object, ...] = (
    [],
    "text",
    {"choices": {}},
    {"choices": [None]},
    {"choices": [{"message": []}]},
    {"choices": [{"message": {"content": {"text": 5}}, "finish_reason": []}]},
)
WRONG_USAGE: tuple[object, ...] = (
    None,
    [],
    {"prompt_tokens": -7, "completion_tokens": "9"},
    {"prompt_tokens": 10**30, "completion_tokens": 0.5},
    {"prompt_tokens": True, "completion_tokens": None},
)
LATENCY_SIGMA = 1.0  # of the log-normal distribution: one call in a hundred takes ten times the median


class FaultyServer:
    """Serves the models `mini` and `mini-b` of the world of `seed`.

    It fails a share `fail` of the requests with one of `faults`, drawn anew, so that a retry may succeed.
    `latency` is the median seconds of a reply. With `key`, requests with other keys are rejected. `counts`
    has replies (the faults in REPLYING included), their tokens, faults by name, and the peak number of
    concurrent requests.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        fail: float = 0.0,
        faults: Sequence[str] = DEFAULT_FAULTS,
        latency: float = 0.0,
        key: str = "",
        rng: random.Random | None = None,
    ) -> None:
        world = make_world(seed)
        self.models = {
            "mini": MiniEnvironment(world, "A", seed=seed),
            "mini-b": MiniEnvironment(world, "B", seed=seed),
        }
        self.fail = fail
        self.faults = tuple(faults)
        self.latency = latency
        self.key = key
        self.rng = rng or random.Random(0)
        self.counts: Counter[str] = Counter()
        self.running = 0
        self.base_url = ""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> None:
        """Listen on this machine, on any free port if `port` is 0, and set `base_url`."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=1024)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def stop(self) -> None:
        """Stop listening and close every connection."""
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        while self._open:
            await asyncio.sleep(0.001)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after another."""
        self._open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                pairs = (line.partition(":") for line in lines)
                headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ", 2)
                self.running += 1
                self.counts["peak"] = max(self.counts["peak"], self.running)
                try:
                    await self.respond(reader, writer, f"{method} {path}", headers, body)
                finally:
                    self.running -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, ValueError):
            pass  # the client has gone, or speaks no HTTP
        finally:
            writer.close()
            self._open.discard(writer)

    async def respond(self, reader, writer, request: str, headers: Mapping[str, str], body: bytes) -> None:
        """Write the response to one request, which is its method and path."""
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            # Careless on purpose: the message contains the key that the client sent.
            wrong = error(f"wrong key in Authorization: {headers.get('authorization')}")
            writer.write(response_of(401, wrong))
            return
        if request != COMPLETION:
            writer.write(response_of(*self.other_answer(request)))
            return
        status, reply = await self.complete(body)
        if self.latency:
            await asyncio.sleep(self.latency * math.exp(self.rng.gauss(0, LATENCY_SIGMA)))
        if status == 200 and self.rng.random() < self.fail:
            await self._fail(reader, writer, self.rng.choice(self.faults), headers, reply)
            return
        if status == 200:
            self._count(reply)
        writer.write(response_of(status, reply))

    def other_answer(self, request: str) -> tuple[int, object]:
        """The status and the body of a response to a request that asks for no completion."""
        if request != "GET /v1/models":
            return 404, error(f"there is no {request}")
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "prompt-r1"} for name in self.models
        ]
        return 200, {"object": "list", "data": models}

    async def complete(self, body: bytes) -> tuple[int, object]:
        """The reply of a model."""
        try:
            request = json.loads(body)
            model = request["model"]
            messages = [
                Message(role=message["role"], content=text_of(message["content"]))
                for message in request["messages"]
            ]
            sent = sum(len(message["content"].split()) for message in messages)
        except (ValueError, KeyError, TypeError, AttributeError):
            return 400, error("the request needs model and messages")
        if model not in self.models:
            return 404, error(f"The model `{model}` does not exist", code="model_not_found")
        text = await self.models[model].ask(messages)
        said = len(text.split())
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return 200, {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": {"prompt_tokens": sent, "completion_tokens": said, "total_tokens": sent + said},
        }

    def _count(self, reply: object) -> None:
        self.counts["replies"] += 1
        if isinstance(reply, dict):
            self.counts.update(reply["usage"])

    async def _fail(self, reader, writer, fault: str, headers: Mapping[str, str], reply: object) -> None:
        self.counts[fault] += 1
        if fault in REPLYING:
            self._count(reply)
        echo = f"request failed: Authorization: {headers.get('authorization', 'none')}"
        match fault:
            case "500":
                writer.write(response_of(500, error(echo)))
            case "429":
                writer.write(response_of(429, error(echo), "Retry-After: 0.2"))
            case "reset":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{")
                await writer.drain()
                writer.transport.abort()
                raise ConnectionResetError
            case "hang":
                async with asyncio.timeout(LONGEST_HANG):
                    await reader.read(1)  # until the client gives up
                raise ConnectionResetError
            case "garbage":
                writer.write(response_of(200, f"<html>{echo}</html>"))
            case "duplicate":
                writer.write(2 * response_of(200, reply))
            case "stall":
                response = response_of(200, reply)
                writer.write(response[: len(response) // 2])
                await writer.drain()
                await asyncio.sleep(STALL)
                writer.write(response[len(response) // 2 :])
            case "types":
                writer.write(response_of(200, json.dumps(self.rng.choice(WRONG_TYPES))))
            case "usage":
                odd = {"usage": self.rng.choice(WRONG_USAGE)}
                writer.write(response_of(200, {**reply, **odd} if isinstance(reply, dict) else reply))


def response_of(status: int, body: object, *headers: str) -> bytes:
    """A complete response. A body that is not a string is sent as JSON."""
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    kind, length = "Content-Type: application/json", f"Content-Length: {len(content)}"
    return "\r\n".join([f"HTTP/1.1 {status} -", kind, length, *headers, "", ""]).encode() + content


def text_of(content: str | list[Mapping[str, str]]) -> str:
    """The text of a message's content: a string, or a list of text parts. Raises TypeError or KeyError."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def error(message: str, *, code: str = "") -> dict[str, object]:
    """An error object in OpenAI's form."""
    return {"error": {"message": message, "code": code or None}}


def with_server(work: Coroutine[None, None, T], server: FaultyServer) -> T:
    """Run `work` while the server listens."""

    async def both() -> T:
        await server.start()
        try:
            return await work
        finally:
            await server.stop()

    return asyncio.run(both())


async def serve(port: int, server: FaultyServer) -> None:
    """Serve until the program is stopped."""
    await server.start(port)
    print(f"the mini world at {server.base_url}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve the mini world in a process of its own."""
    listed = "; ".join(f"{name}: {what}" for name, what in FAULTS.items())
    parser = argparse.ArgumentParser("python -m tests.support.mini_server", epilog=f"faults: {listed}")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--seed", type=int, default=0, help="seed of the world (0)")
    parser.add_argument("--fail", type=float, default=0.0, help="share of requests that get a fault (0)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, metavar="NAME", default=DEFAULT_FAULTS)
    parser.add_argument("--latency", type=float, default=0.0, help="median seconds of a reply (0)")
    parser.add_argument("--key", default="", help="the only accepted API key")
    given = vars(parser.parse_args())
    asyncio.run(serve(given.pop("port"), FaultyServer(**given, rng=random.Random())))


if __name__ == "__main__":
    main()
