"""Batched generation with a KV cache of its own, on an unmodified Hugging Face model.

The interface is stateless: `generate(tokens)`. The engine finds the cached sequence that shares the longest
prefix with the tokens. If the tokens continue that sequence, it is extended in place; if another game uses
it, the prefix is copied. So the cache is reused over the turns of a game, and the question of a group is
computed once.

A step has three parts:

    schedule      admit waiting jobs while the arena has room, evicting idle sequences if necessary; then
                  choose the tokens of the step: one for each job that decodes, and prompt tokens in
                  chunks, few enough that decoding goes on beside them
    run           one forward over these tokens, packed into one row
    postprocess   sample the next token of every job whose tokens are all cached; jobs that are finished
                  leave the batch at once

While a game waits for its environment, it keeps its cached sequence as long as memory allows, but takes no
place in the batch.
"""

import asyncio
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from prompt_r1.agent.cuda_graphs import DecodeBatch, Decoded, DecodeGraphs, Record, step_recorder
from prompt_r1.agent.decode_kernels import Chunk, RaggedBatch, upload
from prompt_r1.agent.kv_cache import (
    Arena,
    CachedPrefix,
    Segment,
    affordable_rows,
    common_prefix_length,
    find_prefix,
)
from prompt_r1.agent.policy import Policy
from prompt_r1.agent.sampling import Sampling, SamplingMix, draw, settings_row
from prompt_r1.errors import UsageError
from prompt_r1.types import Completion

# Prompt tokens in a forward: enough to fill the device, few enough that decoding does not wait long.
PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
# With CUDA graphs, prompts wait at most this many steps to be computed together.
MAX_PROMPT_WAIT = 16


@dataclass(eq=False)
class Job:
    """One call of `generate`."""

    tokens: list[int]  # prompt, then the sampled tokens
    prompt_length: int
    max_new: int
    sampling: Sampling
    stop: tuple[str, ...]
    random: random.Random
    done: asyncio.Future[Completion]
    watch: Callable[[int], None] | None = None
    logprobs: list[float] = field(default_factory=list)
    uniform: float = field(init=False)  # in [0, 1): the random number for its next token

    def __post_init__(self) -> None:
        self.uniform = self.random.random()

    @property
    def rows(self) -> int:
        """Arena rows that it may need. Its last token is sampled, but never goes through the model."""
        return self.prompt_length + self.max_new - 1


@dataclass
class Schedule:
    """The work of one step."""

    tokens: list[int] = field(default_factory=list)  # (T,) the packed row
    chunks: list[Chunk] = field(default_factory=list)  # its sequences
    # Jobs that sample without a forward: the last hidden state of their prompt is stored.
    known: list[Job] = field(default_factory=list)
    # Jobs that sample after the forward, with the column of their newest token.
    columns: dict[Job, int] = field(default_factory=dict)

    @property
    def jobs(self) -> list[Job]:
        """All jobs that sample in this step."""
        return [*self.known, *self.columns]

    def add(self, job: Job, segment: Segment, tokens: list[int]) -> None:
        """Append the job's next tokens, already counted as cached in its segment, to the row."""
        self.chunks.append(Chunk(len(self.tokens), len(tokens), segment.start, len(segment.tokens)))
        self.tokens += tokens
        if len(segment.tokens) == len(job.tokens):
            self.columns[job] = len(self.tokens) - 1


class Engine:
    """Generates for many games at once. Call `clear_cache` when the weights have changed."""

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
        """Memory is allocated at the first request.

        `max_tokens`: of a game. `kv_tokens`: of the KV cache (0: as much as free memory allows). `max_games`:
        that decode at the same time. `prefill_tokens`: prompt tokens in a forward (0: a default for the
        device). `decode`: turns tokens into text, to find stop strings. `record`: records decode steps (None:
        as CUDA graphs, on GPUs). Raises UsageError if the cache does not hold one game.
        """
        if 0 < kv_tokens < max_tokens:
            raise UsageError(f"a KV cache of {kv_tokens} tokens does not hold one game of {max_tokens}")
        self.policy = policy
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self.kv_tokens = kv_tokens
        self.max_games = max_games
        self.prefill_tokens = prefill_tokens or PREFILL_TOKENS[policy.device.type]
        self._limits = (self.max_games, self.prefill_tokens)  # halved when memory runs out
        self.prefilled = 0  # prompt tokens computed, for tests and reports
        self.sampled = 0
        self._decode = decode
        self._may_end = cache(self._may_end_stop_string)
        self._record = record
        self._arena: Arena | None = None
        self._graphs: DecodeGraphs | None = None
        self._prompt_wait = 0  # steps that prompts have waited
        self._segments: list[Segment] = []  # idle ones keep their tokens for later turns and other games
        self._running: dict[Job, Segment] = {}
        self._waiting: list[Job] = []
        self._steps = 0
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
        """Sample the next tokens until a stop token, the end of a `stop` string, or `max_new` tokens.

        Temperature 0 takes the most likely token. The log-probabilities are those of softmax(logits /
        temperature) over the whole vocabulary, or of softmax(logits) at temperature 0. The result depends on
        the weights, the tokens and these arguments only, not on the games that run at the same time. `watch`
        is called with each token as it is sampled. Raises ValueError if the tokens do not fit a game.
        """
        if not 0 < len(tokens) <= self.max_tokens - max_new or max_new < 1:
            raise ValueError(
                f"{len(tokens)} tokens and {max_new} new ones do not fit a game of {self.max_tokens}"
            )
        assert not stop or self._decode, "stop strings need an engine with `decode`"
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        sampling = Sampling(temperature, top_p, top_k)
        job = Job(list(tokens), len(tokens), max_new, sampling, stop, random.Random(seed), done, watch)
        self._waiting.append(job)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await done

    def clear_cache(self) -> None:
        """Drop every cached sequence: call it when the weights have changed.

        Limits that were halved because memory ran out are restored: the next rollout may have more of it.
        """
        self._drop_cancelled()
        assert not self._running and not self._waiting, "the weights changed during a game"
        self._segments = []
        self.max_games, self.prefill_tokens = self._limits
        if self._graphs is not None:
            self._graphs.resume()

    async def _run(self) -> None:
        """Run steps until no job is left. After each step, games and environments get their turn."""
        try:
            if self._arena is None:
                self._allocate_arena()
            while self._waiting or self._running:
                self._drop_cancelled()
                self._admit()
                self._step()
                await asyncio.sleep(0)
        except Exception as error:  # raised in every waiting `generate`
            jobs = [*self._waiting, *self._running]
            self._waiting, self._running, self._segments = [], {}, []
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(error)

    def _allocate_arena(self) -> None:
        """Called at the first request, so an engine that never plays takes no memory."""
        policy = self.policy
        rows = self.kv_tokens or min(affordable_rows(policy), self.max_games * self.max_tokens)
        if rows < self.max_tokens:
            raise UsageError(
                f"the free memory holds a KV cache of {rows} tokens, but a game may have {self.max_tokens}: "
                "lower --max-tokens"
            )
        self._kernel = policy.decode_kernel()
        try:
            self._arena = Arena(policy, rows)
        except RuntimeError:
            raise UsageError(
                f"not enough memory for a KV cache of {rows:,} tokens: lower --kv-tokens"
            ) from None
        record = self._record or step_recorder(self._kernel)
        if record is not None:
            self._graphs = DecodeGraphs(
                self._hidden_states,
                self._sample,
                self._arena,
                self._kernel,
                longest=self.max_tokens,
                record=record,
            )

    def _drop_cancelled(self) -> None:
        self._waiting = [job for job in self._waiting if not job.done.done()]
        for job in list(self._running):
            if job.done.done():
                del self._running[job]

    # Schedule

    def _admit(self) -> None:
        """Give waiting jobs a segment of the arena, first come, first served.

        A job that does not fit waits, and so do all jobs behind it, so that none starves. A segment is as
        large as its turn can become: a running job can always finish.
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
        """Whether a running job is computing a prefix that is worth waiting for: copying it is cheaper."""
        for other, segment in self._running.items():
            cached, end = len(segment.tokens), other.prompt_length
            if cached < end and other.tokens[0] == job.tokens[0]:
                coming = common_prefix_length(other.tokens[:end], job.tokens)
                if coming > cached and coming > len(job.tokens) // 2:
                    return True
        return False

    def _place(self, job: Job) -> bool:
        """Start a job in a segment that begins with its longest cached prefix. False if the arena is full."""
        arena = self._arena
        assert arena is not None, "the arena is allocated before the first job is admitted"
        busy = set(self._running.values())
        prefix = self._find_prefix(job.tokens, busy)
        allocation = arena.allocate(job.rows, self._segments, busy, prefix)
        if allocation is None:
            return False
        segment = Segment(allocation.start, job.rows, [])
        if prefix is not None:
            arena.copy(prefix.segment.start, segment.start, prefix.length)
            segment.tokens = job.tokens[: prefix.length]
            for length, state in prefix.segment.end_states.items():
                if length <= prefix.length:
                    segment.end_states[length] = state
        self._segments = [*allocation.remaining, segment]
        self._running[job] = segment
        return True

    def _find_prefix(self, tokens: list[int], busy: set[Segment]) -> CachedPrefix | None:
        return find_prefix(self._segments, busy, tokens)

    def _schedule(self) -> Schedule:
        """Choose the tokens of the next forward, and the jobs that sample after it."""
        schedule = Schedule()
        prompt_budget = self._prompt_budget()

        def uncached(job: Job) -> int:
            return len(job.tokens) - len(self._running[job].tokens)

        # The shortest prompts first: a short reply does not wait for a long question.
        for job in sorted(self._running, key=uncached):
            segment = self._running[job]
            segment.last_used = self._steps
            cached = len(segment.tokens)
            new = job.tokens[cached:]
            if not new:  # another game has computed the same prompt
                schedule.known.append(job)
                continue
            if cached < job.prompt_length or len(new) > 1:  # a prompt, or a sequence that lost its cache
                new = new[:prompt_budget]
                prompt_budget -= len(new)
                self.prefilled += len(new)
                if not new:
                    continue
            segment.tokens += new
            schedule.add(job, segment, new)
        return schedule

    def _prompt_budget(self) -> int:
        """How many prompt tokens this step may compute.

        With CUDA graphs, a step that only decodes is far cheaper. So prompts wait until they fill a forward,
        have waited for MAX_PROMPT_WAIT steps, or no job decodes.
        """
        missing = [job.prompt_length - len(segment.tokens) for job, segment in self._running.items()]
        prompts = [count for count in missing if count > 0]
        nothing_decodes = len(prompts) == len(missing)
        fills_forward = sum(prompts) >= self.prefill_tokens
        if (
            self._graphs is None
            or not prompts
            or nothing_decodes
            or fills_forward
            or self._prompt_wait >= MAX_PROMPT_WAIT
        ):
            self._prompt_wait = 0
            return self.prefill_tokens
        self._prompt_wait += 1
        return 0

    # Run

    def _step(self) -> None:
        """One step. On out-of-memory, requeue the running jobs and retry with half the batch."""
        try:
            self._schedule_and_run()
            return
        except torch.OutOfMemoryError:
            if self.max_games == 1 and self.prefill_tokens == 1:
                raise
        # After the handler, because the exception keeps the tensors of the forward alive.
        self.max_games = max(1, len(self._running) // 2)
        self.prefill_tokens = max(1, self.prefill_tokens // 2)
        incomplete = set(self._running.values())  # the forward may not have written all their rows
        self._segments = [segment for segment in self._segments if segment not in incomplete]
        self._waiting, self._running = [*self._running, *self._waiting], {}
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        warnings.warn(
            f"out of memory: in the rest of this rollout at most {self.max_games} games decode at the same "
            f"time, and {self.prefill_tokens} prompt tokens are computed beside them",
            stacklevel=2,
        )

    @torch.inference_mode()
    def _schedule_and_run(self) -> None:
        self._steps += 1
        schedule = self._schedule()
        decoded = self._run_schedule(schedule)
        if decoded is not None:
            self._postprocess(schedule.jobs, decoded)

    def _run_schedule(self, schedule: Schedule) -> Decoded | None:
        """Run the forward, and sample a token for each of `schedule.jobs`; None if there are none."""
        jobs, tokens, chunks = schedule.jobs, schedule.tokens, schedule.chunks
        hidden = [self._running[job].end_states[len(job.tokens)][None] for job in schedule.known]
        settings = [settings_row(job.sampling, job.uniform) for job in jobs]
        mix = SamplingMix.of([job.sampling for job in jobs])
        all_sample = 0 < len(chunks) == len(schedule.columns)
        if all_sample and self._graphs is not None and self._graphs.can_run(chunks, mix):
            decoded = self._graphs(tokens, chunks, settings[len(hidden) :], mix)
            if not hidden:
                return decoded
            known = torch.cat(hidden)
            drawn = self._sample(known, self._upload_settings(settings[: len(known)]), mix)
            return Decoded(torch.cat([known, decoded.hidden]), torch.cat([drawn, decoded.drawn]))
        if chunks:
            columns = upload(list(schedule.columns.values()), torch.int64, self.policy.device)
            hidden.append(self._forward(tokens, chunks).index_select(0, columns))
        if not jobs:
            return None
        states = torch.cat(hidden)
        return Decoded(states, self._sample(states, self._upload_settings(settings), mix))

    def _upload_settings(self, settings: list[list[float]]) -> Tensor:
        return upload(settings, torch.float64, self.policy.device)

    def _forward(self, tokens: list[int], chunks: list[Chunk]) -> Tensor:
        """Last hidden states (T, hidden) of a packed row. Writes its keys and values to the arena."""
        device, arena = self.policy.device, self._arena
        assert arena is not None, "the arena is allocated before the first forward"
        batch = RaggedBatch(arena.keys, arena.values, chunks, device, self._kernel)
        return self._hidden_states(upload(tokens, torch.int64, device), batch)

    def _hidden_states(self, tokens: Tensor, batch: RaggedBatch | DecodeBatch) -> Tensor:
        positions = batch.positions[None]
        return self.policy.hidden_states(tokens[None], position_ids=positions, ragged=batch)[0]

    def _sample(self, hidden: Tensor, settings: Tensor, mix: SamplingMix) -> Tensor:
        """(R, 2) float64: tokens and log-probabilities, packed so that one copy brings both to the host."""
        drawn = draw(self.policy.logits(hidden), settings, mix)
        return torch.stack([drawn.tokens.double(), drawn.logprobs.double()], dim=1)

    # Postprocess

    def _postprocess(self, jobs: list[Job], decoded: Decoded) -> None:
        """Append the sampled token of each job, and resolve the jobs that are finished."""
        for row, job in enumerate(jobs):
            if not job.logprobs:
                self._running[job].end_states[job.prompt_length] = decoded.hidden[row].clone()
        self.sampled += len(jobs)
        for job, (number, logprob) in zip(jobs, decoded.drawn.tolist(), strict=True):
            token = int(number)
            job.tokens.append(token)
            job.logprobs.append(logprob)
            job.uniform = job.random.random()
            if job.watch is not None:
                job.watch(token)
            finished = token in self.stop_ids or self._completes_stop_string(job)
            if finished or len(job.logprobs) == job.max_new:
                del self._running[job]
                job.done.set_result(Completion(job.tokens[job.prompt_length :], job.logprobs, finished))

    def _completes_stop_string(self, job: Job) -> bool:
        """Whether the newest token ends a stop string that lies completely in the sampled tokens."""
        if not job.stop or self._decode is None or not self._may_end(job.tokens[-1], job.stop):
            return False
        # Each token of the string has at least one of its characters.
        most_tokens = max(len(string) for string in job.stop)
        start = max(job.prompt_length, len(job.tokens) - most_tokens)
        tail = self._decode(job.tokens[start:])
        return any(string in tail for string in job.stop)

    def _may_end_stop_string(self, token: int, stop: tuple[str, ...]) -> bool:
        """Whether a token's text has the last character of a stop string."""
        assert self._decode is not None, "stop strings need an engine with `decode`"
        text = self._decode([token])
        return any(string[-1] in text for string in stop)
