"""What the engine computes next: jobs, blocks, tokens.

    admission    Jobs are admitted, and get blocks, in the order of their sequences' age, the oldest first.
    eviction     A job takes free blocks. If there are too few, it evicts newer sequences: first those that
                 wait for a reply, then those that run, the newest first in both cases.
    exception    A job that runs alone may also evict older sequences.
    preemption   If the sequence of a running job is evicted, the job keeps its sampled tokens and waits
                 again. When it is admitted, it recomputes the keys and values of its tokens.

So the oldest game never waits for memory, no game starves, and little is computed twice.

The prompts of admitted jobs are computed shortest first, because a job with a short prompt can soon decode
beside the others.
"""

import asyncio
import random
from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from prompt_r1.engine.kv_cache import BlockPool, TokenSequence
from prompt_r1.types import Completion

# When a job is admitted beside running jobs, this share of the blocks stays free, so that they can grow.
RESERVE = 1 / 16
# A cached prefix of another sequence is copied only if it saves this many tokens.
MIN_SHARED_TOKENS = 16


@dataclass(eq=False, kw_only=True)
class Job:
    """One call of `Engine.generate`."""

    sequence: TokenSequence
    tokens: list[int]  # the prompt, then the sampled tokens
    max_new: int
    temperature: float
    top_p: float
    rng: random.Random
    done: asyncio.Future[Completion]
    watch: Callable[[int], None] | None = None
    logprobs: list[float] = field(default_factory=list)  # nats, of the sampled tokens
    next_random: float = field(init=False)  # in [0, 1); it chooses the next token

    def __post_init__(self) -> None:
        self.next_random = self.rng.random()

    @property
    def uncached(self) -> int:
        """How many tokens must be computed before the next token is sampled."""
        return len(self.tokens) - len(self.sequence.tokens)

    @property
    def is_prefilling(self) -> bool:
        """Whether more than one token is uncached. A job that decodes computes one token in each step."""
        return self.uncached > 1

    def next_tokens(self, count: int) -> list[int]:
        """The first `count` tokens that are not cached."""
        cached = len(self.sequence.tokens)
        return self.tokens[cached : cached + count]


@dataclass(frozen=True)
class StepLimits:
    """The most that a step computes."""

    sequences: int  # the most running jobs
    prompt_tokens: int

    def halved(self) -> "StepLimits":
        """Half of each limit, but at least 1."""
        return StepLimits(max(1, self.sequences // 2), max(1, self.prompt_tokens // 2))


class Scheduler:
    """Waiting and running jobs, and the sequences that hold blocks."""

    def __init__(self, pool: BlockPool, limits: StepLimits) -> None:
        self.limits = limits  # The engine lowers them when memory runs out.
        self.running: list[Job] = []  # the oldest sequence first
        self.waiting: list[Job] = []  # the oldest sequence first
        self._pool = pool
        self._cached: set[TokenSequence] = set()  # the sequences that hold blocks

    @property
    def has_jobs(self) -> bool:
        """Whether any job waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, job: Job) -> None:
        """Let a job wait for admission."""
        insort(self.waiting, job, key=_age)

    def finish(self, job: Job) -> None:
        """Remove a running job. Its sequence stays cached for the game's next turn."""
        self.running.remove(job)

    def fail_all(self, error: Exception) -> None:
        """Drop every cached sequence, and raise an error in every `generate` that has not returned."""
        self.drop_cache()  # Running jobs wait again, so all jobs are in `waiting` now.
        self.drop_done()
        for job in self.waiting:
            job.done.set_exception(error)

    def drop_done(self) -> None:
        """Remove the jobs that nobody awaits any longer, because they were cancelled or have failed."""
        self.running = [job for job in self.running if not job.done.done()]
        self.waiting = [job for job in self.waiting if not job.done.done()]

    def drop_cache(self) -> None:
        """Drop every cached sequence. Running jobs wait again."""
        self.evict({*self._cached})

    # Admission

    def admit(self) -> None:
        """Start waiting jobs, the oldest sequences first.

        If a job lacks memory, all jobs behind it wait, too. So no job starves.
        """
        for job in [*self.waiting]:
            if len(self.running) >= self.limits.sequences:
                return
            source, shared = self._longest_prefix(job)
            if self._is_being_computed(job, shared):
                continue  # It does not wait for memory, so the jobs behind it may start.
            has_room = self._take_prefix(job, source, shared)
            if not has_room:
                return
            self._pool.allocate(job.sequence, len(job.tokens))
            self._cached.add(job.sequence)
            self.waiting.remove(job)
            insort(self.running, job, key=_age)

    def _is_being_computed(self, job: Job, shared: int) -> bool:
        """Whether a running job will soon cache a longer prefix of this job than the `shared` tokens.

        If so, this job waits for that prefix and starts from it.
        """
        length = shared + MIN_SHARED_TOKENS
        if len(job.tokens) < length:
            return False
        prefix = job.tokens[:length]
        return any(other.is_prefilling and other.tokens[:length] == prefix for other in self.running)

    def _longest_prefix(self, job: Job) -> tuple[TokenSequence, int]:
        """Which cached sequence to start from, and how many of its tokens.

        The job's own sequence wins unless another saves at least MIN_SHARED_TOKENS tokens.
        """
        # The last token is always computed, because the next token is sampled from its hidden state.
        prefix = job.tokens[:-1]
        own = common_prefix_length(job.sequence.tokens, prefix)
        best, longest = job.sequence, own
        for sequence in self._cached:
            if longest == len(prefix):
                break  # No sequence can share more.
            # To share more than `longest` tokens, a sequence must have the same token at this position. Most
            # have not, and need no search.
            if sequence.tokens[longest : longest + 1] == [prefix[longest]]:
                shared = common_prefix_length(sequence.tokens, prefix)
                if shared > longest:
                    best, longest = sequence, shared
        if longest >= own + MIN_SHARED_TOKENS:
            return best, longest
        return job.sequence, own

    def _take_prefix(self, job: Job, source: TokenSequence, shared: int) -> bool:
        """Keep or copy the `shared` tokens of `source` for a job, and make room for the rest of its tokens.

        Returns whether there is room for all of them.
        """
        pool = self._pool
        reserve = int(RESERVE * pool.count) if self.running else 0
        wanted = pool.blocks_for(len(job.tokens)) + reserve
        if source is job.sequence:
            pool.truncate(job.sequence, shared)
            return self._make_room(wanted - len(job.sequence.block_table), job)
        pool.truncate(job.sequence, 0)
        has_room = self._make_room(wanted - shared // pool.block_size, job, keep=source)
        if has_room:
            pool.fork(source, job.sequence, shared)  # It shares the full blocks of `source`.
            return True
        # There is no room beside `source`. Without it there may be: then the job computes all of its tokens.
        return self._make_room(wanted, job)

    # One step

    def schedule(self) -> dict[Job, int]:
        """Choose the tokens of the next step: one for each job that decodes, and prompts in chunks.

        Returns how many tokens of each job the step computes. They count as cached after `commit`.
        """
        counts: dict[Job, int] = {}
        decoding = [job for job in self.running if job.uncached == 1]
        for job in decoding:
            if job.sequence not in self._cached:
                continue  # An older job of this loop has preempted this one.
            missing = self._pool.blocks_for(len(job.tokens)) - len(job.sequence.block_table)
            has_room = self._make_room(missing, job)
            if has_room:
                self._pool.allocate(job.sequence, len(job.tokens))
                counts[job] = 1
            else:
                self.evict([job.sequence])
        # Jobs got the blocks of their prompts when they were admitted.
        prefilling = [job for job in self.running if job.is_prefilling]
        left = self.limits.prompt_tokens
        for job in sorted(prefilling, key=lambda job: job.uncached):
            count = min(job.uncached, left)
            if count:
                counts[job] = count
                left -= count
        return counts

    def commit(self, counts: dict[Job, int]) -> None:
        """Count the tokens of a step as cached, after the forward has written their keys and values."""
        for job, count in counts.items():
            job.sequence.tokens += job.next_tokens(count)

    # Blocks

    def _make_room(self, blocks: int, job: Job, *, keep: TokenSequence | None = None) -> bool:
        """Evict sequences until `blocks` blocks are free. Evicts none if that is impossible."""
        free = len(self._pool.free)
        if free >= blocks:
            return True
        victims: list[TokenSequence] = []
        # A block that several sequences use becomes free when the last of them is evicted.
        ref_counts = self._pool.ref_counts[:]
        for sequence in self._victims(job, keep):
            victims.append(sequence)
            for block in sequence.block_table:
                ref_counts[block] -= 1
                if ref_counts[block] == 0:
                    free += 1
            if free >= blocks:
                self.evict(victims)
                return True
        return False

    def _victims(self, job: Job, keep: TokenSequence | None) -> list[TokenSequence]:
        """The sequences that a job may evict, in the order in which they are evicted.

        Sequences that are newer than the job's come first: those that do not run, then those that run, each
        from the newest on. If no other job runs, the older ones follow, from the newest on: otherwise the
        engine could stand still.
        """
        running = {other.sequence for other in self.running}
        candidates = self._cached - {job.sequence, keep}
        ordered = sorted(candidates, key=lambda other: (other in running, -other.number))
        newer = [other for other in ordered if other.number > job.sequence.number]
        older = [other for other in ordered if other.number < job.sequence.number]
        others_run = bool(running - {job.sequence})
        return newer if others_run else newer + older

    def evict(self, sequences: Collection[TokenSequence]) -> None:
        """Free the blocks of sequences, and let their running jobs wait again."""
        for job in [job for job in self.running if job.sequence in sequences]:
            self.running.remove(job)
            self.add(job)
        for sequence in sequences:
            self._pool.truncate(sequence, 0)
            self._cached.discard(sequence)


def _age(job: Job) -> int:
    """The sort key that puts jobs with the oldest sequences first."""
    return job.sequence.number


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """The number of equal tokens at the start.

    It bisects, because comparing slices is far faster than a loop over tokens: all games share an instruction
    of hundreds of tokens.
    """
    # The first `equal` tokens are equal. The first `differs` tokens are not, or one list has fewer.
    equal, differs = 0, min(len(a), len(b)) + 1
    while differs - equal > 1:
        middle = (equal + differs) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            differs = middle
    return equal
