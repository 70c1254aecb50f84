"""What the engine computes next: jobs, pages, tokens.

The oldest games are served first. A job takes free pages, else the pages of newer games, the newest first:
those that wait for a reply, then those that run. A running job that loses its pages is preempted: it waits
again with its sampled tokens, whose keys and values are computed again when it returns. So the oldest game
never waits for memory, no game starves, and little is computed twice.
"""

import asyncio
import random
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from prompt_r1.engine.kv_cache import CachedGame, PagePool
from prompt_r1.types import Completion

# Share of the pages that stays free when a job is admitted beside others, for those to grow.
RESERVE = 1 / 16
# Copy the cached prefix of another game only where it saves so many tokens.
LEAST_SHARED = 16


@dataclass(eq=False)
class Job:
    """One call of `generate`."""

    game: CachedGame
    tokens: list[int]  # prompt, then the sampled tokens
    max_new: int
    temperature: float
    top_p: float
    random: random.Random
    uniform: float  # in [0, 1): the random number for its next token
    done: asyncio.Future[Completion]
    watch: Callable[[int], None] | None = None
    logprobs: list[float] = field(default_factory=list)

    @property
    def uncached(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return len(self.tokens) - len(self.game.tokens)


class Scheduler:
    """Waiting and running jobs, and the games that hold pages."""

    def __init__(self, pool: PagePool, *, max_games: int, prefill_tokens: int) -> None:
        self.max_games = max_games
        self.prefill_tokens = prefill_tokens
        self.running: list[Job] = []  # the oldest game first, as in `waiting`
        self.waiting: list[Job] = []
        self.prefilled = 0  # prompt tokens computed, for tests and reports
        self.preempted = 0  # jobs
        self._pool = pool
        self._games: set[CachedGame] = set()  # those that hold pages

    def add(self, job: Job) -> None:
        """Let a job wait for admission."""
        insort(self.waiting, job, key=lambda other: other.game.number)

    def drop_done(self) -> None:
        """Remove the jobs that are not awaited any longer: they were cancelled, or have failed."""
        self.running = [job for job in self.running if not job.done.done()]
        self.waiting = [job for job in self.waiting if not job.done.done()]

    def drop_cache(self) -> None:
        """Drop every cached sequence. Running jobs wait again."""
        self.evict([*self._games])

    # Admission

    def admit(self) -> None:
        """Start waiting jobs, those of the oldest games first.

        A job that begins as one that is being computed waits for that one. A job that does not fit waits, and
        so do all behind it, so that none starves.
        """
        for job in [*self.waiting]:
            if len(self.running) >= self.max_games:
                return
            source, shared = self._longest_prefix(job)
            if any(
                other.uncached > 1 and common_prefix_length(other.tokens, job.tokens) >= shared + LEAST_SHARED
                for other in self.running
            ):
                continue
            if not self._start(job, source, shared):
                return

    def _longest_prefix(self, job: Job) -> tuple[CachedGame, int]:
        """The game whose cache begins with the most tokens of a job, and their number: its own, unless
        another one has `LEAST_SHARED` more.
        """
        own = common_prefix_length(job.game.tokens, job.tokens)
        best, most = job.game, own
        for game in self._games:
            if len(game.tokens) > most and (shared := common_prefix_length(game.tokens, job.tokens)) > most:
                best, most = game, shared
        return (best, most) if most >= own + LEAST_SHARED else (job.game, own)

    def _start(self, job: Job, source: CachedGame, shared: int) -> bool:
        """Run a job on the first tokens of a cached sequence. False if there are too few pages."""
        game, pool = job.game, self._pool
        # The last token must be computed: the next one is sampled from its hidden state.
        shared = min(shared, len(job.tokens) - 1)
        needed = pool.pages_for(len(job.tokens)) + (int(RESERVE * pool.count) if self.running else 0)
        pool.truncate(game, shared if source is game else 0)
        if source is not game and self._make_room(needed - shared // pool.page_size, job, keep=source):
            pool.fork(source, game, shared)
        # The pages of another source may be the ones that are needed.
        elif not self._make_room(needed - len(game.pages), job):
            return False
        pool.extend(game, len(job.tokens))
        self._games.add(game)
        self.waiting.remove(job)
        insort(self.running, job, key=lambda other: other.game.number)
        return True

    # One step

    def schedule(self) -> dict[Job, int]:
        """Choose the tokens of the next step: one for each job that decodes, and prompts in chunks.

        Returns the number of each job's tokens, which count as cached from now on.
        """
        counts, pool = dict[Job, int](), self._pool
        for job in [job for job in self.running if job.uncached == 1]:  # the oldest first
            if job.game not in self._games:
                continue  # preempted by an older one
            if self._make_room(pool.pages_for(len(job.tokens)) - len(job.game.pages), job):
                pool.extend(job.game, len(job.tokens))
                counts[job] = 1
            else:
                self.evict([job.game])
        room = self.prefill_tokens
        # Jobs got the pages of their prompts when they were admitted.
        for job in sorted([job for job in self.running if job.uncached > 1], key=lambda job: job.uncached):
            if count := min(job.uncached, room):
                counts[job] = count
                self.prefilled += count
                room -= count
        for job, count in counts.items():
            cached = len(job.game.tokens)
            job.game.tokens += job.tokens[cached : cached + count]
        return counts

    # Pages

    def _make_room(self, pages: int, job: Job, *, keep: CachedGame | None = None) -> bool:
        """Take pages from newer games until so many are free. Takes none if they do not suffice."""
        free = len(self._pool.free)
        if free >= pages:
            return True
        victims = self._victims(job, keep)
        lost: list[CachedGame] = []
        # A page that several games hold becomes free when the last of them loses it.
        users = self._pool.users[:]
        while free < pages and victims:
            lost.append(victims.pop(0))
            for page in lost[-1].pages:
                users[page] -= 1
                free += not users[page]
        if free < pages:
            return False
        self.evict(lost)
        return True

    def _victims(self, job: Job, keep: CachedGame | None) -> list[CachedGame]:
        """The games that a job may displace, in this order: newer ones that wait for a reply, then newer ones
        that run, the newest first. If nothing else runs, older ones that wait for a reply come last.
        """
        running = {other.game for other in self.running}
        older = {game for game in self._games if game.number < job.game.number}
        alone = not running - {job.game}
        victims = self._games - {job.game, keep} - (set() if alone else older)
        return sorted(victims, key=lambda game: (game in older, game in running, -game.number))

    def evict(self, games: list[CachedGame]) -> None:
        """Free the pages of games. Those of their jobs that run are preempted: they wait again."""
        for job in [job for job in self.running if job.game in games]:
            self.preempted += 1
            self.running.remove(job)
            self.add(job)
        for game in games:
            self._pool.truncate(game, 0)
            self._games.discard(game)


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """The number of equal tokens at the start."""
    if a == b[: len(a)]:
        return len(a)
    return next(place for place, (one, other) in enumerate(zip(a, [*b, -1], strict=False)) if one != other)
