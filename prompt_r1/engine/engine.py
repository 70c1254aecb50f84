"""Batched generation with a KV cache, on an unmodified Hugging Face model.

A call of `generate` asks for one turn of a game. It passes all tokens of the game, and the game's
`TokenSequence`, which knows how many of them are cached. Only the rest is computed. A game without cached
tokens starts from the cached sequence with the longest common prefix.

A call that has not returned is a *job*. All jobs advance together, step by step. A step has three parts:

    schedule   choose the tokens of the step: one for each job that decodes, and prompt tokens in chunks
    compute    run one forward over these tokens, packed into one row. If a job's last token is among them,
               sample its next token
    commit     count the tokens as cached, and append the sampled ones. Finished jobs leave the batch at once

A game that waits for its environment keeps its blocks while memory allows, but has no place in the batch.
"""

import asyncio
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from prompt_r1.engine.compiled_forward import CompiledForward
from prompt_r1.engine.cuda_graphs import CudaGraphs, DecodeGraphs, Forward
from prompt_r1.engine.kv_cache import BlockPool, TokenSequence, allocate_pool
from prompt_r1.engine.paged_attention import PagedBatch, upload
from prompt_r1.engine.sampling import draw
from prompt_r1.engine.scheduler import Job, Scheduler, StepLimits
from prompt_r1.errors import AgentUnusable
from prompt_r1.model.policy import Policy
from prompt_r1.types import Completion

# The most prompt tokens in a forward. They fill the device, but do not let decoding jobs wait long.
PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
# Lower temperatures count as 0 (greedy), because logits that are divided by them overflow float32. A client
# of the server may send any temperature.
MIN_TEMPERATURE = 1e-6


class Engine:
    """Generates for many games at once. Allocates its KV cache when it is made."""

    def __init__(
        self,
        policy: Policy,
        *,
        stop_ids: frozenset[int],
        max_tokens: int,
        max_sequences: int = 256,
        memory_share: float = 0.0,
        pool: BlockPool | None = None,
    ) -> None:
        """Raises UsageError if the free memory does not hold the cache of one game.

        stop_ids        the tokens that end a turn
        max_tokens      the tokens of the longest game
        max_sequences   the most games that decode at the same time
        memory_share    the share of the free memory for the KV cache; 0: the default of the device
        pool            a KV cache of another size, for tests and benchmarks
        """
        self.policy = policy
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self._pool = pool or allocate_pool(
            policy, max_tokens=max_tokens, max_sequences=max_sequences, memory_share=memory_share
        )
        self._forward: Forward = policy.hidden_states
        self._graphs: DecodeGraphs | None = None
        if self._pool.flash:  # Without FlashAttention, a forward cannot be captured.
            self._forward = CompiledForward(policy)
            self._graphs = DecodeGraphs(self._forward, self._pool, longest=max_tokens, capture=CudaGraphs())
        self._limits = StepLimits(max_sequences, PREFILL_TOKENS[policy.device.type])
        self._scheduler = Scheduler(self._pool, self._limits)
        self._sequence_numbers = itertools.count()
        self._loop: asyncio.Task[None] | None = None

    @contextmanager
    def new_sequence(self) -> Iterator[TokenSequence]:
        """The sequence of a new game. Its cache is dropped at the end of the context."""
        sequence = TokenSequence(next(self._sequence_numbers))
        try:
            yield sequence
        finally:
            self._scheduler.evict([sequence])

    async def generate(
        self,
        tokens: list[int],
        *,
        max_new: int,
        seed: str,
        sequence: TokenSequence | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        watch: Callable[[int], None] | None = None,
    ) -> Completion:
        """Sample the tokens that follow `tokens`, up to a stop token.

            max_new       the most tokens to sample
            sequence      the game's sequence, from `new_sequence`; None: a new one for this call. A sequence
                          takes one call at a time
            temperature   0 takes the most likely token
            watch         is called with each sampled token

        The sampled tokens depend only on the weights and the arguments, not on the games that run at the same
        time. Their log-probabilities are log_softmax(logits / temperature) over the whole vocabulary; at
        temperature 0, log_softmax(logits). Raises ValueError if the tokens do not fit, and AgentUnusable if
        the model's logits are not finite.
        """
        if not (temperature >= 0 and 0 < top_p <= 1):
            raise ValueError(f"{temperature=} must be at least 0, and {top_p=} in (0, 1]")
        if not 0 < len(tokens) <= self.max_tokens - max_new or max_new < 1:
            raise ValueError(
                f"{len(tokens)} tokens and {max_new} new ones do not fit a game of {self.max_tokens}"
            )
        if temperature < MIN_TEMPERATURE:
            temperature = 0.0
        own_sequence = self.new_sequence() if sequence is None else nullcontext(sequence)
        with own_sequence as used_sequence:
            job = Job(
                sequence=used_sequence,
                tokens=[*tokens],
                max_new=max_new,
                temperature=temperature,
                top_p=top_p,
                rng=random.Random(seed),
                done=asyncio.get_running_loop().create_future(),
                watch=watch,
            )
            self._scheduler.add(job)
            if self._loop is None or self._loop.done():
                self._loop = asyncio.create_task(self._run())
            return await job.done

    def drop_cache(self) -> None:
        """Drop every cached sequence. Call it when the weights have changed, and after the last game.

        No game may be generating.
        """
        scheduler = self._scheduler
        scheduler.drop_done()
        assert not scheduler.has_jobs, "the weights changed during a game"
        scheduler.drop_cache()

    async def _run(self) -> None:
        """Run steps until no job is left. After each step, games and environments get their turn."""
        scheduler = self._scheduler
        scheduler.limits = self._limits  # An earlier run may have halved them, when memory ran out.
        try:
            while scheduler.has_jobs:
                scheduler.drop_done()
                scheduler.admit()
                self._step()
                await asyncio.sleep(0)
        except Exception as error:
            scheduler.fail_all(error)

    def _step(self) -> None:
        """One step. On out-of-memory, requeue the running jobs and retry with half the batch."""
        scheduler = self._scheduler
        counts = scheduler.schedule()
        if not counts:  # All jobs have been cancelled. (The oldest job always finds room.)
            return
        drawn = None
        try:
            drawn = self._compute(counts)
        except torch.OutOfMemoryError:
            if scheduler.limits == StepLimits(1, 1):
                raise
        if drawn is None:
            # Memory ran out. The cache is freed here and not in the handler, because the exception, which
            # holds the forward's tensors, is gone only now.
            self._requeue()
            return
        scheduler.commit(counts)
        for job, (token, logprob) in drawn.items():
            self._append(job, token, logprob)

    def _requeue(self) -> None:
        """After an out-of-memory, free the cache. All jobs wait again.

        From now on, half as many jobs run as did in this step, with half of the prompt tokens.
        """
        scheduler = self._scheduler
        limits = StepLimits(len(scheduler.running), scheduler.limits.prompt_tokens).halved()
        scheduler.limits = limits
        scheduler.drop_cache()
        torch.cuda.empty_cache()  # This has no effect on a CPU.
        warnings.warn(
            f"out of memory: until the engine is idle, at most {limits.sequences} games decode at the same "
            f"time, and {limits.prompt_tokens} prompt tokens are computed beside them",
            stacklevel=2,
        )

    @torch.inference_mode()
    def _compute(self, counts: dict[Job, int]) -> dict[Job, tuple[int, float]]:
        """Run one forward over the next `counts` tokens of each job.

        Returns a sampled token, and its log-probability, for each job whose last token is among them.
        """
        # 1. Pack the new tokens of all jobs into one row. The hidden state of a job's last token gives the
        #    next token.
        new_tokens: dict[TokenSequence, list[int]] = {}
        sampling: list[Job] = []
        last_tokens: list[int] = []  # their places in the row
        width = 0
        for job, count in counts.items():
            new_tokens[job.sequence] = job.next_tokens(count)
            width += count
            if count == job.uncached:
                sampling.append(job)
                last_tokens.append(width - 1)
        # 2. Run one forward. If every job has one token, a CUDA graph can replay this decode step.
        if self._graphs is not None and self._graphs.fits(new_tokens):
            hidden = self._graphs(new_tokens)
        else:
            hidden = self._forward(PagedBatch(new_tokens, self._pool))
        # 3. Sample.
        if not sampling:
            return {}
        chosen = upload(last_tokens, torch.int64, self._pool.device)
        drawn = draw(
            self.policy.logits(hidden.index_select(0, chosen)),
            temperatures=[job.temperature for job in sampling],
            top_ps=[job.top_p for job in sampling],
            uniforms=[job.next_random for job in sampling],
        )
        pairs = zip(sampling, drawn.tolist(), strict=True)
        return {job: (int(token), logprob) for job, (token, logprob) in pairs}

    def _append(self, job: Job, token: int, logprob: float) -> None:
        """Append a sampled token to a job, and resolve the job if this was its last token."""
        if not math.isfinite(logprob):
            raise AgentUnusable(
                "the model's logits are NaN or infinite, so no token can be sampled: its weights have "
                "diverged (give a smaller --lr) or do not suit 16 bits (give --dtype float32)"
            )
        job.tokens.append(token)
        job.logprobs.append(logprob)
        # A job gets its next random number only here. So a step that is repeated after an out-of-memory draws
        # the same token.
        job.next_random = job.rng.random()
        if job.watch is not None:
            job.watch(token)
        finished = token in self.stop_ids
        if finished or len(job.logprobs) == job.max_new:
            self._scheduler.finish(job)
            sampled = job.tokens[-len(job.logprobs) :]
            job.done.set_result(Completion(sampled, job.logprobs, finished))
