"""Which games get blocks and tokens: a pool of a few small blocks, and jobs without an engine."""

import asyncio
import random

import pytest

from prompt_r1.engine.kv_cache import TokenSequence
from prompt_r1.engine.scheduler import Job, Scheduler, StepLimits, common_prefix_length
from tests.support import tiny


@pytest.fixture
def loop():
    with asyncio.Runner() as runner:
        yield runner.get_loop()


def job_of(game: TokenSequence, tokens: list[int], loop: asyncio.AbstractEventLoop) -> Job:
    return Job(
        sequence=game,
        tokens=tokens,
        max_new=1,
        temperature=1.0,
        top_p=1.0,
        rng=random.Random(0),
        done=loop.create_future(),
    )


def step(scheduler: Scheduler) -> dict[Job, int]:
    """A step of the engine without its forward; how many tokens of each job it computes."""
    counts = scheduler.schedule()
    scheduler.commit(counts)
    return counts


def compute(
    scheduler: Scheduler, game: TokenSequence, tokens: list[int], loop: asyncio.AbstractEventLoop
) -> None:
    """Cache the tokens of a game, which then waits for a reply."""
    job = job_of(game, tokens, loop)
    scheduler.add(job)
    scheduler.admit()
    while job.uncached:
        step(scheduler)
    scheduler.finish(job)


def decoding_jobs(scheduler: Scheduler, lengths: list[int], loop: asyncio.AbstractEventLoop) -> list[Job]:
    """Run jobs with prompts of these lengths, the oldest game first, until each has sampled two tokens.

    The prompt and the first sampled token are cached.
    """
    jobs = [job_of(TokenSequence(number), [number] * length, loop) for number, length in enumerate(lengths)]
    for job in jobs:
        scheduler.add(job)
    scheduler.admit()
    step(scheduler)
    for job in jobs:
        job.tokens += [5, 5]
        job.sequence.tokens.append(5)
    return jobs


def scheduler_of(*, blocks: int, prefill_tokens: int = 100) -> Scheduler:
    pool = tiny.pool(blocks=blocks, block_size=4)
    return Scheduler(pool, StepLimits(16, prefill_tokens))


def test_the_newest_waiting_game_loses_its_blocks_first(loop):
    scheduler, games = scheduler_of(blocks=3), [TokenSequence(number) for number in range(3)]
    for game in games:
        compute(scheduler, game, [game.number] * 4, loop)
    scheduler.add(job_of(games[0], [0] * 8, loop))
    scheduler.admit()
    assert [len(game.block_table) for game in games] == [2, 1, 0]


def test_a_shared_block_is_free_only_when_the_last_game_has_lost_it(loop):
    """Of two games with four common blocks and one block each, both must leave before five are free."""
    scheduler, games = scheduler_of(blocks=7), [TokenSequence(number) for number in range(3)]
    compute(scheduler, games[0], [0] * 4, loop)
    for game in games[1:]:
        compute(scheduler, game, [9] * 16 + [game.number], loop)
    assert games[1].block_table[:4] == games[2].block_table[:4]
    scheduler.add(job_of(games[0], [0] * 24, loop))
    scheduler.admit()
    assert [len(game.block_table) for game in games] == [6, 0, 0]


def test_a_game_begins_with_the_longest_cached_prefix_of_another_one(loop):
    """The other game may have another opening. The prefix is copied only after it is computed."""
    scheduler, games = scheduler_of(blocks=60), [TokenSequence(number) for number in range(3)]
    compute(scheduler, games[0], [9] * 20 + [0] * 10, loop)
    first, second = job_of(games[1], [9] * 40, loop), job_of(games[2], [9] * 50, loop)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit()
    assert (first.uncached, scheduler.running) == (20, [first])
    step(scheduler)
    scheduler.admit()
    assert second.uncached == 10


def test_the_prompts_of_a_forward_have_together_at_most_so_many_tokens(loop):
    scheduler = scheduler_of(blocks=9, prefill_tokens=6)
    for number in range(3):
        scheduler.add(job_of(TokenSequence(number), [number] * 4, loop))
    scheduler.admit()
    assert [sum(step(scheduler).values()) for _ in range(2)] == [6, 6]


def test_a_job_beside_others_leaves_a_sixteenth_of_the_blocks_free_for_them_to_grow(loop):
    scheduler = scheduler_of(blocks=16)
    for number, blocks in enumerate((8, 8)):
        scheduler.add(job_of(TokenSequence(number), [number] * 4 * blocks, loop))
        scheduler.admit()
    assert len(scheduler.running) == 1
    scheduler.add(job_of(TokenSequence(0), [2] * 4 * 7, loop))  # an older game is admitted first
    scheduler.admit()
    assert len(scheduler.running) == 2


def test_a_job_alone_takes_all_blocks(loop):
    scheduler = scheduler_of(blocks=16)
    scheduler.add(job_of(TokenSequence(0), [0] * 4 * 16, loop))
    scheduler.admit()
    assert len(scheduler.running) == 1


def test_a_game_that_decodes_alone_displaces_an_older_game_that_waits_for_a_reply(loop):
    """Otherwise the job would be preempted at once, and compute its tokens again."""
    scheduler, older, newer = scheduler_of(blocks=4), TokenSequence(0), TokenSequence(1)
    compute(scheduler, older, [0] * 8, loop)
    job = job_of(newer, [1] * 8, loop)
    scheduler.add(job)
    scheduler.admit()
    step(scheduler)  # the prompt, in the other two blocks
    job.tokens.append(1)
    assert step(scheduler) == {job: 1}
    assert (len(newer.tokens), len(newer.block_table), older.block_table) == (9, 3, [])


def test_a_job_that_decodes_and_finds_no_block_among_older_games_is_preempted(loop):
    """An older game that runs keeps its blocks: the newer one waits again with its tokens."""
    scheduler = scheduler_of(blocks=4)
    jobs = decoding_jobs(scheduler, [7, 7], loop)  # The cached tokens fill two blocks each.
    assert step(scheduler) == {jobs[0]: 1}
    assert (scheduler.running, scheduler.waiting) == ([jobs[0]], [jobs[1]])
    assert [len(job.sequence.block_table) for job in jobs] == [3, 0]


def test_a_job_that_is_preempted_in_a_step_takes_no_blocks_in_the_same_step(loop):
    """The oldest job preempts the newest one, and the job between them lacks a block and waits again. The
    newest job must not take its blocks meanwhile: older games are served first.
    """
    scheduler = scheduler_of(blocks=5)
    jobs = decoding_jobs(scheduler, [7, 7, 3], loop)  # The cached tokens fill two blocks, two and one.
    assert step(scheduler) == {jobs[0]: 1}
    assert (scheduler.running, scheduler.waiting) == ([jobs[0]], jobs[1:])
    assert [len(job.sequence.block_table) for job in jobs] == [3, 0, 0]


def test_a_job_that_does_not_fit_leaves_the_caches_of_newer_games(loop):
    """A bug would only cost time: the newer game would compute its tokens again."""
    scheduler, games = scheduler_of(blocks=8), [TokenSequence(number) for number in range(3)]
    running = job_of(games[0], [0] * 16, loop)
    scheduler.add(running)
    scheduler.admit()
    compute(scheduler, games[2], [2] * 4, loop)
    scheduler.add(job_of(games[1], [1] * 24, loop))  # six blocks; four would be free at most
    scheduler.admit()
    assert [len(game.block_table) for game in games] == [4, 0, 1]
    assert games[2].tokens == [2] * 4


def test_the_common_prefix_is_found_as_a_loop_finds_it():
    rng = random.Random(0)
    for _ in range(500):
        a = rng.choices((1, 2), k=rng.randrange(6)) * rng.randrange(1, 40)
        cut = rng.randrange(len(a) + 1)
        b = a[:cut] + rng.choices((1, 2), k=rng.randrange(5))
        expected = 0
        while expected < min(len(a), len(b)) and a[expected] == b[expected]:
            expected += 1
        assert common_prefix_length(a, b) == expected


def test_a_job_that_shares_cached_blocks_needs_room_for_its_other_tokens_only(loop):
    """A bug would only cost time: another game would lose blocks, and compute its tokens again."""
    scheduler, games = scheduler_of(blocks=7), [TokenSequence(number) for number in range(3)]
    compute(scheduler, games[0], [9] * 16, loop)
    compute(scheduler, games[1], [1] * 8, loop)
    scheduler.add(job_of(games[2], [9] * 16 + [2], loop))  # It shares four blocks, and one is free.
    scheduler.admit()
    assert [len(game.block_table) for game in games] == [4, 2, 5]
    assert games[2].block_table[:4] == games[0].block_table


def test_a_game_that_waits_for_a_reply_loses_its_blocks_before_a_newer_one_that_runs(loop):
    """A running job that is preempted must compute its tokens again at once, a waiting one perhaps never."""
    scheduler, games = scheduler_of(blocks=3), [TokenSequence(number) for number in range(3)]
    compute(scheduler, games[1], [1] * 4, loop)
    running = job_of(games[2], [2] * 4, loop)
    scheduler.add(running)
    scheduler.admit()
    oldest = job_of(games[0], [0] * 8, loop)
    scheduler.add(oldest)
    scheduler.admit()
    assert scheduler.running == [oldest, running]
    assert [len(game.block_table) for game in games] == [2, 0, 1]
