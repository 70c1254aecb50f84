"""The mini environment as an OpenAI-compatible endpoint.

    python -m prompt_r1.miniworld.serve --port 8100 --seed 0
    python train.py --env mini@http://127.0.0.1:8100/v1

Plain asyncio. The replies are as deterministic as the mini environment's.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Mapping

from prompt_r1.cli.command_line import Parser, run_program
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.world import make_world
from prompt_r1.types import Message

COMPLETION = "POST /v1/chat/completions"


class MiniServer:
    """Serves the models `mini` and `mini-b` of the world of `seed`."""

    def __init__(self, *, seed: int = 0) -> None:
        world = make_world(seed)
        self.models = {
            "mini": MiniEnvironment(world, "A", seed=seed),
            "mini-b": MiniEnvironment(world, "B", seed=seed),
        }
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
                await self.respond(reader, writer, f"{method} {path}", headers, body)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, ValueError):
            pass  # the client has gone, or speaks no HTTP
        finally:
            writer.close()
            self._open.discard(writer)

    async def respond(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> None:
        """Write the response to one request, which is its method and path."""
        writer.write(response_of(*await self.answer(request, body)))

    async def answer(self, request: str, body: bytes) -> tuple[int, object]:
        """The status and the body of a response."""
        if request == COMPLETION:
            return await self.complete(body)
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
        if request.get("stream"):
            return 400, error("the mini world streams no replies")
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


async def serve(port: int, server: MiniServer) -> None:
    """Serve until the program is stopped."""
    await server.start(port)
    print(f"the mini world at {server.base_url}", flush=True)
    await asyncio.Event().wait()


def main(arguments: list[str]) -> None:
    """Start the server from a command line."""
    about = "Serve the mini world's environment as an OpenAI-compatible endpoint."
    parser = Parser("python -m prompt_r1.miniworld.serve", description=about)
    parser.add_argument("--port", type=int, default=8100, help="port; 0: any free one (8100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the world (0)")
    given = parser.parse_args(arguments)
    try:
        asyncio.run(serve(given.port, MiniServer(seed=given.seed)))
    except (OSError, OverflowError) as caught:
        raise UsageError(f"cannot listen on port {given.port}: {caught}") from None


if __name__ == "__main__":
    run_program(main)
