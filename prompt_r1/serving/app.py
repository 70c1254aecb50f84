"""The pair behind OpenAI's chat-completions protocol: a starlette application.

    POST /v1/chat/completions    a question; with `stream` as server-sent events
    GET  /v1/models, /health     the pair, and whether the server runs
    GET  /                       a page to talk to the pair

All sessions share the batch of the agent's engine. The games run in the server's event loop; a game whose
client has gone is cancelled.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
import reprlib
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from prompt_r1.agent.agent import Agent
from prompt_r1.api.asking import Answer, Piece, ask_pair, raise_for_error
from prompt_r1.environments.pool import Pool
from prompt_r1.playing import Limits, PlaySettings
from prompt_r1.report.page import THEME
from prompt_r1.serving.chat_request import MOST_BYTES, BadRequest, ChatRequest, read_request
from prompt_r1.serving.chat_response import END_OF_STREAM, DialogueText, Envelope, Failure, event, failure_of

logger = logging.getLogger(__name__)

PAGE = (Path(__file__).parent / "chat.html").read_text("utf-8").replace("%THEME%", THEME)
BODY_SECONDS = 30.0  # for the body of a request to come
KEEP_ALIVE_SECONDS = 15.0  # between comments in a stream that has nothing to send
FULL = Failure(
    429, "server_full", "all sessions of the server are in use", "server_full", headers={"Retry-After": "1"}
)
WRONG_KEY = Failure(
    401, "authentication_error", "the request needs the server's key", "invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)  # fmt: skip


def make_app(server: "ChatServer", *, hosts: tuple[str, ...]) -> Starlette:
    """The application, which answers requests for these `hosts` ("*": for any)."""
    routes = [
        Route("/v1/chat/completions", server.complete, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/health", server.health),
        Route("/", page),
    ]
    guard = Middleware(KnownHosts, hosts=hosts)
    errors = (BadRequest, HTTPException, ClientDisconnect, Exception)
    return Starlette(routes=routes, middleware=[guard], exception_handlers=dict.fromkeys(errors, _refuse))


class KnownHosts:
    """Refuses requests for other hosts: no page can rebind its name to this server."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("host", "")
        name = re.sub(r":\d*$", "", given).strip("[]").lower()  # without the port; IPv6 stands in brackets
        if "*" in self._hosts or name in self._hosts:
            return await self._app(scope, receive, send)
        message = f"this server is not {reprlib.repr(given)}: ask it by its own name"
        await _respond(Failure(400, "invalid_request_error", message))(scope, receive, send)


async def page(request: Request) -> Response:
    """The chat page, which may load nothing and run only its own script."""
    script = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


@dataclass
class ChatServer:
    """Admits requests, plays their games with one pair, and writes the responses."""

    agent: Agent
    environment: Pool
    model_name: str
    temperature: float
    limits: Limits  # of each question
    max_sessions: int
    system: str = "environment"  # who gets system messages: environment, agent, refuse
    history: str = "join"  # what becomes of earlier messages: join, last
    key: str = ""  # that requests must have; "": none
    sessions: int = 0  # games that run

    async def health(self, request: Request) -> Response:
        """Whether the server runs; needs no key."""
        return _json({"status": "ok", "sessions": self.sessions, "max_sessions": self.max_sessions})

    async def models(self, request: Request) -> Response:
        """The list of models: the pair."""
        if not self._has_key(request):
            return _respond(WRONG_KEY)
        return _json({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        """The pair, by its name."""
        if not self._has_key(request):
            return _respond(WRONG_KEY)
        name = request.path_params["name"]
        return _json(self._described()) if name == self.model_name else self._no_model(name)

    def _described(self) -> dict[str, object]:
        return {"id": self.model_name, "object": "model", "created": 0, "owned_by": "prompt-r1"}

    def _no_model(self, name: str) -> Response:
        message = f"there is no model {reprlib.repr(name)}; this server has {self.model_name!r}"
        return _respond(Failure(404, "invalid_request_error", message, "model_not_found", "model"))

    async def complete(self, request: Request) -> Response:
        """Answer a question."""
        if not self._has_key(request):
            return _respond(WRONG_KEY)
        content = await _body(request)
        asked = read_request(content, self.limits, system=self.system, history=self.history)
        if asked.model != self.model_name:
            return self._no_model(asked.model)
        if self.sessions >= self.max_sessions:
            return _respond(FULL)
        envelope = Envelope(f"chatcmpl-{uuid.uuid4().hex}", asked.model, int(time.time()), asked.system_to)
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        game = self._start(asked, pieces)
        if asked.stream:
            return GameStream(game, self._events(game, pieces, envelope, asked))
        if not await _is_awaited(game, request):
            raise ClientDisconnect
        try:
            answer = await game
        except Exception as error:
            return _respond(_failure(error))
        dialogue = "".join(map(DialogueText().add, iter(pieces.get_nowait, None)))
        return _json(envelope.completion(answer, dialogue if asked.include_reasoning else None))

    def _start(self, asked: ChatRequest, pieces: "asyncio.Queue[Piece | None]") -> asyncio.Task[Answer]:
        """Play the game of a request in a task; `pieces` gets the dialogue if wanted, and None at its end."""
        self.sessions += 1
        game = asyncio.create_task(self._play(asked, pieces))

        def ended(_: object) -> None:
            self.sessions -= 1
            pieces.put_nowait(None)

        game.add_done_callback(ended)
        return game

    async def _play(self, asked: ChatRequest, pieces: "asyncio.Queue[Piece | None]") -> Answer:
        temperature = self.temperature if asked.temperature is None else asked.temperature
        answer = await ask_pair(
            self.agent,
            self.environment,
            asked.question,
            PlaySettings(temperature, limits=asked.limits, system=asked.system),
            seed=asked.seed,
            on_piece=pieces.put_nowait if asked.include_reasoning else None,
        )
        text = raise_for_error(answer).text
        if text is not None:
            text = text[: min((text.find(stop) for stop in asked.stop if stop in text), default=None)]
        return replace(answer, text=text)

    async def _events(
        self,
        game: asyncio.Task[Answer],
        pieces: "asyncio.Queue[Piece | None]",
        envelope: Envelope,
        asked: ChatRequest,
    ) -> AsyncIterator[bytes]:
        """The stream of a game. Its status has been sent when the game fails, so an error is an event."""
        try:
            yield event(envelope.chunk({"role": "assistant", "content": ""}))
            dialogue = DialogueText()
            while True:
                try:
                    piece = await asyncio.wait_for(pieces.get(), KEEP_ALIVE_SECONDS)
                except TimeoutError:
                    yield b": still playing\n\n"
                    continue
                if piece is None:
                    break
                delta = {"reasoning_content": dialogue.add(piece)}
                yield event(envelope.chunk(delta | {"prompt_r1": {"kind": piece.kind, "text": piece.text}}))
            for chunk in envelope.last_chunks(await game, include_usage=asked.include_usage):
                yield event(chunk)
            yield END_OF_STREAM
        except Exception as error:
            yield event(_failure(error).body)

    def _has_key(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        return not self.key or hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode())


class GameStream(StreamingResponse):
    """The events of a game, which ends with this response.

    A client may leave before the first event is requested: then the iterator of events never runs.
    """

    def __init__(self, game: asyncio.Task[Answer], events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._game = game

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._game.cancel()


async def _body(request: Request) -> bytes:
    """The body of a request, which comes in time. Raises BadRequest if it is too long, has two lengths or is
    not declared as JSON.

    A web page of another site can send other types than JSON without asking the browser.
    """
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        raise BadRequest("the request has both Content-Length and Transfer-Encoding: send one of them")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("the request needs the header Content-Type: application/json")
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > MOST_BYTES:
                    raise BadRequest(f"the body has more than {MOST_BYTES:,} bytes")
    except TimeoutError:
        raise BadRequest(f"the body did not come within {BODY_SECONDS:g} s") from None
    return bytes(content)


async def _is_awaited(game: asyncio.Task[Answer], request: Request) -> bool:
    """Wait until the game has ended. If the client disconnects before, cancel it and return False."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    disconnect = asyncio.create_task(gone())
    try:
        await asyncio.wait([game, disconnect], return_when=asyncio.FIRST_COMPLETED)
        return game.done()
    finally:
        disconnect.cancel()
        game.cancel()  # has no effect on one that is done


def _failure(error: Exception) -> Failure:
    failure = failure_of(error)
    if failure.status == 500:
        logger.error("a question ended with an internal error", exc_info=error)
    return failure


async def _refuse(request: Request, error: Exception) -> Response:
    """The response to an error before a game. If the client has gone, nobody reads it."""
    if not isinstance(error, HTTPException):
        return _respond(failure_of(error))
    message = f"{error.detail}: {request.method} {reprlib.repr(request.url.path)}"
    return _respond(Failure(error.status_code, "invalid_request_error", message, headers=error.headers))


def _respond(failure: Failure) -> Response:
    return _json(failure.body, failure.status, failure.headers)


def _json(
    body: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A body in ASCII: texts in it may hold lone surrogates, which have no UTF-8."""
    return Response(json.dumps(body), status, headers, "application/json")
