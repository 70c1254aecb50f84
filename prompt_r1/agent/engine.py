"""Batched generation with a KV cache, on an unmodified Hugging Face model.

The interface is stateless: `generate(tokens)`. The engine finds the cached sequence that shares the longest
prefix with the tokens. If the tokens continue that sequence, it is extended in place; if another game uses
it, the rows of a common prompt are shared (on GPUs), and other prefixes copied. So the cache is reused over
the turns of a game, and the question of a group is computed once.

A step has three parts:

    schedule      admit waiting jobs while the arena has room, and choose the tokens of the step: one for
                  each job that decodes, and prompt tokens in chunks (scheduler.py)
    run           one forward over these tokens, packed into one row
    postprocess   sample the next token of every job whose tokens are all cached; jobs that are finished
                  leave the batch at once

While a game waits for its environment, it keeps its cached sequence as long as memory allows, but takes no
place in the batch.
"""

import asyncio
import random
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from prompt_r1.agent.cuda_graphs import Decoded, DecodeGraphs, Record, step_recorder
from prompt_r1.agent.decode_kernels import Chunk, RaggedBatch, ragged_batch, upload
from prompt_r1.agent.kv_cache import Arena, allocate_arena
from prompt_r1.agent.policy import Policy
from prompt_r1.agent.sampling import Sampling, SamplingMix, draw, settings_row
from prompt_r1.agent.scheduler import Job, Schedule, Scheduler
from prompt_r1.errors import UsageError
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
        record: Record | None = None,
        share_prompts: bool | None = None,
    ) -> None:
        """Memory is allocated at the first request: an engine that never plays takes none.

        `max_tokens`: of a game. `kv_tokens`: of the KV cache (0: as much as free memory allows). `max_games`:
        that decode at the same time. `prefill_tokens`: prompt tokens in a forward (0: a default for the
        device). `record`: records decode steps (None: as CUDA graphs, on GPUs). `share_prompts`: whether
        games with the same prompt share its rows of the cache, instead of copying them (None: on GPUs).

        Raises UsageError if the cache does not hold one game.
        """
        if 0 < kv_tokens < max_tokens:
            raise UsageError(f"a KV cache of {kv_tokens} tokens does not hold one game of {max_tokens}")
        self.policy = policy
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self.kv_tokens = kv_tokens
        self._reserved: Callable[[], float] = lambda: 0.0
        self._max_games = max_games
        self._prefill_tokens = prefill_tokens or PREFILL_TOKENS[policy.device.type]
        self.prefilled = 0  # prompt tokens computed, for tests and reports
        self.sampled = 0
        self._calls = 0
        self._record = record
        self._share_prompts = share_prompts
        self._arena: Arena | None = None
        self._graphs: DecodeGraphs | None = None
        self._scheduler: Scheduler  # made with the arena
        self._loop: asyncio.Task[None] | None = None

    async def generate(
        self,
        tokens: list[int],
        *,
        max_new: int,
        seed: str,
        temperature: float = 1.0,
        top_p: float = 1.0,
        watch: Callable[[int], None] | None = None,
    ) -> Completion:
        """Sample the next tokens until a stop token, or `max_new` tokens.

        Temperature 0 takes the most likely token. The log-probabilities are those of softmax(logits /
        temperature) over the whole vocabulary, or of softmax(logits) at temperature 0. The result depends on
        the weights, the tokens and these arguments only, not on the games that run at the same time. `watch`
        is called with each token as it is sampled. Raises ValueError if the tokens do not fit a game.
        """
        if not 0 < len(tokens) <= self.max_tokens - max_new or max_new < 1:
            raise ValueError(
                f"{len(tokens)} tokens and {max_new} new ones do not fit a game of {self.max_tokens}"
            )
        if self._arena is None:
            self._allocate_arena()
        self._calls += 1
        job = Job(
            self._calls,
            self._scheduler.current_game(),
            list(tokens),
            len(tokens),
            max_new,
            Sampling(temperature, top_p),
            random.Random(seed),
            asyncio.get_running_loop().create_future(),
            watch,
        )
        self._scheduler.add(job)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await job.done

    def reserve(self, later: Callable[[], float]) -> None:
        """Leave memory for others: `later` returns the bytes that they will allocate on the device."""
        self._reserved = later

    def clear_cache(self) -> None:
        """Drop every cached sequence: call it when the weights have changed.

        Limits that were halved because memory ran out are restored: the next rollout may have more of it.
        """
        if self._arena is None:
            return
        self._scheduler.drop_cancelled()
        assert self._scheduler.idle, "the weights changed during a game"
        self._scheduler.drop_cache()
        self._scheduler.max_games = self._max_games
        self._scheduler.prefill_tokens = self._prefill_tokens
        if self._graphs is not None:
            self._graphs.resume()

    async def _run(self) -> None:
        """Run steps until no job is left. After each step, games and environments get their turn."""
        scheduler = self._scheduler
        try:
            while not scheduler.idle:
                scheduler.drop_cancelled()
                scheduler.admit()
                self._step()
                await asyncio.sleep(0)
        except Exception as error:  # raised in every waiting `generate`
            scheduler.drop_cache()
            jobs, scheduler.waiting = scheduler.waiting, []
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(error)

    def _allocate_arena(self) -> None:
        policy = self.policy
        self._arena = allocate_arena(
            policy,
            rows=self.kv_tokens,
            least=self.max_tokens,
            most=self._max_games * self.max_tokens,
            later=self._reserved(),
        )
        self._kernel = policy.attention.decode
        record = self._record or step_recorder(self._kernel, policy.device)
        if record is not None:
            self._graphs = DecodeGraphs(
                self._hidden_states,
                self._sample,
                self._arena,
                self._kernel,
                longest=self.max_tokens,
                record=record,
            )
        share = self._share_prompts
        self._scheduler = Scheduler(
            self._arena,
            max_games=self._max_games,
            prefill_tokens=self._prefill_tokens,
            prompts_wait=self._graphs is not None,
            share_prompts=policy.attention.shares_rows if share is None else share,
        )

    def _step(self) -> None:
        """One step. On out-of-memory, requeue the running jobs and retry with half the batch."""
        scheduler = self._scheduler
        try:
            self._schedule_and_run()
            return
        except torch.OutOfMemoryError:
            if scheduler.max_games == 1 and scheduler.prefill_tokens == 1:
                raise
        # After the handler, because the exception keeps the tensors of the forward alive.
        scheduler.max_games = max(1, len(scheduler.running) // 2)
        scheduler.prefill_tokens = max(1, scheduler.prefill_tokens // 2)
        scheduler.drop_cache()  # the forward may not have written all rows
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        warnings.warn(
            f"out of memory: in the rest of this rollout at most {scheduler.max_games} games decode at the "
            f"same time, and {scheduler.prefill_tokens} prompt tokens are computed beside them",
            stacklevel=2,
        )

    @torch.inference_mode()
    def _schedule_and_run(self) -> None:
        schedule = self._scheduler.schedule()
        self.prefilled += schedule.prefilled
        decoded = self._run_schedule(schedule)
        if decoded is not None:
            self._postprocess(schedule.jobs, decoded)

    def _run_schedule(self, schedule: Schedule) -> Decoded | None:
        """Run the forward, and sample a token for each of `schedule.jobs`; None if there are none."""
        known, computed = schedule.known, list(schedule.columns)
        mix = SamplingMix.of([job.sampling for job in schedule.jobs])
        running = self._scheduler.running
        hidden = [running[job].end_states[len(job.tokens)][None] for job in known]
        all_sample = 0 < len(schedule.chunks) == len(computed)
        if all_sample and self._graphs is not None and self._graphs.can_run(schedule.chunks, mix):
            decoded = self._graphs(schedule.tokens, schedule.chunks, _settings(computed), mix)
            if not known:
                return decoded
            states = torch.cat(hidden)
            drawn = self._sample(states, self._upload_settings(known), mix)
            return Decoded(torch.cat([states, decoded.hidden]), torch.cat([drawn, decoded.drawn]))
        if schedule.chunks:
            columns = upload(list(schedule.columns.values()), torch.int64, self.policy.device)
            hidden.append(self._forward(schedule.tokens, schedule.chunks).index_select(0, columns))
        if not schedule.jobs:
            return None
        states = torch.cat(hidden)
        return Decoded(states, self._sample(states, self._upload_settings(schedule.jobs), mix))

    def _upload_settings(self, jobs: list[Job]) -> Tensor:
        return upload(_settings(jobs), torch.float64, self.policy.device)

    def _forward(self, tokens: list[int], chunks: list[Chunk]) -> Tensor:
        """Last hidden states (T, hidden) of a packed row. Writes its keys and values to the arena."""
        device, arena = self.policy.device, self._arena
        assert arena is not None, "the arena is allocated before the first forward"
        batch = ragged_batch(chunks, self._kernel, device, arena.keys, arena.values)
        return self._hidden_states(upload(tokens, torch.int64, device), batch)

    def _hidden_states(self, tokens: Tensor, batch: RaggedBatch) -> Tensor:
        positions = batch.positions[None]
        return self.policy.hidden_states(tokens[None], position_ids=positions, ragged=batch.attend)[0]

    def _sample(self, hidden: Tensor, settings: Tensor, mix: SamplingMix) -> Tensor:
        return draw(self.policy.logits(hidden), settings, mix)

    def _postprocess(self, jobs: list[Job], decoded: Decoded) -> None:
        """Append the sampled token of each job, and resolve the jobs that are finished."""
        for row, job in enumerate(jobs):
            if not job.logprobs:
                self._scheduler.running[job].end_states[job.prompt_length] = decoded.hidden[row].clone()
        self.sampled += len(jobs)
        for job, (number, logprob) in zip(jobs, decoded.drawn.tolist(), strict=True):
            token = int(number)
            job.tokens.append(token)
            job.logprobs.append(logprob)
            job.uniform = job.random.random()
            if job.watch is not None:
                job.watch(token)
            finished = token in self.stop_ids
            if finished or len(job.logprobs) == job.max_new:
                self._scheduler.finish(job)
                job.done.set_result(Completion(job.tokens[job.prompt_length :], job.logprobs, finished))


def _settings(jobs: list[Job]) -> list[list[float]]:
    """What `draw` reads of each job."""
    return [settings_row(job.sampling, job.uniform) for job in jobs]
