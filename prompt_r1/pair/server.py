"""The pair behind OpenAI's chat completions, for unmodified clients: a starlette application on uvicorn.

    POST /v1/chat/completions    a question; with `stream`, also the dialogue while it is played
    GET  /v1/models              the name of the pair
    GET  /                       a page to chat with (chat.html)

A request takes these steps: `ChatServer.answer` → `read_request` (chat_format.py) → `ChatServer.play` →
`AsyncPair.play`; then `completion` or `chunk` writes the game. All games run in the server's event loop and
share the batch of the agent's engine.
"""

import asyncio
import hmac
import json
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from prompt_r1.pair.api import AsyncPair, Limits, raise_for_env_error
from prompt_r1.pair.chat_format import (
    Body,
    ChatRequest,
    Failure,
    bad_request,
    chunk,
    completion,
    dialogue_delta,
    failure_of,
    last_chunk,
    read_request,
)
from prompt_r1.pair.dialogue import OnPiece, Piece
from prompt_r1.programs.text import printable, printable_line, without_keys
from prompt_r1.types import Trajectory

logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("chat.html").read_text("utf-8")
MAX_BYTES = 2_000_000  # the longest body of a request: more text than any game has room for
KEEP_ALIVE_SECONDS = 30  # longer than clients keep an idle connection, so that they are the ones to close it
GONE = 499  # The status for a client that has left, as in nginx's log. Nobody receives it.


@dataclass(kw_only=True)
class ChatServer:
    """Answers requests by games of one pair."""

    pair: AsyncPair
    model_name: str
    limits: Limits  # what one question may cost
    key: str  # the key that requests must have; "": requests need no key
    # The hosts that requests may name (Host header). A local server takes only its own names. Otherwise a web
    # page whose domain resolves to 127.0.0.1 (DNS rebinding) could make its reader's browser ask.
    hosts: Sequence[str]

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/", _page),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=self.hosts)],
            exception_handlers={Failure: _failure_response},
            lifespan=self._lifespan,
            max_body_size=MAX_BYTES,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """After the last request, close the environment and print what its calls have cost.

        uvicorn calls this. After `serve` would be too late: if a signal has stopped uvicorn, `serve` ends by
        raising the signal again, and the signal ends the process.
        """
        yield
        await self.pair.environment.close()
        print(f"stopped; spent: {self.pair.environment.budget.charged}", flush=True)

    async def models(self, request: Request) -> Response:
        """List the models. The pair is the only one."""
        self._check_key(request)
        pair = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "prompt-r1"}
        return JSONResponse({"object": "list", "data": [pair]})

    async def answer(self, request: Request) -> Response:
        """Answer a question. Raises Failure, which says in the response why there is no answer."""
        self._check_key(request)
        _check_content_type(request)
        try:
            asked = read_request(await request.body())
        except ClientDisconnect:
            return Response(status_code=GONE)
        head: Body = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.model_name,
        }
        if asked.stream:
            return StreamingResponse(self._events(asked, head), media_type="text/event-stream")
        playing = asyncio.create_task(self.play(asked))
        # The body has been read, so the next message says that the client has left.
        leaving = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait([playing, leaving], return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                return JSONResponse(completion(head, await playing))
            return Response(status_code=GONE)
        finally:  # `cancel` has no effect on what has ended.
            playing.cancel()
            leaving.cancel()

    async def _events(self, asked: ChatRequest, head: Body) -> AsyncIterator[bytes]:
        """The events of a game. The game begins when the first event is read.

        The status 200 is sent before, so a failure is an event, too. If the client leaves, starlette cancels
        this generator.
        """
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()  # None ends the dialogue.
        playing = asyncio.create_task(self.play(asked, pieces.put_nowait))
        playing.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            yield _event(chunk(head, {"role": "assistant", "content": ""}))
            while (piece := await pieces.get()) is not None:
                if piece.kind != "answer":  # The last event has the answer.
                    yield _event(chunk(head, dialogue_delta(piece)))
            yield _event(last_chunk(head, await playing))
            yield b"data: [DONE]\n\n"
        except Failure as failure:
            yield _event(failure.body)
        finally:
            playing.cancel()

    async def play(self, asked: ChatRequest, on_piece: OnPiece | None = None) -> Trajectory:
        """Play the game of a request, and log in one line how it ended. Raises Failure if it failed.

        A bug of ours is logged with its traceback.
        """
        try:
            game = await self.pair.play(
                asked.question,
                limits=self.limits,
                seed=asked.seed,
                temperature=asked.temperature,
                on_piece=on_piece,
            )
            raise_for_env_error(game)
        except asyncio.CancelledError:
            logger.info("the client has left")
            raise
        except Exception as error:
            failure = failure_of(error)
            logger.info(printable_line(f"{failure.kind}: {failure}"))
            if failure.kind == "internal_error":
                text = "".join(traceback.format_exception(error))
                logger.error(printable(without_keys(text)))
            raise failure from None
        logger.info("%s, %s, %.1f s", game.stop, game.spent, game.seconds)
        return game

    def _check_key(self, request: Request) -> None:
        """Raise Failure for a request without the server's key."""
        given = request.headers.get("authorization", "").encode("latin-1")
        expected = f"Bearer {self.key}".encode()
        if self.key and not hmac.compare_digest(given, expected):
            raise Failure(401, "authentication_error", "the request needs the server's key")


def _check_content_type(request: Request) -> None:
    """Raise Failure for anything but JSON.

    When a page of another site sends JSON, the browser asks the server first (CORS preflight). It does not
    ask for other types.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise bad_request("the request needs the header Content-Type: application/json")


async def _page(request: Request) -> Response:
    """The page to chat with. It needs no key: the page itself asks for the key, and sends it."""
    # No other site may show the page in a frame, and lead its reader to ask there.
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": "frame-ancestors 'none'"})


def _event(body: Body) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _failure_response(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, Failure)
    return JSONResponse(failure.body, failure.status, failure.headers)


def uvicorn_server(chat: ChatServer) -> uvicorn.Server:
    """Make the HTTP server of a pair.

    At its end, the server waits for the games that run. It does not wait longer for a client that stalls.
    """
    settings = uvicorn.Config(
        chat.app(),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(chat.limits.seconds or 0) + 5,
    )
    return uvicorn.Server(settings)
