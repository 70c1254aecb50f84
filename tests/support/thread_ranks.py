"""Ranks that are threads of this process: their collectives of objects go through a common list."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from prompt_r1.model.distributed import Ranks
from tests.support.games import CPU

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ThreadRanks(Ranks):
    """One of these ranks."""

    board: list[object]
    barrier_of_all: threading.Barrier

    def gather(self, item):
        self.board[self.rank] = item
        self.barrier_of_all.wait(timeout=30)
        items = list(self.board)
        self.barrier_of_all.wait(timeout=30)
        return items

    def barrier(self):
        self.barrier_of_all.wait(timeout=30)


def on_each_rank(count: int, work: Callable[[Ranks], T]) -> list[T]:
    """The results of `work` on each of `count` ranks."""
    board, barrier = [None] * count, threading.Barrier(count)
    ranks = [
        ThreadRanks(rank=rank, count=count, device=CPU, board=board, barrier_of_all=barrier)
        for rank in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, ranks))
