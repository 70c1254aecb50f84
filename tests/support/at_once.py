"""Coroutines that run at the same time, in an event loop of their own."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(
    work: Iterable[Coroutine[Any, Any, T]], *, seconds: float | None = 60, **options: bool
) -> list[T]:
    """The results in the order of `work`; TimeoutError if some wait for each other. `options`: gather's."""

    async def gathered() -> list[T]:
        async with asyncio.timeout(seconds):
            return await asyncio.gather(*work, **options)

    return asyncio.run(gathered())
