"""The mini environment as an OpenAI-compatible endpoint, with faults and a key.

python -m tests.support.mini_server --port 8100 --fail 0.1
python train.py --env mini@http://127.0.0.1:8100/v1
"""

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from prompt_r1.miniworld.environment import MiniEnvironment

T = TypeVar("T")
COMPLETION = "POST /v1/chat/completions"
# Options of a short training.
GAMES = [
    *"--data mini:validation --questions 4 --group-size 4 --mini-batch 16 --max-new 58".split(),
    *"--max-tokens 900 --max-turns 3 --val-limit 2 --lr 1e-4".split(),
]

# What a request gets in place of an ordinary response: a status, a connection that is reset within the
# response, no response at all, or HTML instead of JSON.
FAULTS = ("500", "429", "reset", "hang", "garbage")
BILLED = ("reset", "hang", "garbage")  # a provider may bill the reply, but it is lost


class LocalServer:
    """Reads HTTP requests on this machine; subclasses `respond`."""

    base_url = ""
    _server: asyncio.Server | None = None

    def __init__(self) -> None:
        self.open: set[asyncio.StreamWriter] = set()  # connections

    async def start(self, port: int = 0) -> None:
        """Listen on this machine, on any free port if `port` is 0, and set `base_url`."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=1024)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def stop(self) -> None:
        """Stop listening and close every connection."""
        assert self._server is not None
        self._server.close()
        for writer in self.open:
            writer.transport.abort()
        while self.open:
            await asyncio.sleep(0.001)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after another."""
        self.open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                pairs = (line.partition(":") for line in lines)
                headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ", 2)
                await self.respond(reader, writer, f"{method} {path}", headers, body)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, ValueError):
            pass  # the client has gone, or speaks no HTTP
        finally:
            writer.close()
            with suppress(OSError):  # The client has gone before it has read everything.
                await writer.wait_closed()
            self.open.discard(writer)

    async def respond(self, reader, writer, request: str, headers: Mapping[str, str], body: bytes) -> None:
        """Write the response to one request, which is its method and path."""
        raise NotImplementedError


class FaultyServer(LocalServer):
    """Serves the model `mini` of the world of seed 0.

    It fails a share `fail` of the requests with one of `faults`, drawn anew, so that a retry may succeed.
    With `key`, requests with other keys are rejected. `counts` has replies, their tokens, and faults by name.
    """

    def __init__(
        self,
        *,
        fail: float = 0.0,
        faults: Sequence[str] = FAULTS,
        key: str = "",
        rng: random.Random | None = None,
    ) -> None:
        super().__init__()
        self.models = {"mini": MiniEnvironment(seed=0)}
        self.fail = fail
        self.faults = tuple(faults)
        self.key = key
        self.rng = rng or random.Random(0)
        self.counts: Counter[str] = Counter()

    async def respond(self, reader, writer, request: str, headers: Mapping[str, str], body: bytes) -> None:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            # Careless on purpose: the message contains the key that the client sent.
            wrong = error(f"wrong key in Authorization: {headers.get('authorization')}")
            writer.write(response_of(401, wrong))
            return
        if request != COMPLETION:
            writer.write(response_of(404, error(f"there is no {request}")))
            return
        status, reply = await self.complete(body)
        if status == 200 and self.rng.random() < self.fail:
            await self._fail(reader, writer, self.rng.choice(self.faults), headers)
            return
        if status == 200 and isinstance(reply, dict):
            self.counts["replies"] += 1
            self.counts.update(reply["usage"])
        writer.write(response_of(status, reply))

    async def complete(self, body: bytes) -> tuple[int, object]:
        """The reply of a model."""
        request = json.loads(body)
        model, messages = request["model"], request["messages"]
        sent = sum(len(message["content"].split()) for message in messages)
        if model not in self.models:
            return 404, error(f"The model `{model}` does not exist", code="model_not_found")
        text = await self.models[model].ask(messages)
        said = len(text.split())
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return 200, {
            "object": "chat.completion",
            "model": model,
            "choices": [choice],
            "usage": {"prompt_tokens": sent, "completion_tokens": said, "total_tokens": sent + said},
        }

    async def _fail(self, reader, writer, fault: str, headers: Mapping[str, str]) -> None:
        self.counts[fault] += 1
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
                await reader.read(1)  # until the client gives up
                raise ConnectionResetError
            case "garbage":
                writer.write(response_of(200, f"<html>{echo}</html>".encode()))


def response_of(status: int, body: object, *headers: str) -> bytes:
    """A complete response. A body that is not bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind, length = "Content-Type: application/json", f"Content-Length: {len(content)}"
    return "\r\n".join([f"HTTP/1.1 {status} -", kind, length, *headers, "", ""]).encode() + content


def error(message: str, *, code: str = "") -> dict[str, object]:
    """An error object in OpenAI's form."""
    return {"error": {"message": message, "code": code or None}}


def with_server(work: Coroutine[None, None, T], server: LocalServer) -> T:
    """Run `work` while the server listens."""

    async def both() -> T:
        await server.start()
        try:
            return await work
        finally:
            await server.stop()

    return asyncio.run(both())


def main() -> None:
    """Serve the mini world in a process of its own."""
    parser = argparse.ArgumentParser("python -m tests.support.mini_server")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--fail", type=float, default=0.0, help="share of requests that get a fault (0)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--key", default="", help="the only accepted API key")
    given = vars(parser.parse_args())
    port = given.pop("port")

    async def serve() -> None:
        server = FaultyServer(**given)
        await server.start(port)
        print(f"the mini world at {server.base_url}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
