"""Runs of training and evaluation through the mini world's endpoint."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from prompt_r1.miniworld.serve import MiniServer

T = TypeVar("T")
# Options of a short training.
GAMES = [
    *(
        "--questions",
        "4",
        "--group-size",
        "4",
        "--mini-batch",
        "16",
        "--max-new",
        "64",
        "--max-tokens",
        "900",
    ),
    *("--max-turns", "3", "--val-limit", "2", "--val-every", "9", "--lr", "1e-4"),
]


def with_server(work: Coroutine[None, None, T], server: MiniServer) -> T:
    """Run `work` while the server listens."""

    async def both() -> T:
        await server.start()
        try:
            return await work
        finally:
            await server.stop()

    return asyncio.run(both())
