"""A server of a pair in a thread of the test process."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from prompt_r1.environments.environment import Environment
from prompt_r1.pair.agent import Agent
from prompt_r1.pair.api import AsyncPair, Limits
from prompt_r1.pair.server import ChatServer, uvicorn_server
from tests.support.echo_agent import EchoAgent, Shouting
from tests.support.providers import environment_of


def echo_pair(
    agent: EchoAgent | None = None,
    environment: Environment | None = None,
    *,
    seed: int = 0,
    temperature: float = 0.0,
) -> AsyncPair:
    """An echoing agent with a shouting environment, unless others are given."""
    return AsyncPair(
        agent=cast(Agent, agent or EchoAgent()),
        environment=environment or environment_of(Shouting()),
        seed=seed,
        temperature=temperature,
        path="agent",
        about="an echoing agent",
    )


def chat_server(pair: AsyncPair | None = None, *, limits: Limits | None = None, key: str = "") -> ChatServer:
    """A server of an echoing pair, unless another pair is given."""
    return ChatServer(
        pair=pair or echo_pair(),
        model_name="prompt-r1",
        limits=limits or Limits(),
        key=key,
        hosts=["localhost", "127.0.0.1"],
    )


@contextmanager
def serving_pair(chat: ChatServer) -> Iterator[str]:
    """Serve; yields the URL, which ends with /v1."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    server = uvicorn_server(chat)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()
