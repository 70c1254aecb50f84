"""Which games get pages and tokens: a pool of a few small pages, and jobs without an engine."""

import asyncio
import random

import pytest

from prompt_r1.engine.kv_cache import CachedGame, PagePool
from prompt_r1.engine.scheduler import Job, Scheduler
from tests.support import tiny


@pytest.fixture
def loop():
    with asyncio.Runner() as runner:
        yield runner.get_loop()


def job_of(game: CachedGame, tokens: list[int], loop: asyncio.AbstractEventLoop) -> Job:
    return Job(game, tokens, 1, 1.0, 1.0, random.Random(0), 0.5, loop.create_future())


def compute(
    scheduler: Scheduler, game: CachedGame, tokens: list[int], loop: asyncio.AbstractEventLoop
) -> None:
    """Cache the tokens of a game, which then waits for a reply."""
    job = job_of(game, tokens, loop)
    scheduler.add(job)
    scheduler.admit()
    while job.uncached:
        scheduler.schedule()
    scheduler.running.remove(job)


def scheduler_of(*, pages: int, prefill_tokens: int = 100) -> Scheduler:
    pool = PagePool(tiny.policy(), pages=pages, page_size=4)
    return Scheduler(pool, max_games=16, prefill_tokens=prefill_tokens)


def test_the_newest_waiting_game_loses_its_pages_first(loop):
    scheduler, games = scheduler_of(pages=3), [CachedGame(number) for number in range(3)]
    for game in games:
        compute(scheduler, game, [game.number] * 4, loop)
    scheduler.add(job_of(games[0], [0] * 8, loop))
    scheduler.admit()
    assert [len(game.pages) for game in games] == [2, 1, 0]


def test_a_shared_page_is_free_only_when_the_last_game_has_lost_it(loop):
    """Of two games with four common pages and one page each, both must leave before five are free."""
    scheduler, games = scheduler_of(pages=7), [CachedGame(number) for number in range(3)]
    compute(scheduler, games[0], [0] * 4, loop)
    for game in games[1:]:
        compute(scheduler, game, [9] * 16 + [game.number], loop)
    assert games[1].pages[:4] == games[2].pages[:4]
    scheduler.add(job_of(games[0], [0] * 24, loop))
    scheduler.admit()
    assert [len(game.pages) for game in games] == [6, 0, 0]


def test_a_game_begins_with_the_longest_cached_prefix_of_another_one(loop):
    """Also of a game with another opening, and not before that one is computed."""
    scheduler, games = scheduler_of(pages=60), [CachedGame(number) for number in range(3)]
    compute(scheduler, games[0], [9] * 20 + [0] * 10, loop)
    first, second = job_of(games[1], [9] * 40, loop), job_of(games[2], [9] * 50, loop)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit()
    assert (first.uncached, scheduler.running) == (20, [first])
    scheduler.schedule()
    scheduler.admit()
    assert second.uncached == 10


def test_the_prompts_of_a_forward_have_together_at_most_so_many_tokens(loop):
    scheduler = scheduler_of(pages=9, prefill_tokens=6)
    for number in range(3):
        scheduler.add(job_of(CachedGame(number), [number] * 4, loop))
    scheduler.admit()
    assert [sum(scheduler.schedule().values()) for _ in range(2)] == [6, 6]


def test_a_job_beside_others_leaves_a_sixteenth_of_the_pages_free_for_them_to_grow(loop):
    scheduler = scheduler_of(pages=16)
    for number, pages in enumerate((8, 8)):
        scheduler.add(job_of(CachedGame(number), [number] * 4 * pages, loop))
        scheduler.admit()
    assert len(scheduler.running) == 1
    scheduler.add(job_of(CachedGame(0), [2] * 4 * 7, loop))  # of an older game, which is admitted first
    scheduler.admit()
    assert len(scheduler.running) == 2


def test_a_job_alone_takes_all_pages(loop):
    scheduler = scheduler_of(pages=16)
    scheduler.add(job_of(CachedGame(0), [0] * 4 * 16, loop))
    scheduler.admit()
    assert len(scheduler.running) == 1
