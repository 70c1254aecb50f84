"""Batched generation with a KV cache of our own, on an unmodified Hugging Face model.

The interface is stateless: `generate(tokens)`. The engine finds by itself the cached sequence that shares the
longest prefix with the tokens: it continues there when that is the rest of the same game, and copies the
prefix when it belongs to another (the games of a group share their question). So the cache lives over the
turns of a game, and a question is computed once for its group.

    admit      waiting requests get a place in the arena, sized for this turn, as far as memory goes;
               what was not used for longest is dropped for them
    advance    one forward of all that runs, a ragged batch of one packed row: one token each for those
               that decode, and the next prompt tokens in chunks, few enough to keep the others going
    sample     those whose tokens are all cached draw one more; who is finished leaves the batch at once

A game that waits for its environment keeps its cache, as long as memory lasts, but no place in the batch.
"""

import asyncio
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from prompt_r1.agent.attention import Chunk, Ragged, choose_kernel
from prompt_r1.agent.cuda_graphs import DecodeGraphs, Decoding, Record, recorder
from prompt_r1.agent.kv_cache import Arena, Segment, affordable_rows, best_source, common_prefix, kv_shape
from prompt_r1.agent.policy import Policy
from prompt_r1.agent.sampling import Sampling, draw
from prompt_r1.errors import UsageError
from prompt_r1.types import Completion

PREFILL = {"cpu": 512, "cuda": 8192}  # prompt tokens of a forward: they fill the device, others wait little
PATIENCE = 16  # steps that prompts wait for one another where decoding alone is much faster


@dataclass(eq=False)
class Job:
    """One call of `generate`."""

    tokens: list[int]  # prompt, then what was sampled
    prompt_length: int
    max_new: int
    sampling: Sampling
    stop: tuple[str, ...]
    random: random.Random
    done: asyncio.Future[Completion]
    watch: Callable[[int], None] | None = None
    logprobs: list[float] = field(default_factory=list)
    number: float = field(init=False)  # in [0, 1): what its next token is drawn with

    def __post_init__(self) -> None:
        self.number = self.random.random()

    @property
    def room(self) -> int:
        """Rows that it may need: its last token is sampled, but never fed."""
        return self.prompt_length + self.max_new - 1


class Engine:
    """Generates for many games at once; `forget` when the weights have changed."""

    def __init__(
        self,
        policy: Policy,
        *,
        stop_ids: frozenset[int],
        max_tokens: int,
        kv_tokens: int = 0,
        max_games: int = 256,
        prefill_tokens: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        record: Record | None = None,
    ) -> None:
        """A cache of `kv_tokens` tokens, allocated at the first request (0: what memory allows then), for
        games of at most `max_tokens`. At most `max_games` decode at the same time, and `prefill_tokens`
        prompt tokens (0: as suits the device) are computed beside them. `decode` gives the text of tokens,
        for stop strings. `record` is how a decode step is recorded (None: as CUDA graphs, on GPUs).
        """
        if 0 < kv_tokens < max_tokens:
            raise UsageError(f"a KV cache of {kv_tokens} tokens does not hold one game of {max_tokens}")
        self.policy = policy
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self.kv_tokens = kv_tokens
        self.max_games = max_games
        self.prefill_tokens = prefill_tokens or PREFILL[policy.device.type]
        self.prefilled = 0  # prompt tokens computed, for tests and reports
        self.sampled = 0
        self._decode = decode
        self._text = cache(lambda token: decode([token])) if decode else None
        self._record = record
        self._arena: Arena | None = None
        self._graphs: DecodeGraphs | None = None
        self._held = 0  # steps that prompts have waited
        self._segments: list[Segment] = []  # idle ones keep their tokens for whoever continues them
        self._running: dict[Job, Segment] = {}
        self._waiting: list[Job] = []
        self._clock = 0
        self._loop: asyncio.Task[None] | None = None

    async def generate(
        self,
        tokens: list[int],
        *,
        max_new: int,
        seed: str,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: tuple[str, ...] = (),
        watch: Callable[[int], None] | None = None,
    ) -> Completion:
        """ScoredGame the next tokens until a stop token, the end of a `stop` string or `max_new` tokens.

        Temperature 0 takes the likeliest token. The log-probabilities are those of softmax(logits /
        temperature) over the whole vocabulary, or of softmax(logits) when greedy. What is sampled depends on
        the weights, the tokens and these arguments, not on the games that run beside. `watch` is called with
        each token as it is sampled.
        """
        if not 0 < len(tokens) <= self.max_tokens - max_new or max_new < 1:
            raise ValueError(f"{len(tokens)} tokens and {max_new} new ones do not fit a game of "
                             f"{self.max_tokens}")  # fmt: skip
        assert not stop or self._decode, "stop strings need an engine that can decode"
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        sampling = Sampling(temperature, top_p, top_k)
        job = Job(list(tokens), len(tokens), max_new, sampling, stop, random.Random(seed), done, watch)
        self._waiting.append(job)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await done

    def clear_cache(self) -> None:
        """Drop every cached sequence: call it when the weights have changed."""
        self._drop_cancelled()
        assert not self._running and not self._waiting, "the weights changed under a running game"
        self._segments = []

    async def _run(self) -> None:
        """Admit, advance by one forward, let games and environments act; until nothing is left to do."""
        try:
            if self._arena is None:
                self._allocate()
            while self._waiting or self._running:
                self._drop_cancelled()
                self._admit()
                self._step()
                await asyncio.sleep(0)
        except Exception as error:  # whoever waits for tokens is told
            jobs = [*self._waiting, *self._running]
            self._waiting, self._running, self._segments = [], {}, []
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(error)

    def _allocate(self) -> None:
        """At the first request, not before: an engine that never plays takes no memory."""
        policy = self.policy
        rows = self.kv_tokens or min(affordable_rows(policy), self.max_games * self.max_tokens)
        if rows < self.max_tokens:
            raise UsageError(f"the free memory holds a KV cache of {rows} tokens, a game may take "
                             f"{self.max_tokens}: give --max-tokens less")  # fmt: skip
        _, kv_heads, dim = kv_shape(policy)
        heads = policy.model.config.num_attention_heads
        self._kernel = choose_kernel(policy.device, policy.compute, heads, kv_heads, dim)
        try:
            self._arena = Arena(policy, rows)
        except RuntimeError:
            raise UsageError(
                f"there is no memory for a KV cache of {rows:,} tokens: give --kv-tokens less"
            ) from None
        record = self._record or recorder(self._kernel)
        if record is not None:
            self._graphs = DecodeGraphs(
                self._hidden, self._arena, self._kernel, longest=self.max_tokens, record=record
            )

    def _step(self) -> None:
        """Advance. Where memory runs out, who ran goes on from its tokens again, half as many at a time."""
        try:
            return self._advance()
        except torch.OutOfMemoryError:
            if self.max_games == self.prefill_tokens == 1:
                raise
        # Not in the handler: its error holds what the forward had allocated.
        self.max_games = max(1, len(self._running) // 2)
        self.prefill_tokens = max(1, self.prefill_tokens // 2)
        broken = set(self._running.values())  # what the forward has written of them is not known
        self._segments = [segment for segment in self._segments if segment not in broken]
        self._waiting, self._running = [*self._running, *self._waiting], {}
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        warnings.warn(f"out of memory: now at most {self.max_games} games decode at the same time, and "
                      f"{self.prefill_tokens} prompt tokens beside them", stacklevel=2)  # fmt: skip

    def _drop_cancelled(self) -> None:
        self._waiting = [job for job in self._waiting if not job.done.done()]
        for job in [job for job in self._running if job.done.done()]:
            del self._running[job]

    def _admit(self) -> None:
        """Give waiting jobs a place, first come first served: one that does not fit waits for those that
        run, and all behind it too, so that none starves. Every place is as large as its turn can become: who
        runs can finish, so waiting ends.
        """
        waiting, self._waiting = self._waiting, []
        for number, job in enumerate(waiting):
            if len(self._running) == self.max_games:
                self._waiting += waiting[number:]
                return
            if self._prefix_is_coming(job):
                self._waiting.append(job)
            elif not self._place(job):
                self._waiting += waiting[number:]
                return

    def _prefix_is_coming(self, job: Job) -> bool:
        """Is another job computing much of what this one wants? Then copying it in a moment is cheaper."""
        for other, segment in self._running.items():
            cached, end = len(segment.tokens), other.prompt_length
            if cached < end and other.tokens[0] == job.tokens[0]:
                coming = common_prefix(other.tokens[:end], job.tokens)
                if coming > cached and coming > len(job.tokens) // 2:
                    return True
        return False

    def _place(self, job: Job) -> bool:
        """Let the job run in a segment that begins with the longest cached prefix of its tokens."""
        busy, arena = set(self._running.values()), self._arena
        assert arena is not None, "it is allocated before the first game is admitted"
        source, shared, moves = best_source(self._segments, busy, job.tokens)
        place = arena.make_room(job.room, self._segments, busy, source, moves=moves)
        if place is None:
            return False
        start, self._segments = place
        segment = Segment(start, job.room, [])
        if source is not None:
            arena.copy(source.start, start, shared)
            segment.tokens = job.tokens[:shared]
            segment.ends = {length: end for length, end in source.ends.items() if length <= shared}
        self._segments.append(segment)
        self._running[job] = segment
        return True

    @torch.inference_mode()
    def _advance(self) -> None:
        """One packed forward of all that runs; those whose tokens are all cached then sample one more."""
        self._clock += 1
        chunks: list[Chunk] = []
        ids: list[int] = []
        complete: list[Job] = []
        last: list[int] = []  # the columns of their newest tokens
        known: list[Tensor] = []  # hidden states that need no forward
        budget = self._prompt_budget()
        # The shortest prompts first: a reply does not wait behind a long question.
        for job, segment in sorted(
            self._running.items(), key=lambda pair: len(pair[0].tokens) - len(pair[1].tokens)
        ):
            segment.last_used = self._clock
            cached = len(segment.tokens)
            fresh = job.tokens[cached:]
            if not fresh:  # another game has had the same prompt
                known.append(segment.ends[cached])
                complete.insert(len(known) - 1, job)
                continue
            if cached < job.prompt_length or len(fresh) > 1:  # more than one: its cache was lost
                fresh = fresh[:budget]
                budget -= len(fresh)
                self.prefilled += len(fresh)
                if not fresh:
                    continue
            segment.tokens += fresh
            chunks.append(Chunk(len(ids), len(fresh), segment.start, len(segment.tokens)))
            ids += fresh
            if len(segment.tokens) == len(job.tokens):
                complete.append(job)
                last.append(len(ids) - 1)
        hidden = [*(state[None] for state in known)]
        if chunks:
            hidden.append(self._forward(ids, chunks)[last])
        if complete:
            self._sample(torch.cat(hidden), complete)

    def _prompt_budget(self) -> int:
        """Prompt tokens of this step. A step that only decodes is far cheaper as a graph, so there prompts
        wait for one another: until they fill a forward, have waited long, or nothing decodes.
        """
        missing = [job.prompt_length - len(segment.tokens) for job, segment in self._running.items()]
        prompts = [count for count in missing if count > 0]
        full = len(prompts) == len(missing) or sum(prompts) >= self.prefill_tokens
        waits = self._graphs is not None and bool(prompts) and not full and self._held < PATIENCE
        self._held = self._held + 1 if waits else 0
        return 0 if waits else self.prefill_tokens

    def _forward(self, ids: list[int], chunks: list[Chunk]) -> Tensor:
        """Last hidden states (T, hidden) of a packed row; its keys and values are then in the arena."""
        if self._graphs is not None and self._graphs.takes(chunks):
            return self._graphs(ids, chunks)
        device, arena = self.policy.device, self._arena
        assert arena is not None
        ragged = Ragged(arena.keys, arena.values, chunks, device, self._kernel)
        return self._hidden(torch.tensor(ids, device=device), ragged)

    def _hidden(self, tokens: Tensor, ragged: Ragged | Decoding) -> Tensor:
        positions = ragged.positions[None]
        return self.policy.hidden_states(tokens[None], position_ids=positions, ragged=ragged)[0]

    def _sample(self, hidden: Tensor, jobs: list[Job]) -> None:
        """Draw one token a job with its own next random number, and tell those that are finished."""
        for row, job in enumerate(jobs):
            if not job.logprobs:
                self._running[job].ends[job.prompt_length] = hidden[row].clone()
        logits, sampling = self.policy.logits(hidden), [job.sampling for job in jobs]
        drawn = draw(logits, sampling, [job.number for job in jobs])
        self.sampled += len(jobs)
        for job, token, logprob in zip(jobs, drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True):
            job.tokens.append(token)
            job.logprobs.append(logprob)
            job.number = job.random.random()
            if job.watch is not None:
                job.watch(token)
            finished = token in self.stop_ids or self._closes(job)
            if finished or len(job.logprobs) == job.max_new:
                del self._running[job]
                job.done.set_result(Completion(job.tokens[job.prompt_length :], job.logprobs, finished))

    def _closes(self, job: Job) -> bool:
        """Has the newest token completed a stop string? Only what was sampled counts."""
        decode, text = self._decode, self._text  # both there where anything can stop
        if decode is None or text is None or not any(stop[-1] in text(job.tokens[-1]) for stop in job.stop):
            return False
        reach = max(map(len, job.stop))  # every token has at least one character of the string
        tail = decode(job.tokens[max(job.prompt_length, len(job.tokens) - reach) :])
        return any(stop in tail for stop in job.stop)
