"""Batched generation with a KV cache, on an unmodified Hugging Face model.

The interface is stateless: `generate(tokens)`. A game passes its handle, under which its sequence stays
cached between its turns: only the tokens that are not cached yet are computed. The longest prefix that any
cached game has in common with it is copied. A step has three parts:

    schedule   choose the tokens of the step: one for each job that decodes, and prompt tokens in chunks
    run        one forward over these tokens, packed into one row
    sample     append a token to each job that can; jobs that are finished leave the batch at once

A game that waits for its environment keeps its pages while memory allows, but has no place in the batch.
"""

import asyncio
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from prompt_r1.engine.cuda_graphs import Capture, DecodeGraphs, capture_cuda_graph
from prompt_r1.engine.kv_cache import CachedGame, PagedBatch, PagePool, allocate_pool, upload
from prompt_r1.engine.sampling import draw
from prompt_r1.engine.scheduler import Job, Scheduler
from prompt_r1.model.policy import Policy
from prompt_r1.types import Completion

# Prompt tokens in a forward: enough to fill the device, few enough that decoding does not wait long.
PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}


class Engine:
    """Generates for many games at once."""

    def __init__(
        self,
        policy: Policy,
        *,
        stop_ids: frozenset[int],
        max_tokens: int,
        kv_tokens: int = 0,
        max_games: int = 256,
        prefill_tokens: int = 0,
        page_size: int = 0,
        capture: Capture = capture_cuda_graph,
    ) -> None:
        """Memory is allocated at the first request: an engine that never plays takes none.

        `max_tokens`: of a game. `kv_tokens`: of the KV cache (0: as much as free memory allows). `max_games`:
        that decode at the same time. `prefill_tokens`: prompt tokens in a forward, `page_size`: tokens of a
        page of the cache (0: defaults for the device). `capture`: captures decode steps on GPUs in 16 bits.
        """
        self.policy = policy
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self._max_games = max_games
        self._prefill_tokens = prefill_tokens or PREFILL_TOKENS[policy.device.type]
        self._capture = capture
        self._allocate_pool = partial(
            allocate_pool, policy, tokens=kv_tokens, longest=max_tokens, games=max_games, page_size=page_size
        )
        self._numbers = itertools.count()  # of games
        self._pool: PagePool | None = None
        self._graphs: DecodeGraphs  # made with the pool, as the scheduler
        self._scheduler: Scheduler
        self._loop: asyncio.Task[None] | None = None

    @contextmanager
    def new_game(self) -> Iterator[CachedGame]:
        """The handle of a new game. What is cached of the game is dropped at the end of the context."""
        game = CachedGame(next(self._numbers))
        try:
            yield game
        finally:
            if self._pool is not None:
                self._scheduler.evict([game])

    async def generate(
        self,
        tokens: list[int],
        *,
        max_new: int,
        seed: str,
        game: CachedGame | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        watch: Callable[[int], None] | None = None,
    ) -> Completion:
        """Sample the next tokens until a stop token, or `max_new` tokens.

        Temperature 0 takes the most likely token. The log-probabilities are those of softmax(logits /
        temperature) over the whole vocabulary, or of softmax(logits) at temperature 0. The result depends on
        the weights, the tokens and these arguments only, not on the games that run at the same time.

        `game`: the handle of the game whose turn it is, one turn at a time; None: a game of this call alone.
        `watch` is called with each token as it is sampled. Raises ValueError if the tokens do not fit.
        """
        if not (temperature >= 0 and 0 < top_p <= 1):
            raise ValueError(f"{temperature=} must be at least 0, and {top_p=} in (0, 1]")
        if not 0 < len(tokens) <= self.max_tokens - max_new or max_new < 1:
            raise ValueError(
                f"{len(tokens)} tokens and {max_new} new ones do not fit a game of {self.max_tokens}"
            )
        if self._pool is None:
            self._allocate()
        numbers = random.Random(seed)
        with self.new_game() if game is None else nullcontext(game) as cached:
            job = Job(
                cached,
                [*tokens],
                max_new,
                temperature,
                top_p,
                numbers,
                numbers.random(),
                asyncio.get_running_loop().create_future(),
                watch,
            )
            self._scheduler.add(job)
            if self._loop is None or self._loop.done():
                self._loop = asyncio.create_task(self._run())
            return await job.done

    def clear_cache(self) -> None:
        """Drop every cached sequence: call it when the weights have changed.

        Limits that were halved because memory ran out are restored: the next rollout may have more of it.
        """
        if self._pool is None:
            return
        self._scheduler.drop_done()
        assert not (self._scheduler.waiting or self._scheduler.running), "the weights changed during a game"
        self._scheduler.drop_cache()
        self._scheduler.max_games = self._max_games
        self._scheduler.prefill_tokens = self._prefill_tokens

    def _allocate(self) -> None:
        self._pool = self._allocate_pool()
        self._graphs = DecodeGraphs(
            self.policy.hidden_states, self._pool, longest=self.max_tokens, capture=self._capture
        )
        self._scheduler = Scheduler(
            self._pool, max_games=self._max_games, prefill_tokens=self._prefill_tokens
        )

    async def _run(self) -> None:
        """Run steps until no job is left. After each step, games and environments get their turn."""
        scheduler = self._scheduler
        try:
            while scheduler.waiting or scheduler.running:
                scheduler.drop_done()
                scheduler.admit()
                self._step()
                await asyncio.sleep(0)
        except Exception as error:  # raised in every waiting `generate`
            scheduler.drop_cache()  # every job waits again
            scheduler.drop_done()
            for job in scheduler.waiting:
                job.done.set_exception(error)

    def _step(self) -> None:
        """One step. On out-of-memory, requeue the running jobs and retry with half the batch."""
        scheduler = self._scheduler
        try:
            self._run_schedule(scheduler.schedule())
            return
        except torch.OutOfMemoryError:
            if scheduler.max_games == 1 and scheduler.prefill_tokens == 1:
                raise
        # After the handler, because the exception keeps the tensors of the forward alive.
        scheduler.max_games = max(1, len(scheduler.running) // 2)
        scheduler.prefill_tokens = max(1, scheduler.prefill_tokens // 2)
        scheduler.drop_cache()  # the forward may not have written all rows
        torch.cuda.empty_cache()  # has no effect where CUDA is not in use
        warnings.warn(
            f"out of memory: in the rest of this rollout at most {scheduler.max_games} games decode at the "
            f"same time, and {scheduler.prefill_tokens} prompt tokens are computed beside them",
            stacklevel=2,
        )

    @torch.inference_mode()
    def _run_schedule(self, counts: dict[Job, int]) -> None:
        """Run the forward over these numbers of new tokens, and sample a token for each job that can."""
        if not counts:
            return
        assert self._pool is not None, "the pool is allocated before the first step"
        games = {job.game: count for job, count in counts.items()}
        ends = [*itertools.accumulate(counts.values())]
        # Of the jobs whose tokens are all cached, the column of the last one.
        columns = {job: end - 1 for job, end in zip(counts, ends, strict=True) if not job.uncached}
        if self._pool.flash and len(columns) == ends[-1]:  # a decode step; graphs need FlashAttention
            states = self._graphs(games)
        else:
            states = self.policy.hidden_states(PagedBatch(games, self._pool))
        if columns:
            sampled = upload(list(columns.values()), torch.int64, self._pool.device)
            self._sample(list(columns), states.index_select(0, sampled))

    def _sample(self, jobs: list[Job], hidden: Tensor) -> None:
        """Sample a token of each job from its last hidden state (R, hidden); resolve finished jobs."""
        drawn = draw(
            self.policy.logits(hidden),
            [job.temperature for job in jobs],
            [job.top_p for job in jobs],
            [job.uniform for job in jobs],
        )
        for job, (number, logprob) in zip(jobs, drawn.tolist(), strict=True):
            token = int(number)
            job.tokens.append(token)
            job.logprobs.append(logprob)
            job.uniform = job.random.random()
            if job.watch is not None:
                job.watch(token)
            finished = token in self.stop_ids
            if finished or len(job.logprobs) == job.max_new:
                self._scheduler.running.remove(job)  # its sequence stays cached for the game's next call
                job.done.set_result(Completion(job.tokens[-len(job.logprobs) :], job.logprobs, finished))
