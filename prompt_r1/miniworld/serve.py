"""The mini world's environment as an OpenAI-compatible endpoint, with faults on request.

    python -m prompt_r1.miniworld.serve --port 8100 --seed 0 --fail 0.1
    python train.py --env mini@http://127.0.0.1:8100/v1

Plain asyncio, this machine only. The replies are as deterministic as the mini environment's; faults and
latencies are drawn anew for each request, so that a retry may succeed.
"""

import argparse
import asyncio
import json
import math
import random
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.world import make_world
from prompt_r1.types import Message

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


class MiniServer:
    """Serves the models `mini` and `mini-b`.

    `fail` is the share of requests that get one of `faults` (of FAULTS), `latency` the median seconds of a
    reply. With `key`, requests with other keys are rejected. `counts` has replies (the faults in REPLYING
    included), their tokens, faults by name, and the peak number of concurrent requests.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        fail: float = 0.0,
        faults: Sequence[str] = DEFAULT_FAULTS,
        latency: float = 0.0,
        key: str = "",
        rng: random.Random,
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
        self.rng = rng
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
                headers = {}
                for line in lines:
                    name, _, value = line.partition(":")
                    headers[name.strip().lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ", 2)
                self.running += 1
                self.counts["peak"] = max(self.counts["peak"], self.running)
                try:
                    await self._handle(reader, writer, f"{method} {path}", headers, body)
                finally:
                    self.running -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, ValueError):
            pass
        finally:
            writer.close()
            self._open.discard(writer)

    async def _handle(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> None:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            # Careless on purpose: the message contains the key that the client sent.
            return respond(writer, 401, error(f"wrong key in Authorization: {headers.get('authorization')}"))
        if request == "GET /v1/models":
            models = [
                {"id": name, "object": "model", "created": 0, "owned_by": "prompt-r1"} for name in self.models
            ]
            return respond(writer, 200, {"object": "list", "data": models})
        if request != "POST /v1/chat/completions":
            return respond(writer, 404, error(f"there is no {request}"))
        status, reply = await self._complete(body)
        if self.latency:
            await asyncio.sleep(self.latency * math.exp(self.rng.gauss(0, LATENCY_SIGMA)))
        if status == 200 and self.rng.random() < self.fail:
            return await self._fail(reader, writer, self.rng.choice(self.faults), headers, reply)
        if status == 200:
            self._count_reply(reply)
        respond(writer, status, reply)

    def _count_reply(self, reply: object) -> None:
        self.counts["replies"] += 1
        if isinstance(reply, dict):  # not a stream
            self.counts.update(reply["usage"])

    async def _complete(self, body: bytes) -> tuple[int, object]:
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
        usage = {"prompt_tokens": sent, "completion_tokens": said, "total_tokens": sent + said}
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        if request.get("stream"):
            options = request.get("stream_options") or {}
            return 200, stream_of(head, text, usage if options.get("include_usage") else None)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return 200, {**head, "object": "chat.completion", "choices": [choice], "usage": usage}

    async def _fail(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        fault: str,
        headers: Mapping[str, str],
        reply: object,
    ) -> None:
        self.counts[fault] += 1
        if fault in REPLYING:
            self._count_reply(reply)
        echo = f"request failed: Authorization: {headers.get('authorization', 'none')}"
        match fault:
            case "500":
                respond(writer, 500, error(echo))
            case "429":
                respond(writer, 429, error(echo), "Retry-After: 0.2")
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
                respond(writer, 200, f"<html>{echo}</html>")
            case "duplicate":
                writer.write(2 * response_of(200, reply))
            case "stall":
                response = response_of(200, reply)
                writer.write(response[: len(response) // 2])
                await writer.drain()
                await asyncio.sleep(STALL)
                writer.write(response[len(response) // 2 :])
            case "types":
                respond(writer, 200, json.dumps(self.rng.choice(WRONG_TYPES)))
            case "usage":
                odd = {"usage": self.rng.choice(WRONG_USAGE)}
                respond(writer, 200, {**reply, **odd} if isinstance(reply, dict) else reply)


def respond(writer: asyncio.StreamWriter, status: int, body: object, *headers: str) -> None:
    """Write a complete response."""
    writer.write(response_of(status, body, *headers))


def response_of(status: int, body: object, *headers: str) -> bytes:
    """A complete response. A body that is not a string is sent as JSON."""
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    kind = "text/event-stream" if content.startswith(b"data: ") else "application/json"
    lines = [f"HTTP/1.1 {status} -", f"Content-Type: {kind}", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + content


def text_of(content: str | list[Mapping[str, str]]) -> str:
    """The text of a message's content: a string, or a list of text parts. Raises TypeError or KeyError."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def stream_of(head: Mapping[str, object], text: str, usage: object) -> str:
    """A reply as server-sent events, a word in each, and at last the usage if there is any."""
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in re.findall(r"\s*\S+|\s+$", text)]
    chunks: list[dict[str, object]] = [{"choices": [_choice(delta)]} for delta in deltas]
    chunks.append({"choices": [{**_choice({}), "finish_reason": "stop"}]})
    if usage is not None:
        chunks.append({"choices": [], "usage": usage})
    lines = [json.dumps({**head, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])


def _choice(delta: Mapping[str, str]) -> dict[str, object]:
    return {"index": 0, "delta": delta, "finish_reason": None}


def error(message: str, *, code: str = "") -> dict[str, object]:
    """An error object in OpenAI's form."""
    return {"error": {"message": message, "code": code or None}}


async def serve(port: int, server: MiniServer) -> None:
    """Serve until the program is stopped."""
    await server.start(port)
    print(f"the mini world at {server.base_url}", flush=True)
    await asyncio.Event().wait()


def _number(kind: type[float], low: float, high: float) -> Callable[[str], float]:
    """A type of argparse: numbers from `low` to `high`."""

    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low:g} to {high:g}")
        return value

    return number


def main() -> None:
    """Start the server from a command line."""
    parser = argparse.ArgumentParser(
        "python -m prompt_r1.miniworld.serve",
        description=__doc__.split("\n")[0],
        epilog="faults: " + "; ".join(f"{name}: {what}" for name, what in FAULTS.items()),
    )
    parser.add_argument(
        "--port", type=_number(int, 0, 65535), default=8100, help="port; 0: any free one (8100)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the world (0)")
    parser.add_argument(
        "--fail", type=_number(float, 0, 1), default=0.0, help="share of requests that get a fault (0)"
    )
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=FAULTS,
        metavar="NAME",
        default=DEFAULT_FAULTS,
        help=f"the faults to choose from, listed below ({' '.join(DEFAULT_FAULTS)})",
    )
    parser.add_argument(
        "--latency",
        type=_number(float, 0, LONGEST_HANG),
        default=0.0,
        help="median seconds of a reply; log-normal, with a heavy tail (0)",
    )
    parser.add_argument("--key", default="", help="the only accepted API key (default: no key is needed)")
    given = parser.parse_args()
    server = MiniServer(
        seed=given.seed,
        fail=given.fail,
        faults=given.faults,
        latency=given.latency,
        key=given.key,
        rng=random.Random(),
    )
    try:
        asyncio.run(serve(given.port, server))
    except KeyboardInterrupt:
        pass
    except OSError as caught:
        parser.error(f"cannot listen on port {given.port}: {caught.strerror}")


if __name__ == "__main__":
    main()
