"""The pair behind OpenAI's chat completions: a starlette application.

    POST /v1/chat/completions    a question; with `stream`, the dialogue too while it is played
    GET  /v1/models, /health     the pair, whether the server runs

All sessions share the batch of the agent's engine. The games run in the server's event loop; a game whose
client has gone is cancelled.
"""

import asyncio
import hmac
import json
import reprlib
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from prompt_r1.pair import wire
from prompt_r1.pair.dialogue import Piece
from prompt_r1.pair.playing import Limits, OpenPair, answered
from prompt_r1.pair.wire import Body, Failure, bad_request
from prompt_r1.types import Trajectory

AWAITED_SECONDS = 0.2  # between looks whether the client is still there
MOST_BYTES = 2_000_000  # of a request: more text than any game has room for
GONE = 499  # nginx's status for a client that has disconnected
Pieces = asyncio.Queue[Piece | None]  # of a dialogue; None ends it


@dataclass
class ChatServer:
    """Admits requests, plays their games with one pair, and writes the responses."""

    pair: OpenPair
    model_name: str
    limits: Limits  # of each question
    max_sessions: int
    key: str = ""  # that requests must have; "": none
    sessions: int = 0  # games that run

    def app(self, *, hosts: Sequence[str]) -> Starlette:
        """The application, which answers requests for these hosts ("*": for any).

        A web page could rebind its name to this server, and send other types than JSON without a preflight.
        """
        routes = [
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
        ]
        errors = (Failure, HTTPException, ClientDisconnect, Exception)
        guard = Middleware(TrustedHostMiddleware, allowed_hosts=hosts)
        handlers = dict.fromkeys(errors, _refuse)
        return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)

    async def health(self, request: Request) -> Response:
        """Whether the server runs; needs no key."""
        return _json({"status": "ok", "sessions": self.sessions, "max_sessions": self.max_sessions})

    async def models(self, request: Request) -> Response:
        """The list of models: the pair."""
        self._check_key(request)
        pair = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "prompt-r1"}
        return _json({"object": "list", "data": [pair]})

    async def answer(self, request: Request) -> Response:
        """Answer a question."""
        self._check_key(request)
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise bad_request("the request needs the header Content-Type: application/json")
        asked = wire.read_request(await _body_of(request))
        if asked.model != self.model_name:
            message = f"there is no model {reprlib.repr(asked.model)}; this server has {self.model_name!r}"
            raise Failure(404, "invalid_request_error", message, code="model_not_found", field="model")
        if self.sessions >= self.max_sessions:
            raise Failure(429, "server_full", "all sessions of the server are in use", code="server_full")
        pieces: Pieces = asyncio.Queue()

        def end(game: asyncio.Task[Trajectory]) -> None:
            self.sessions -= 1
            pieces.put_nowait(None)

        playing = self.pair.play(
            asked.question,
            limits=self.limits,
            seed=asked.seed,
            temperature=asked.temperature,
            on_piece=pieces.put_nowait if asked.stream else None,
        )
        game = asyncio.create_task(playing)
        game.add_done_callback(end)
        self.sessions += 1
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model_name}
        if asked.stream:
            return GameStream(game, _events(game, pieces, head))
        try:
            while not (await asyncio.wait([game], timeout=AWAITED_SECONDS))[0]:
                if await request.is_disconnected():
                    return Response(status_code=GONE)
            return _json(wire.completion(head, answered(game.result())))
        finally:
            game.cancel()  # has no effect on one that is done

    def _check_key(self, request: Request) -> None:
        """Raise Failure for a wrong key."""
        given = request.headers.get("authorization", "")
        if self.key and not hmac.compare_digest(given.encode("latin-1"), f"Bearer {self.key}".encode()):
            message = "the request needs the server's key"
            raise Failure(401, "authentication_error", message, code="invalid_api_key")


async def _body_of(request: Request) -> bytes:
    """The body of a request. Raises Failure for one that is too long, without reading the rest."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise Failure(413, "invalid_request_error", f"the body has more than {MOST_BYTES:,} bytes")
    return bytes(body)


async def _events(game: asyncio.Task[Trajectory], pieces: Pieces, head: Body) -> AsyncIterator[bytes]:
    """The stream of a game. Its status has been sent when the game fails, so an error is an event."""
    try:
        yield _event(wire.chunk(head, {"role": "assistant", "content": ""}))
        while (piece := await pieces.get()) is not None:
            yield _event(wire.chunk(head, {"reasoning_content": wire.dialogue_text(piece)}))
        played = answered(await game)
        last = wire.chunk(head, wire.said(played), wire.ending(played))
        yield _event({**last, "usage": wire.usage(played)})
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield _event(wire.failure_of(error).body)


class GameStream(StreamingResponse):
    """The events of a game, which ends with this response.

    A client may leave before the first event is requested: then the iterator of events never runs.
    """

    def __init__(self, game: asyncio.Task[Trajectory], events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._game = game

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._game.cancel()


async def _refuse(request: Request, error: Exception) -> Response:
    """The response to an error. If the client has gone, nobody reads it."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    failure = wire.failure_of(error)
    return _json(failure.body, failure.status, failure.headers)


def _event(body: Body) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _json(body: Body, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A body in ASCII: texts in it may hold lone surrogates, which have no UTF-8."""
    return Response(json.dumps(body), status, headers, "application/json")
