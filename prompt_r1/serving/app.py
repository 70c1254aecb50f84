"""The pair behind OpenAI's protocols: a starlette application.

    POST /v1/chat/completions, /v1/responses    a question; with `stream` as server-sent events
    GET  /v1/models, /health, /metrics          the pair, whether the server runs, what it has done
    GET  /                                      a page to talk to the pair

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
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prompt_r1.agent.agent import Agent
from prompt_r1.api.asking import Answer, Piece, ask_pair, raise_for_error
from prompt_r1.environments.pool import Pool
from prompt_r1.playing import Limits, PlaySettings
from prompt_r1.report.page import THEME
from prompt_r1.serving.failures import BadRequest, Failure, failure_of
from prompt_r1.serving.json_answer import as_json, check_schema
from prompt_r1.serving.request import AskedRequest, read_request
from prompt_r1.serving.response import ChatForm, DialogueText, ResponsesForm, event

logger = logging.getLogger(__name__)

PAGE = (Path(__file__).parent / "chat.html").read_text("utf-8").replace("%THEME%", THEME)
MOST_BYTES = 1_000_000  # of a request
BODY_SECONDS = 30.0  # for the body of a request to come
AWAITED_SECONDS = 0.2  # between looks whether the client is still there
FORMS: dict[str, type[ChatForm | ResponsesForm]] = {
    "/v1/chat/completions": ChatForm, "/v1/responses": ResponsesForm
}  # fmt: skip
GONE = 499  # nginx's status for a client that has disconnected
KEEP_ALIVE_SECONDS = 15.0  # between comments in a stream that has nothing to send


def make_app(server: "ChatServer", *, hosts: tuple[str, ...]) -> ASGIApp:
    """The application, which answers requests for these `hosts` ("*": for any)."""
    routes = [
        *(Route(path, server.answer, methods=["POST"]) for path in FORMS),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/", page),
    ]
    errors = (Failure, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, _refuse))
    return Gate(app, hosts, server.responses)


class Gate:
    """Refuses requests for other hosts, so that no page can rebind its name to this server.

    Each response gets the id of its request, or a new one, and is counted.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], responses: Counter[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._responses = responses  # by status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        number = asked if re.fullmatch(r"[\w.-]{1,64}", asked, re.ASCII) else uuid.uuid4().hex
        scope["state"] = {"id": number}

        async def send_numbered(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = number
                self._responses[str(message["status"])] += 1
            await send(message)

        given = headers.get("host", "")
        name = re.sub(r":\d*$", "", given).strip("[]").lower()  # without the port; IPv6 stands in brackets
        if "*" in self._hosts or name in self._hosts:
            return await self._app(scope, receive, send_numbered)
        refused = BadRequest(f"this server is not {reprlib.repr(given)}: ask it by its own name")
        await _json(refused.body, refused)(scope, receive, send_numbered)


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
    description: str  # of agent and environment
    model_name: str
    temperature: float
    limits: Limits  # of each question
    max_sessions: int
    system: str = "environment"  # who gets system messages: environment, agent, refuse
    history: str = "join"  # what becomes of earlier messages: join, last
    key: str = ""  # that requests must have; "": none
    sessions: int = 0  # games that run
    seconds: float = 0.0  # of games that ended
    games: Counter[str] = field(default_factory=Counter)  # that ended, by stop or type of error
    responses: Counter[str] = field(default_factory=Counter)  # by status

    async def health(self, request: Request) -> Response:
        """Whether the server runs; needs no key."""
        return _json({"status": "ok", "sessions": self.sessions, "max_sessions": self.max_sessions})

    async def metrics(self, request: Request) -> Response:
        """What the server has done."""
        self._check_key(request)
        try:
            from prompt_r1.serving.metrics import ServerMetrics
        except ImportError:
            raise Failure(501, "not_installed", "this needs prometheus-client on the server") from None
        spent = self.environment.budget.spent
        metrics = ServerMetrics(self.responses, self.games, self.seconds, self.sessions, spent)
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """The list of models: the pair."""
        self._check_key(request)
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The pair, by its name."""
        self._check_key(request)
        self._check_model(request.path_params["name"])
        return _json(self._model())

    async def answer(self, request: Request) -> Response:
        """Answer a question, in the form of the path."""
        self._check_key(request)
        asked = read_request(await _body(request))
        self._check_model(asked.model)
        system, question = asked.question(system=self.system, history=self.history)
        check_schema(asked.response_format.json_schema)
        if self.sessions >= self.max_sessions:
            message = "all sessions of the server are in use"
            raise Failure(429, "server_full", message, code="server_full", headers={"Retry-After": "1"})
        form = FORMS[request.scope["path"]](
            request.state.id,
            self.model_name,
            int(time.time()),
            self.system if system else "",
            asked.stream_options.include_usage,
        )
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()  # of the dialogue; None ends it
        self.sessions += 1
        game = asyncio.create_task(self._play(asked, question, system, pieces.put_nowait))
        game.add_done_callback(partial(self._count_ended, pieces, time.perf_counter()))
        if asked.stream:
            return GameStream(game, _events(game, pieces, form))
        try:
            while not (await asyncio.wait([game], timeout=AWAITED_SECONDS))[0]:
                if await request.is_disconnected():
                    return Response(status_code=GONE)
            answer = await game
        except Exception as error:
            raise _failure(error, request.state.id) from None
        finally:
            game.cancel()  # has no effect on one that is done
        played = [piece for _ in range(pieces.qsize()) if (piece := pieces.get_nowait())]
        dialogue = "".join(map(DialogueText().add, played))
        return _json(form.whole(answer, dialogue if asked.include_reasoning else None))

    def _count_ended(
        self, pieces: "asyncio.Queue[Piece | None]", begin: float, game: asyncio.Task[Answer]
    ) -> None:
        self.sessions -= 1
        self.seconds += time.perf_counter() - begin
        if game.cancelled():
            outcome = "cancelled"
        else:
            error = game.exception()
            outcome = failure_of(error).type if error else game.result().stop
        self.games[outcome] += 1
        pieces.put_nowait(None)

    async def _play(
        self, asked: AskedRequest, question: str, system: str, on_piece: Callable[[Piece], object]
    ) -> Answer:
        form, limits = asked.response_format, asked.lower(self.limits)
        wants_json = form.type == "json_schema"
        calls = limits.calls - 1 if wants_json and limits.calls is not None else limits.calls
        how = PlaySettings(
            self.temperature if asked.temperature is None else asked.temperature,
            limits=replace(limits, calls=calls),
            system=system if self.system == "environment" else "",
        )
        seed, listen = str(asked.seed), on_piece if asked.include_reasoning else None
        answer = await ask_pair(self.agent, self.environment, question, how, seed=seed, on_piece=listen)
        text = raise_for_error(answer).text
        if text is None:
            return answer
        cut = min((text.find(stop) for stop in asked.stop if stop in text), default=None)
        answer = replace(answer, text=text[:cut])
        return await as_json(answer, form.json_schema, self.environment, limits) if wants_json else answer

    def _model(self) -> dict[str, object]:
        named = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "prompt-r1"}
        return {**named, "description": self.description}

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self.key and not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
            message, headers = "the request needs the server's key", {"WWW-Authenticate": "Bearer"}
            raise Failure(401, "authentication_error", message, code="invalid_api_key", headers=headers)

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            message = f"there is no model {reprlib.repr(name)}; this server has {self.model_name!r}"
            raise Failure(404, "invalid_request_error", message, code="model_not_found", field="model")


async def _events(
    game: asyncio.Task[Answer], pieces: "asyncio.Queue[Piece | None]", form: ChatForm | ResponsesForm
) -> AsyncIterator[bytes]:
    """The stream of a game. Its status has been sent when the game fails, so an error is an event."""
    try:
        yield event(form.first())
        while True:
            try:
                piece = await asyncio.wait_for(pieces.get(), KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield b": still playing\n\n"
                continue
            if piece is None:
                break
            yield event(form.piece(piece))
        for body in form.last(await game):
            yield event(body)
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield event(form.failed(_failure(error, form.request_id)))


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


def _failure(error: Exception, id: str) -> Failure:
    failure = failure_of(error)
    if failure.status == 500:
        logger.error("request %s ended with an internal error", id, exc_info=error)
    return failure


async def _refuse(request: Request, error: Exception) -> Response:
    """The response to an error. If the client has gone, nobody reads it."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    failure = failure_of(error)
    if isinstance(error, HTTPException):
        message = f"{error.detail}: {request.method} {reprlib.repr(request.url.path)}"
        failure = Failure(error.status_code, "invalid_request_error", message, headers=error.headers)
    return _json(failure.body, failure)


def _json(body: Mapping[str, object], failure: Failure | None = None) -> Response:
    """A body in ASCII: texts in it may hold lone surrogates, which have no UTF-8."""
    status, headers = (failure.status, failure.headers) if failure else (200, None)
    return Response(json.dumps(body), status, headers, "application/json")
