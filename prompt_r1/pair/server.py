"""The pair behind OpenAI's chat completions, for unmodified clients: a starlette application on uvicorn.

    POST /v1/chat/completions    a question; with `stream`, also the dialogue while it is played
    GET  /v1/models, /v1/models/NAME    the pair
    GET  /health                 whether the server runs, and how many questions it plays

A request takes these steps: `ChatServer.answer` → `read_request` → `OpenPair.play` → `play_question` →
`rollout.play`; then `completion` or `chunk` writes the game. All games run in the server's event loop and
share the batch of the agent's engine. A game whose client has gone is cancelled. Each request is logged as
one line; only a bug of ours logs a traceback.
"""

import asyncio
import hmac
import json
import logging
import reprlib
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.errors import EnvError, FatalEnvError, QuestionTooLong, Resumable, UsageError
from prompt_r1.pair.dialogue import LABELS, Piece
from prompt_r1.pair.playing import LimitReached, Limits, OpenPair, raise_for_env_error
from prompt_r1.programs.files import is_finite_number, json_object
from prompt_r1.programs.keys import without_keys
from prompt_r1.programs.text import printable, printable_line
from prompt_r1.types import Trajectory

logger = logging.getLogger(__name__)

Body = dict[str, object]
PieceQueue = asyncio.Queue[Piece | None]  # the dialogue of a game; None ends it
T = TypeVar("T")

# The longest body of a request: more text than any game has room for.
MOST_BYTES = 2_000_000
# The head of a request must arrive within this time, and so must its body.
ARRIVAL_SECONDS = 30.0
# Besides one connection for each session, the server has this many for requests that are still arriving, and
# for clients that keep their connection open.
SPARE_CONNECTIONS = 64
# While a game is played, the server looks this often whether the client is still there.
DISCONNECT_CHECK_SECONDS = 0.2
# The status for a client that has disconnected, as in nginx's log. Nobody receives it.
GONE = 499
# The log has at most this many characters of an error, and of a path.
LONGEST_NOTE = 500
LONGEST_PATH = 100

# After these errors a client should not send the request again, as OpenAI's client does by itself.
FINAL = ("time_limit", "budget_exhausted", "environment_unusable", "internal_error")
# These fields ask for a kind of answer that the pair cannot give, unless they are empty or have this value.
UNSUPPORTED = {
    "tools": None,
    "functions": None,
    "logprobs": None,
    "audio": None,
    "stop": None,
    "response_format": {"type": "text"},
    "n": 1,
}
# A client that lists tools may forbid their use by "none" in this field. Then the list is ignored.
FORBIDDEN_BY = {"tools": "tool_choice", "functions": "function_call"}
SYSTEM_ROLES = ("system", "developer")


class Failure(Exception):
    """A request that gets no answer, and the response that says why."""

    def __init__(self, status: int, type: str, message: str, *, code: str = "", field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.body: Body = {
            "error": {"message": message, "type": type, "code": code or None, "param": field or None}
        }
        self.headers: dict[str, str] = {}
        if type in FINAL:
            self.headers["x-should-retry"] = "false"
        if status in (408, 413):
            # On an open connection, the rest of the body would be read as the next request.
            self.headers["connection"] = "close"


def bad_request(message: str, field: str = "", *, code: str = "") -> Failure:
    """The failure of a malformed request. `message` is one sentence; `field` is the field that is wrong."""
    return Failure(400, "invalid_request_error", message, code=code, field=field)


def failure_of(error: BaseException) -> Failure:
    """The response to an error: what the client did wrong, which limit was reached, or who failed."""
    message = without_keys(str(error))
    match error:
        case Failure():
            return error
        case HTTPException():
            return Failure(error.status_code, "invalid_request_error", error.detail)
        case QuestionTooLong():
            return bad_request(message, "messages", code="context_length_exceeded")
        case LimitReached(limit="seconds"):
            return Failure(504, "time_limit", message)
        case LimitReached() | OutOfBudget():
            return Failure(402, "budget_exhausted", message)
        case EnvError() | Resumable():
            return Failure(502, "environment_error", message)
        case FatalEnvError() | UsageError():
            return Failure(502, "environment_unusable", message)
    text = "".join(traceback.format_exception(error))
    logger.error("a request ended with an internal error\n%s", printable(without_keys(text)))
    return Failure(500, "internal_error", "an internal error; the server's log has the traceback")


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks for. If temperature or seed is None, the pair's own is used."""

    model: str
    question: str
    stream: bool
    temperature: float | None
    seed: int | None


def read_request(content: bytes) -> ChatRequest:
    """Read the body of a request. Raises Failure. Fields that we do not know are ignored."""
    given = json_object(content)
    if not given:
        raise bad_request("the body is not a JSON object with fields")
    for name, usual in UNSUPPORTED.items():
        is_asked_for = given.get(name) and given[name] != usual
        is_forbidden = given.get(FORBIDDEN_BY.get(name, "")) == "none"
        if is_asked_for and not is_forbidden:
            raise bad_request(f"`{name}` is not supported: the pair answers one question with text", name)
    temperature = given.get("temperature")
    if temperature is not None and not (is_finite_number(temperature) and temperature >= 0):
        raise bad_request("`temperature` must be a number, and at least 0", "temperature")
    seed = _field(given, "seed", 0)
    return ChatRequest(
        model=_field(given, "model", ""),
        question=_question(_field(given, "messages", [])),
        stream=_field(given, "stream", False),
        temperature=temperature,
        seed=seed if given.get("seed") is not None else None,
    )


def _field(given: Mapping[str, Any], name: str, default: T) -> T:
    """The value of a field, or the default if it is absent or null. Raises Failure for another type."""
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not type(default):
        raise bad_request(f"`{name}` must be of type {type(default).__name__}", name)
    return value


def _question(messages: list[Any]) -> str:
    """The user's last message. System messages and earlier turns stand before it, as text."""
    try:
        sent = [(message["role"], _text(message.get("content") or "")) for message in messages]
    except (TypeError, KeyError, AttributeError):
        raise bad_request("each of `messages` must have a role and content of text", "messages") from None
    role, question = sent[-1] if sent else ("", "")
    question = question.strip()
    if role != "user" or not question:
        raise bad_request("the last of `messages` must be a question of the user", "messages")
    system = [text for role, text in sent[:-1] if role in SYSTEM_ROLES and text.strip()]
    earlier = [f"{role}: {text}" for role, text in sent[:-1] if role not in SYSTEM_ROLES]
    if earlier:
        question = "\n".join(["Earlier messages:", *earlier, "", f"The question now: {question}"])
    return "\n\n".join([*system, question])


def _text(content: Any) -> str:
    """The text of a message's content: a string, or a list of parts with text."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in content)


def completion(head: Body, game: Trajectory) -> Body:
    """A response that is not streamed. `head` has its id, its time and its model."""
    message = {"role": "assistant", **said(game)}
    choice = {"index": 0, "message": message, "finish_reason": ending(game)}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage(game)}


def chunk(head: Body, delta: Mapping[str, object], finish: str | None = None) -> Body:
    """A part of a response that is streamed."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def dialogue_text(piece: Piece) -> str:
    """The text that a piece adds to `reasoning_content`. Blocks have labels; the answer is left out."""
    if piece.kind == "answer":
        return ""
    return f"\n{LABELS[piece.kind].capitalize()}: {piece.text}" if piece.begins else piece.text


def said(game: Trajectory) -> Body:
    """The text of the answer, or why there is none."""
    refusal = None if game.answer is not None else f"The agent ended without an answer ({game.stop})."
    return {"content": game.answer or "", "refusal": refusal}


def ending(game: Trajectory) -> str:
    """OpenAI's word for how a game ended: "length" if it ran out of turns or tokens, else "stop"."""
    return "length" if game.stop in ("max_turns", "max_tokens") else "stop"


def usage(game: Trajectory) -> Body:
    """The agent's tokens, each counted once, and in an extra field the calls of the environment."""
    written = sum(game.sampled)
    return {
        "prompt_tokens": len(game.tokens) - written,
        "completion_tokens": written,
        "total_tokens": len(game.tokens),
        "environment": {
            "calls": game.spent.calls,
            "prompt_tokens": game.spent.tokens_in,
            "completion_tokens": game.spent.tokens_out,
            "usd": game.spent.usd,
        },
    }


@dataclass
class ChatServer:
    """Admits requests, plays their games with one pair, and writes the responses."""

    pair: OpenPair
    model_name: str
    limits: Limits  # what one question may cost
    max_sessions: int
    key: str = ""  # the key that requests must have; "": requests need no key
    is_local: bool = True  # whether only this machine reaches the server
    arrival_seconds: float = ARRIVAL_SECONDS
    sessions: int = 0  # the number of games that run

    def app(self) -> ASGIApp:
        """The application, which logs each request."""
        routes = [
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
        ]
        handlers = {Failure: _fail, HTTPException: _fail}
        return RequestLog(Starlette(routes=routes, exception_handlers=handlers))

    async def health(self, request: Request) -> Response:
        """Say that the server runs. The request needs no key."""
        self._check_host(request)
        return _json({"status": "ok", "sessions": self.sessions, "max_sessions": self.max_sessions})

    async def models(self, request: Request) -> Response:
        """List the models. The pair is the only one."""
        self._check_host(request)
        self._check_key(request)
        return _json({"object": "list", "data": [self._about()]})

    async def model(self, request: Request) -> Response:
        """Describe the pair to a client that knows its name."""
        self._check_host(request)
        self._check_key(request)
        self._check_model(request.path_params["name"])
        return _json(self._about())

    async def answer(self, request: Request) -> Response:
        """Answer a question, or say in the response why there is no answer."""
        try:
            self._check_host(request)
            self._check_key(request)
            _check_content_type(request)
            asked = read_request(await _read_body(request, self.arrival_seconds))
            self._check_model(asked.model)
            pieces = PieceQueue()
            game = self._start(asked, pieces)
            head: Body = {
                "id": f"chatcmpl-{uuid.uuid4().hex}",
                "created": int(time.time()),
                "model": self.model_name,
            }
            if asked.stream:
                return GameStream(request, game, pieces, head)
            return await _whole(request, game, head)
        except Exception as error:
            # It is caught here, because starlette would pass it on to uvicorn, which logs a traceback.
            return _fail(request, error)

    def _start(self, asked: ChatRequest, pieces: PieceQueue) -> asyncio.Task[Trajectory]:
        """Start the game of a request; `pieces` gets the dialogue if it is streamed. Raises Failure."""
        if self.sessions >= self.max_sessions:
            raise Failure(429, "server_full", "all sessions of the server are in use", code="server_full")
        playing = self.pair.play(
            asked.question,
            limits=self.limits,
            seed=asked.seed,
            temperature=asked.temperature,
            on_piece=pieces.put_nowait if asked.stream else None,
        )
        self.sessions += 1
        game = asyncio.create_task(playing)
        game.add_done_callback(partial(self._end, pieces))
        return game

    def _end(self, pieces: PieceQueue, game: asyncio.Task[Trajectory]) -> None:
        self.sessions -= 1
        pieces.put_nowait(None)
        if not game.cancelled():
            game.exception()  # asyncio logs an error that nobody has looked at, as when the client has left.

    def _about(self) -> Body:
        return {"id": self.model_name, "object": "model", "created": 0, "owned_by": "prompt-r1"}

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            message = f"there is no model {reprlib.repr(name)}; this server has {self.model_name!r}"
            raise Failure(404, "invalid_request_error", message, code="model_not_found", field="model")

    def _check_host(self, request: Request) -> None:
        """Raise Failure if a local server is asked under a name (Host header) that is not this machine's.

        A web page on another site could point its own name to this machine, and then ask without a key.
        """
        if self.is_local and not _is_this_machine(request.headers.get("host", "")):
            raise bad_request("the Host header must be localhost or a loopback address")

    def _check_key(self, request: Request) -> None:
        """Raise Failure for a wrong key."""
        given = request.headers.get("authorization", "").encode("latin-1")
        expected = f"Bearer {self.key}".encode()
        if self.key and not hmac.compare_digest(given, expected):
            message = "the request needs the server's key"
            raise Failure(401, "authentication_error", message, code="invalid_api_key")


def _is_this_machine(host: str) -> bool:
    """Whether a Host header, such as "[::1]:8000", names localhost or a loopback address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _check_content_type(request: Request) -> None:
    """Raise Failure for anything but JSON.

    For a page of another site, browsers send other types without first asking the server whether they may.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise bad_request("the request needs the header Content-Type: application/json")


async def _read_body(request: Request, seconds: float) -> bytes:
    """The body of a request. Raises Failure for a body that is too long or does not arrive in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    message = f"the body has more than {MOST_BYTES:,} bytes"
                    raise Failure(413, "invalid_request_error", message)
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} s"
        raise Failure(408, "invalid_request_error", message) from None
    return bytes(body)


async def _whole(request: Request, game: asyncio.Task[Trajectory], head: Body) -> Response:
    """The response to a request that is not streamed, when its game has ended."""
    try:
        while not game.done():
            await asyncio.wait([game], timeout=DISCONNECT_CHECK_SECONDS)
            if not game.done() and await request.is_disconnected():
                return Response(status_code=GONE)
        played = game.result()
        raise_for_env_error(played)
        _note(request, f"{played.stop}, {played.spent}")
        return _json(completion(head, played))
    finally:
        game.cancel()  # has no effect on a game that has ended


class GameStream(StreamingResponse):
    """A response with the events of a game. When the response ends, so does the game."""

    def __init__(
        self, request: Request, game: asyncio.Task[Trajectory], pieces: PieceQueue, head: Body
    ) -> None:
        events = _events(request, game, pieces, head)
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._request = request
        self._game = game

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # This is not done in the iterator of events: it never runs if the client leaves before the first.
            if not self._game.done():
                _note(self._request, "the client has left")
            self._game.cancel()


async def _events(
    request: Request, game: asyncio.Task[Trajectory], pieces: PieceQueue, head: Body
) -> AsyncIterator[bytes]:
    """The events of a game. If the game fails, the status has already been sent, so the error is an event."""
    try:
        yield _event(chunk(head, {"role": "assistant", "content": ""}))
        while (piece := await pieces.get()) is not None:
            if text := dialogue_text(piece):
                yield _event(chunk(head, {"reasoning_content": text}))
        played = await game
        raise_for_env_error(played)
        _note(request, f"{played.stop}, {played.spent}")
        yield _event({**chunk(head, said(played), ending(played)), "usage": usage(played)})
        yield b"data: [DONE]\n\n"
    except Exception as error:
        failure = failure_of(error)
        _note(request, f"{failure.type}: {failure}")
        yield _event(failure.body)


def _event(body: Body) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _json(body: Body, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a body in ASCII, because its texts may hold lone surrogates, which have no UTF-8."""
    return Response(json.dumps(body), status, headers, "application/json")


def _fail(request: Request, error: Exception) -> Response:
    """The response to an error."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    failure = failure_of(error)
    _note(request, f"{failure.type}: {failure}")
    return _json(failure.body, failure.status, failure.headers)


def _note(request: Request, text: str) -> None:
    """Say in the log how a request ended."""
    request.state.note = without_keys(text)[:LONGEST_NOTE]


class RequestLog:
    """Logs each request as one line: client, method, path, status, seconds, and how its game ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            client = scope["client"][0] if scope.get("client") else "-"
            path = without_keys(scope["path"])[:LONGEST_PATH]
            seconds = time.perf_counter() - begin
            line = f"{client} {scope['method']} {path} {status} {seconds:.2f} s"
            if "note" in state:
                line = f"{line}: {state['note']}"
            logger.info(printable_line(line))


class Connection(H11Protocol):
    """A connection that is closed if no request arrives in time, or if there are too many connections.

    Without this, uvicorn waits forever for the rest of a request's head.
    """

    def __init__(self, *, arrival_seconds: float, most_connections: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._arrival_seconds = arrival_seconds
        self._most_connections = most_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most_connections:
            transport.close()
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def _await_request(self) -> None:
        self.loop.call_later(self._arrival_seconds, self._close_if_none_arrived, self.cycle)

    def _close_if_none_arrived(self, last: RequestResponseCycle | None) -> None:
        """Close the connection if no request has arrived after the `last` one."""
        if self.cycle is last:
            self.transport.close()


def uvicorn_server(chat: ChatServer) -> uvicorn.Server:
    """Make the HTTP server of a pair. At its end, the server waits for the games that run."""
    connection = partial(
        Connection,
        arrival_seconds=chat.arrival_seconds,
        most_connections=chat.max_sessions + SPARE_CONNECTIONS,
    )
    settings = uvicorn.Config(
        chat.app(),
        http=connection,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(chat.limits.seconds or 0) + 5,
    )
    return uvicorn.Server(settings)
