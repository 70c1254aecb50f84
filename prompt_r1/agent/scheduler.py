"""What the engine computes next: jobs, memory, tokens.

A sequence takes rows of the arena as it grows. The calls of one asyncio task are taken to be the turns of one
game, which is over when the task has ended. The oldest games are served first: a job takes rows from
sequences of games that are over, then from newer games, the newest first, whether they wait for a reply or
run. A running job that loses its rows is preempted: it waits again with its sampled tokens, and their keys
and values are recomputed when it returns. So the oldest game never waits for memory, no game starves, and
little is computed twice, because the games that have rows keep them to their end.

A caller that plays its games differently gets the same results, only with more tokens computed twice.
"""

import asyncio
import random
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from prompt_r1.agent.decode_kernels import Chunk
from prompt_r1.agent.kv_cache import Arena, Game, Prefix, PrefixIndex, Segment, prefix_key
from prompt_r1.agent.sampling import Sampling
from prompt_r1.types import Completion

# With CUDA graphs, prompts wait at most this many steps to be computed together.
MAX_PROMPT_WAIT = 16
# A sequence takes this many rows more than it needs, so that it seldom moves; fewer in a small arena.
GROWTH = 64
# Share of the arena that stays free when a job is admitted beside others, for those to grow.
RESERVE = 1 / 16


@dataclass(eq=False)
class Job:
    """One call of `generate`."""

    number: int  # in the order of the calls
    game: Game
    tokens: list[int]  # prompt, then the sampled tokens
    prompt_length: int
    max_new: int
    sampling: Sampling
    random: random.Random
    done: asyncio.Future[Completion]
    watch: Callable[[int], None] | None = None
    logprobs: list[float] = field(default_factory=list)
    uniform: float = field(init=False)  # in [0, 1): the random number for its next token
    key: bytes = b""  # of its tokens when it was queued
    awaited: Prefix | None = None  # another job computes it, and this job is going to copy it or share it

    def __post_init__(self) -> None:
        self.uniform = self.random.random()

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the order of service: the oldest game first, whose calls in their order."""
        return self.game.number, self.number


@dataclass
class Schedule:
    """The work of one step."""

    tokens: list[int] = field(default_factory=list)  # (T,) the packed row
    chunks: list[Chunk] = field(default_factory=list)  # its sequences
    # Jobs that sample without a forward: the last hidden state of their prompt is stored.
    known: list[Job] = field(default_factory=list)
    # Jobs that sample after the forward, with the column of their newest token.
    columns: dict[Job, int] = field(default_factory=dict)
    prefilled: int = 0  # prompt tokens among them

    @property
    def jobs(self) -> list[Job]:
        """All jobs that sample in this step."""
        return [*self.known, *self.columns]

    def add(self, job: Job, segment: Segment, count: int) -> None:
        """Append the job's next tokens to the row, and count them as cached."""
        cached = len(segment.tokens)
        new = job.tokens[cached : cached + count]
        assert cached + count <= segment.capacity, f"{cached} + {count} tokens of {segment.capacity}"
        segment.tokens += new
        shared_start = segment.parent.start if segment.parent is not None else 0
        self.chunks.append(
            Chunk(len(self.tokens), count, segment.start, cached + count, segment.shared, shared_start)
        )
        self.tokens += new
        if len(segment.tokens) == len(job.tokens):
            self.columns[job] = len(self.tokens) - 1


class Scheduler:
    """Waiting and running jobs, and the cached sequences in the arena."""

    def __init__(
        self, arena: Arena, *, max_games: int, prefill_tokens: int, prompts_wait: bool, share_prompts: bool
    ) -> None:
        """`prompts_wait`: whether prompts wait for each other, because a step without them is far cheaper.
        `share_prompts`: whether games with the same prompt share its rows, instead of copying them.
        """
        self.max_games = max_games
        self.prefill_tokens = prefill_tokens
        self.running: dict[Job, Segment] = {}
        self.waiting: list[Job] = []  # the oldest game first
        self.preempted = 0
        self._arena = arena
        self._prompts_wait = prompts_wait
        self._share_prompts = share_prompts
        self._index = PrefixIndex()
        self._growth = max(1, min(GROWTH, arena.rows // 512))
        self._reserve = int(RESERVE * arena.rows)
        self._games: WeakKeyDictionary[asyncio.Task[object], Game] = WeakKeyDictionary()
        self._last_game = 0
        self._does_not_fit: Job | None = None  # and no rows were released since it was tried
        self._prompt_wait = 0  # steps that prompts have waited
        self._steps = 0

    @property
    def idle(self) -> bool:
        """Whether no job waits or runs."""
        return not self.waiting and not self.running

    def current_game(self) -> Game:
        """The game of the running asyncio task."""
        task = asyncio.current_task()
        assert task is not None, "`generate` runs in a task"
        game = self._games.get(task)
        if game is None:
            self._last_game += 1
            game = self._games[task] = Game(self._last_game)
            task.add_done_callback(lambda _: self._end(game))
        return game

    def _end(self, game: Game) -> None:
        game.over = True
        self._does_not_fit = None

    def add(self, job: Job) -> None:
        """Let a job wait for admission."""
        job.key = prefix_key(job.tokens)
        insort(self.waiting, job, key=lambda other: other.order)

    def finish(self, job: Job) -> None:
        """Remove a running job. Its sequence stays cached for later turns and other games."""
        segment = self.running.pop(job)
        segment.busy = False
        segment.last_used = self._steps
        if len(segment.tokens) > segment.shared:
            self._arena.resize(segment, len(segment.tokens))
            self._index.add(prefix_key(segment.tokens), segment)
        else:
            self._evict(segment)
        self._does_not_fit = None

    def drop_cancelled(self) -> None:
        """Remove the jobs that are no longer awaited."""
        self.waiting = [job for job in self.waiting if not job.done.done()]
        for job in [job for job in self.running if job.done.done()]:
            self.finish(job)

    def drop_cache(self) -> None:
        """Drop every cached sequence. Running jobs wait again."""
        for segment in sorted(self._arena.segments, key=lambda segment: segment.is_parent):  # children first
            self._evict(segment)

    # Admission

    def admit(self) -> None:
        """Start waiting jobs, those of the oldest games first.

        A job that does not fit waits, and so do all jobs behind it, so that none starves. It is not tried
        again before rows are released.
        """
        for job in [*self.waiting]:
            if len(self.running) == self.max_games or job is self._does_not_fit:
                break
            if job.awaited is not None and job.awaited.is_coming:
                continue
            prefix = self._find_prefix(job)
            if prefix is not None and prefix.is_coming and prefix.shared > len(job.tokens) // 2:
                job.awaited = prefix  # copying it is cheaper than computing it again
            elif not self._start(job, prefix):
                self._does_not_fit = job
                break
        self.waiting = [job for job in self.waiting if job not in self.running]

    def _find_prefix(self, job: Job) -> Prefix | None:
        """The cached sequence of the job's game if the job continues it, else the longest prefix of any."""
        own = job.game.segment
        if own is not None and own.tokens == job.tokens[: len(own.tokens)]:
            return Prefix(own, len(own.tokens))
        job.game.segment = None
        return self._index.find(job.key)

    def _start(self, job: Job, prefix: Prefix | None) -> bool:
        """Run a job in a segment that begins with a cached prefix. False if the job does not fit."""
        segment = self._place(job, prefix)
        if segment is None:
            return False
        segment.game, job.game.segment = job.game, segment
        segment.busy = True
        self._index.add(job.key, segment)
        self.running[job] = segment
        return True

    def _place(self, job: Job, prefix: Prefix | None) -> Segment | None:
        """The segment of a job that starts; None if the job does not fit.

        A sequence that the prompt extends is continued. Of any other, the prefix is shared or copied, or the
        sequence is cut to it, whichever there is room for first. Otherwise the job begins without a prefix.
        """
        capacity = self._wanted_capacity(job)
        needed = capacity + self._reserve if self.running else capacity
        if prefix is None:
            return self._begin(job, needed)
        source, length = prefix.segment, prefix.usable_by(job.tokens)
        if length == len(source.tokens) and not source.busy and not source.is_parent:
            return self._continue(job, source, length, capacity) or self._begin(job, capacity)
        segment = self._share_or_copy(job, source, length, needed)
        if segment is None and source.is_abandoned and length >= source.shared:
            segment = self._continue(job, source, length, needed)
        return segment or self._begin(job, needed)

    def _continue(self, job: Job, source: Segment, length: int, needed: int) -> Segment | None:
        """Let a job extend a sequence where it is, after its first tokens; None without room."""
        if not self._make_room(needed - source.capacity, job, keep=source):
            return None
        source.game.leave(source)
        source.is_parent = False
        source.truncate(length)
        self._arena.resize(source, self._wanted_capacity(job))
        return source

    def _share_or_copy(self, job: Job, source: Segment, length: int, needed: int) -> Segment | None:
        """A new sequence with the first tokens of another: those of a prompt are shared, the rest is copied.
        None without room.
        """
        capacity = self._wanted_capacity(job)
        shared = self._shareable(source, min(length, capacity - 1))
        if not self._make_room(needed - shared, job, keep=source):
            return None
        segment = Segment(job.game)
        if shared:
            segment.parent = self._parent(source, shared)
            segment.tokens = segment.parent.tokens[:]
        self._arena.resize(segment, capacity)
        self._arena.copy_prefix(source, segment, length)
        return segment

    def _begin(self, job: Job, needed: int) -> Segment | None:
        """A new sequence without a prefix; None without room."""
        if not self._make_room(needed, job):
            return None
        segment = Segment(job.game)
        self._arena.resize(segment, self._wanted_capacity(job))
        return segment

    def _shareable(self, source: Segment, length: int) -> int:
        """How many first tokens of a sequence another one may share: its parent's, or else a prompt in it."""
        if not self._share_prompts:
            return 0
        if source.is_parent or source.parent is not None:
            parent = source.parent or source
            return len(parent.tokens) if length >= len(parent.tokens) else 0
        ends = [end for end in source.end_states if end <= length and end < source.size]
        return max(ends, default=0)

    def _parent(self, source: Segment, shared: int) -> Segment:
        """The segment that holds so many first tokens of a sequence, for it and others."""
        parent = source if source.is_parent else source.parent
        if parent is None:
            parent = self._arena.split_parent(source, shared)
            self._index.add(prefix_key(parent.tokens), parent)
        parent.last_used = self._steps
        return parent

    def _wanted_capacity(self, job: Job) -> int:
        """Room for the tokens of a job and some more; never more than it can come to need."""
        return min(len(job.tokens) + self._growth, job.prompt_length + job.max_new - 1)

    def _make_room(self, rows: int, job: Job, *, keep: Segment | None = None) -> bool:
        """Evict sequences for a job until so many rows are free. Evicts none if that is not possible."""
        missing = rows - self._arena.free
        evicted: dict[Segment, None] = {}  # in this order
        for segment in self._victims(job) if missing > 0 else []:
            if missing > 0 and segment is not keep:
                evicted[segment] = None
                missing -= segment.size
            parent = segment.parent
            if missing > 0 and parent and parent is not keep and parent.children <= evicted.keys():
                evicted[parent] = None
                missing -= parent.size
        if missing > 0:
            return False
        for segment in evicted:
            self._evict(segment)
        return True

    def _victims(self, job: Job) -> list[Segment]:
        """The sequences that a job may displace, in this order: those that no game will continue, the least
        recently used first; those of newer games that wait for a reply, then those of newer jobs, the newest
        first. If nothing else runs, also those of older games: nobody knows when their replies come.
        """
        idle = [segment for segment in self._arena.segments if segment.is_idle]
        idle.sort(key=lambda segment: segment.last_used)
        abandoned = [segment for segment in idle if segment.is_abandoned]
        expected = [segment for segment in idle if not segment.is_abandoned]
        expected.sort(key=lambda segment: segment.game.number, reverse=True)
        if self.running.keys() - {job}:
            expected = [segment for segment in expected if segment.game.number >= job.game.number]
        newer = [other for other in self.running if other.order > job.order]
        newer.sort(key=lambda other: other.order, reverse=True)
        return [*abandoned, *expected, *(self.running[other] for other in newer)]

    def _evict(self, segment: Segment) -> None:
        """Drop a sequence. A job that runs in it waits again."""
        for job in [job for job, own in self.running.items() if own is segment]:
            del self.running[job]
            self._requeue(job)
        segment.busy = False
        segment.game.leave(segment)
        self._arena.remove(segment)
        self._index.remove(segment)

    def _requeue(self, job: Job) -> None:
        self.preempted += 1
        self.add(job)

    # The tokens of a step

    def schedule(self) -> Schedule:
        """Choose the tokens of the next forward, and the jobs that sample after it."""
        self._steps += 1
        self._grow()
        schedule = Schedule()
        prompts: dict[Job, int] = {}  # and sequences that lost their cache, with their uncached tokens
        for job, segment in self.running.items():
            uncached = len(job.tokens) - len(segment.tokens)
            if not uncached:  # another game has computed the same prompt
                schedule.known.append(job)
            elif uncached == 1 and job.logprobs:
                schedule.add(job, segment, 1)
            else:
                prompts[job] = uncached
        budget = self._prompt_budget(prompts)
        # The shortest prompts first: a short reply does not wait for a long question.
        for job in sorted(prompts, key=prompts.__getitem__):
            count = min(prompts[job], budget)
            if count:
                schedule.add(job, self.running[job], count)
                schedule.prefilled += count
                budget -= count
        return schedule

    def _grow(self) -> None:
        """Give running jobs rows for their next token. A job for which there are none waits again, and its
        sequence stays cached.
        """
        short = [job for job, segment in self.running.items() if segment.capacity < len(job.tokens)]
        for job in sorted(short, key=lambda job: job.order):
            if job not in self.running:  # preempted for an older one
                continue
            segment, capacity = self.running[job], self._wanted_capacity(job)
            if self._make_room(capacity - segment.capacity, job):
                self._arena.resize(segment, capacity)
            else:
                self.finish(job)
                self._requeue(job)

    def _prompt_budget(self, prompts: dict[Job, int]) -> int:
        """How many prompt tokens this step may compute.

        With CUDA graphs, a step that only decodes is far cheaper. So prompts wait until they fill a forward,
        have waited for MAX_PROMPT_WAIT steps, or no job decodes.
        """
        nothing_decodes = len(prompts) == len(self.running)
        fills_forward = sum(prompts.values()) >= self.prefill_tokens
        if (
            not self._prompts_wait
            or not prompts
            or nothing_decodes
            or fills_forward
            or self._prompt_wait >= MAX_PROMPT_WAIT
        ):
            self._prompt_wait = 0
            return self.prefill_tokens
        self._prompt_wait += 1
        return 0
