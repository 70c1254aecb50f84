"""The mini world's endpoint with faults, latencies and a key; runs of training and evaluation through it.

python -m tests.support.mini_server --port 8100 --fail 0.1
"""

import argparse
import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import TypeVar

from prompt_r1.miniworld.serve import COMPLETION, MiniServer, error, response_of, serve

T = TypeVar("T")
# Options of a short training.
GAMES = [
    *"--questions 4 --group-size 4 --mini-batch 16 --max-new 64 --max-tokens 900".split(),
    *"--max-turns 3 --val-limit 2 --val-every 9 --lr 1e-4".split(),
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


class FaultyServer(MiniServer):
    """Fails a share `fail` of the requests with one of `faults`, drawn anew, so that a retry may succeed.

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
        super().__init__(seed=seed)
        self.fail = fail
        self.faults = tuple(faults)
        self.latency = latency
        self.key = key
        self.rng = rng or random.Random(0)
        self.counts: Counter[str] = Counter()
        self.running = 0

    async def respond(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> None:
        self.running += 1
        self.counts["peak"] = max(self.counts["peak"], self.running)
        try:
            await self._respond(reader, writer, request, headers, body)
        finally:
            self.running -= 1

    async def _respond(self, reader, writer, request, headers, body) -> None:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            # Careless on purpose: the message contains the key that the client sent.
            wrong = error(f"wrong key in Authorization: {headers.get('authorization')}")
            writer.write(response_of(401, wrong))
            return
        status, reply = await self.answer(request, body)
        if request == COMPLETION:
            if self.latency:
                await asyncio.sleep(self.latency * math.exp(self.rng.gauss(0, LATENCY_SIGMA)))
            if status == 200 and self.rng.random() < self.fail:
                await self._fail(reader, writer, self.rng.choice(self.faults), headers, reply)
                return
            if status == 200:
                self._count_reply(reply)
        writer.write(response_of(status, reply))

    def _count_reply(self, reply: object) -> None:
        self.counts["replies"] += 1
        if isinstance(reply, dict):  # not a stream
            self.counts.update(reply["usage"])

    async def _fail(self, reader, writer, fault: str, headers: Mapping[str, str], reply: object) -> None:
        self.counts[fault] += 1
        if fault in REPLYING:
            self._count_reply(reply)
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


def with_server(work: Coroutine[None, None, T], server: MiniServer) -> T:
    """Run `work` while the server listens."""

    async def both() -> T:
        await server.start()
        try:
            return await work
        finally:
            await server.stop()

    return asyncio.run(both())


def main() -> None:
    """Serve the mini world with faults, in a process of its own."""
    listed = "; ".join(f"{name}: {what}" for name, what in FAULTS.items())
    parser = argparse.ArgumentParser("python -m tests.support.mini_server", epilog=f"faults: {listed}")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--fail", type=float, default=0.0, help="share of requests that get a fault (0)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, metavar="NAME", default=DEFAULT_FAULTS)
    parser.add_argument("--latency", type=float, default=0.0, help="median seconds of a reply (0)")
    parser.add_argument("--key", default="", help="the only accepted API key")
    given = vars(parser.parse_args())
    asyncio.run(serve(given.pop("port"), FaultyServer(**given, rng=random.Random())))


if __name__ == "__main__":
    main()
