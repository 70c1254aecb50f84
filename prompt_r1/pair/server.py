"""The pair behind OpenAI's chat completions, for unmodified clients: a starlette application on uvicorn.

    POST /v1/chat/completions    a question; with `stream`, also the dialogue while it is played
    GET  /v1/models, /v1/models/NAME    the pair
    GET  /                       a page to chat with (chat.html)
    GET  /health                 whether the server runs, and how many questions it plays

A request takes these steps: `ChatServer.answer` → `read_request` → `AsyncPair.play` → `play_question` →
`rollout.play`; then `completion` or `chunk` writes the game (chat_format.py). All games run in the server's
event loop and share the batch of the agent's engine. A game whose client has gone is cancelled. Each request
is logged as one line; only a bug of ours logs a traceback.
"""

import asyncio
import hmac
import json
import logging
import reprlib
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prompt_r1.pair.agent import Limits
from prompt_r1.pair.api import AsyncPair, raise_for_env_error
from prompt_r1.pair.chat_format import (
    Body,
    ChatRequest,
    Failure,
    bad_request,
    chunk,
    completion,
    dialogue_text,
    failure_of,
    last_chunk,
    read_request,
)
from prompt_r1.pair.dialogue import OnPiece, Piece
from prompt_r1.programs.text import printable, printable_line, without_keys
from prompt_r1.types import Trajectory

logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("chat.html")
# The page connects to this server only, loads nothing else, and no other page may frame it.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

PieceQueue = asyncio.Queue[Piece | None]  # the dialogue of a game; None ends it

MAX_BYTES = 2_000_000  # the longest body of a request: more text than any game has room for
# This many connections may be open besides one for each session: for requests that are still arriving, and
# for clients that keep their connection. If there are more, requests get status 503.
SPARE_CONNECTIONS = 64
KEEP_ALIVE_SECONDS = 30  # A connection is closed if the next request does not begin within this time.
GONE = 499  # The status for a client that has disconnected, as in nginx's log. Nobody receives it.
MAX_NOTE = 500  # characters of an error in the log
MAX_PATH = 100  # characters of a path in the log


@dataclass(kw_only=True)
class ChatServer:
    """Admits requests, plays their games with one pair, and writes the responses."""

    pair: AsyncPair
    model_name: str
    limits: Limits  # what one question may cost
    max_sessions: int
    key: str  # the key that requests must have; "": requests need no key
    # The hosts that requests may name (Host header). A local server takes only its own names. Otherwise a web
    # page whose domain resolves to 127.0.0.1 (DNS rebinding) could make its reader's browser ask.
    hosts: Sequence[str]
    sessions: int = field(default=0, init=False)  # the number of games that run

    def app(self) -> ASGIApp:
        """The application."""
        routes = [
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/", self.page),
        ]
        handlers = {Failure: _error_response, HTTPException: _error_response}
        app = Starlette(
            routes=routes,
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=self.hosts)],
            exception_handlers=handlers,
            lifespan=self._lifespan,
            max_body_size=MAX_BYTES,
        )
        return EndOfRequests(app)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """After the last request, close the environment and print what its calls have cost.

        uvicorn calls this. After `serve` it would be too late: if a signal stopped uvicorn, uvicorn raises it
        again at the end of `serve`, and this ends the process.
        """
        yield
        await self.pair.environment.close()
        print(f"stopped; spent: {self.pair.environment.budget.spent}", flush=True)

    async def health(self, request: Request) -> Response:
        """Say that the server runs. The request needs no key."""
        return _json({"status": "ok", "sessions": self.sessions, "max_sessions": self.max_sessions})

    async def page(self, request: Request) -> Response:
        """The page to chat with. It needs no key: the page itself asks for the key, and sends it."""
        return FileResponse(PAGE, headers={"Content-Security-Policy": PAGE_POLICY})

    async def models(self, request: Request) -> Response:
        """List the models. The pair is the only one."""
        self._check_key(request)
        return _json({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        """Describe the pair to a client that knows its name."""
        self._check_key(request)
        self._check_model(request.path_params["name"])
        return _json(self._model_object())

    async def answer(self, request: Request) -> Response:
        """Answer a question, or say in the response why there is no answer."""
        try:
            self._check_key(request)
            _check_content_type(request)
            asked = read_request(await request.body())
            self._check_model(asked.model)
            head: Body = {
                "id": f"chatcmpl-{uuid.uuid4().hex}",
                "created": int(time.time()),
                "model": self.model_name,
            }
            if not asked.stream:
                return await _response_of(request, self._start(request, asked), head)
            pieces = PieceQueue()
            playing = self._start(request, asked, on_piece=pieces.put_nowait)
            playing.add_done_callback(lambda _: pieces.put_nowait(None))
            return StreamingResponse(
                _events(request, playing, pieces, head),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-store"},
            )
        except Exception as error:
            # It is caught here, because starlette would pass it on to uvicorn, which logs a traceback.
            return _error_response(request, error)

    def _start(
        self, request: Request, asked: ChatRequest, on_piece: OnPiece | None = None
    ) -> asyncio.Task[Trajectory]:
        """Start the game of a request. Raises Failure if all sessions are in use."""
        if self.sessions >= self.max_sessions:
            raise Failure(429, "server_full", "all sessions of the server are in use", code="server_full")
        game = self.pair.play(
            asked.question,
            limits=self.limits,
            seed=asked.seed,
            temperature=asked.temperature,
            on_piece=on_piece,
        )
        self.sessions += 1
        playing = asyncio.create_task(game)
        playing.add_done_callback(self._end_session)
        request.state.playing = playing  # `EndOfRequests` cancels the game if the client leaves.
        return playing

    def _end_session(self, playing: asyncio.Task[Trajectory]) -> None:
        self.sessions -= 1
        if not playing.cancelled():
            # If the client has left, nobody else fetches the exception, and asyncio would log that it was
            # "never retrieved".
            playing.exception()

    def _model_object(self) -> Body:
        return {"id": self.model_name, "object": "model", "created": 0, "owned_by": "prompt-r1"}

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            message = f"there is no model {reprlib.repr(name)}; this server has {self.model_name!r}"
            raise Failure(404, "invalid_request_error", message, code="model_not_found", field="model")

    def _check_key(self, request: Request) -> None:
        """Raise Failure for a wrong key."""
        given = request.headers.get("authorization", "").encode("latin-1")
        expected = f"Bearer {self.key}".encode()
        if self.key and not hmac.compare_digest(given, expected):
            message = "the request needs the server's key"
            raise Failure(401, "authentication_error", message, code="invalid_api_key")


def _check_content_type(request: Request) -> None:
    """Raise Failure for anything but JSON.

    When a page of another site sends JSON, the browser asks the server first (CORS preflight). It does not
    ask for other types.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise bad_request("the request needs the header Content-Type: application/json")


async def _response_of(request: Request, playing: asyncio.Task[Trajectory], head: Body) -> Response:
    """The response with the whole game, when it has ended. Raises ClientDisconnect if the client leaves."""
    leaving = asyncio.create_task(_client_left(request))
    try:
        await asyncio.wait([playing, leaving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
    if not playing.done():
        raise ClientDisconnect
    return _json(completion(head, await _ended_game(request, playing)))


async def _client_left(request: Request) -> None:
    """Return when the client has left. The body of the request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    request: Request, playing: asyncio.Task[Trajectory], pieces: PieceQueue, head: Body
) -> AsyncIterator[bytes]:
    """The events of a game. If the game fails, the status has already been sent, so the error is an event.

    If the client leaves, starlette cancels this generator.
    """
    try:
        yield _event(chunk(head, {"role": "assistant", "content": ""}))
        while (piece := await pieces.get()) is not None:
            if text := dialogue_text(piece):
                yield _event(chunk(head, {"reasoning_content": text}))
        yield _event(last_chunk(head, await _ended_game(request, playing)))
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield _event(_noted_failure(request, error).body)


async def _ended_game(request: Request, playing: asyncio.Task[Trajectory]) -> Trajectory:
    """The game when it has ended, which is noted for the log. Raises EnvError if the environment failed."""
    game = await playing
    raise_for_env_error(game)
    request.state.note = f"{game.stop}, {game.spent}"
    return game


def _event(body: Body) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _json(body: Body, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a body in ASCII, because its texts may hold lone surrogates, which have no UTF-8."""
    return Response(json.dumps(body), status, headers, "application/json")


def _error_response(request: Request, error: Exception) -> Response:
    """The response to an error."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    failure = _noted_failure(request, error)
    return _json(failure.body, failure.status, failure.headers)


def _noted_failure(request: Request, error: Exception) -> Failure:
    """Turn an error into a failure, and note it for the log. A bug of ours is logged with its traceback."""
    if isinstance(error, HTTPException):  # starlette's: an unknown path or method
        error = Failure(error.status_code, "invalid_request_error", error.detail)
    failure = failure_of(error)
    if failure.kind == "internal_error":
        text = "".join(traceback.format_exception(error))
        logger.error("a request ended with an internal error\n%s", printable(without_keys(text)))
    request.state.note = f"{failure.kind}: {failure}"
    return failure


class EndOfRequests:
    """Cancels the game of a request that ends before its game does, and logs each request as one line.

    A request ends when its client leaves. The line has client, method, path, status, seconds, and how the
    game ended.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begin = time.perf_counter()
        state = scope.setdefault("state", {})  # starlette's `request.state`
        try:
            await self._app(scope, receive, watch)
        except asyncio.CancelledError:
            # A second Ctrl-C ends the server at once. The error ends here: uvicorn would log its traceback.
            state["note"] = "the server has stopped"
        finally:
            if "playing" in state and not state["playing"].done():
                state["playing"].cancel()
                state.setdefault("note", "the client has left")
            client = scope["client"][0] if scope.get("client") else "-"
            path = without_keys(scope["path"])[:MAX_PATH]
            seconds = time.perf_counter() - begin
            line = f"{client} {scope['method']} {path} {status} {seconds:.2f} s"
            if "note" in state:
                line += f": {without_keys(state['note'])[:MAX_NOTE]}"
            logger.info(printable_line(line))


def uvicorn_server(chat: ChatServer) -> uvicorn.Server:
    """Make the HTTP server of a pair. At its end, the server waits for the games that run."""
    settings = uvicorn.Config(
        chat.app(),
        http="h11",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        limit_concurrency=chat.max_sessions + SPARE_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(chat.limits.seconds or 0) + 5,
    )
    return uvicorn.Server(settings)
