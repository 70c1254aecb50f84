"""Batched generation with a KV cache of our own, on an unmodified Hugging Face model.

The interface is stateless: `generate(tokens)`. The engine finds by itself the slot that already holds the
longest prefix of the tokens: it continues there when that is the rest of the same game, and copies the prefix
when it belongs to another (the games of a group share their question). So the cache lives over the turns of a
game, and a question is computed once for its group. All running games advance together, a ragged batch of one
packed row: prompts in chunks, one token each for those that decode. A game that waits for its environment
keeps its slot, but no place in the batch.
"""

import asyncio
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prompt_r1.attention import Ragged, Segment
from prompt_r1.policy import Policy
from prompt_r1.types import Completion

PREFILL_TOKENS = 2048  # new prompt tokens in one forward: more would keep decoding games waiting


@dataclass
class Job:
    """One call of `generate`."""

    tokens: list[int]  # prompt, then what was sampled
    prompt_length: int
    max_new: int
    temperature: float
    random: random.Random
    done: asyncio.Future[Completion]
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Slot:
    """A place in the cache. Idle slots keep their tokens for whoever continues them."""

    index: int
    tokens: list[int] = field(default_factory=list)  # whose keys and values are cached
    job: Job | None = None
    last_used: int = 0


class Engine:
    def __init__(self, policy: Policy, *, slots: int, capacity: int, stop_ids: frozenset[int]) -> None:
        """A cache of `slots` sequences of `capacity` tokens each, in the policy's compute dtype."""
        self.policy = policy
        self.capacity = capacity
        self.stop_ids = stop_ids
        self.prefilled = 0  # prompt tokens computed, for tests and reports
        self.sampled = 0
        config = policy.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (slots, config.num_key_value_heads, capacity, head_dim)
        place = {"dtype": policy.compute, "device": policy.device}
        self._keys = [torch.empty(shape, **place) for _ in range(config.num_hidden_layers)]
        self._values = [torch.empty(shape, **place) for _ in range(config.num_hidden_layers)]
        self._slots = [Slot(index) for index in range(slots)]
        self._waiting: list[Job] = []
        self._clock = 0
        self._loop: asyncio.Task[None] | None = None

    async def generate(
        self, tokens: list[int], *, max_new: int, seed: str, temperature: float = 1.0
    ) -> Completion:
        """Sample the next tokens until a stop token or `max_new`; temperature 0 takes the likeliest token.

        The log-probabilities are those of softmax(logits / temperature), or of softmax(logits) when greedy.
        """
        if not 0 < len(tokens) <= self.capacity - max_new or max_new < 1:
            raise ValueError(
                f"{len(tokens)} tokens and {max_new} new ones do not fit a cache of {self.capacity}"
            )
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(Job(list(tokens), len(tokens), max_new, temperature, random.Random(seed), done))
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await done

    def forget(self) -> None:
        """Drop every cached sequence: call it when the weights have changed."""
        assert not any(slot.job for slot in self._slots), "the weights changed under a running game"
        self._slots = [Slot(slot.index) for slot in self._slots]

    async def _run(self) -> None:
        """Admit, advance by one forward, let games and environments act; until nothing is left to do."""
        try:
            while self._waiting or any(slot.job for slot in self._slots):
                self._admit()
                self._advance()
                await asyncio.sleep(0)
        except Exception as error:  # out of memory, say: whoever waits for tokens is told
            jobs = self._waiting + [slot.job for slot in self._slots if slot.job]
            self._waiting, self._slots = [], [Slot(slot.index) for slot in self._slots]
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(error)

    def _admit(self) -> None:
        """Give waiting jobs a slot, first come first served, as long as one is idle."""
        waiting, self._waiting = self._waiting, []
        for number, job in enumerate(waiting):
            if all(slot.job for slot in self._slots):
                self._waiting += waiting[number:]
                return
            if job.done.done():  # its caller was cancelled
                continue
            slot = self._place(job)
            if slot is None:
                self._waiting.append(job)
            else:
                slot.job = job

    def _place(self, job: Job) -> Slot | None:
        """The slot where the job continues, its tokens cut or copied to a prefix of the job's; None: wait.

        At least one slot is idle.
        """
        wanted = job.tokens[:-1]  # the last prompt token is always computed: its logits begin the completion
        lengths = [_common_prefix(slot.tokens, wanted) for slot in self._slots]
        source = max(self._slots, key=lambda slot: lengths[slot.index])
        shared = lengths[source.index]
        if self._prefix_is_coming(wanted, shared):
            return None
        if source.job is None and shared == len(source.tokens):
            return source
        idle = (slot for slot in self._slots if slot.job is None)
        target = min(
            idle, key=lambda slot: (len(slot.tokens) > 0, slot.last_used)
        )  # the longest idle goes first
        if target is not source:
            for cache in (*self._keys, *self._values):
                cache[target.index, :, :shared] = cache[source.index, :, :shared]
        target.tokens = wanted[:shared]
        return target

    def _prefix_is_coming(self, wanted: list[int], shared: int) -> bool:
        """Is another job computing most of what this one wants? Then copying it in a moment is cheaper."""
        return any(
            len(slot.tokens) < slot.job.prompt_length - 1
            and _common_prefix(slot.job.tokens[: slot.job.prompt_length], wanted)
            > max(shared, len(wanted) // 2)
            for slot in self._slots
            if slot.job
        )

    @torch.inference_mode()
    def _advance(self) -> None:
        """One packed forward of all that runs; those whose tokens are all cached then sample one more."""
        self._clock += 1
        batch: list[Slot] = []
        segments: list[Segment] = []
        ids: list[int] = []
        budget = PREFILL_TOKENS
        for slot in self._slots:
            if slot.job is None:
                continue
            if slot.job.done.done():
                slot.job = None
                continue
            fresh = slot.job.tokens[len(slot.tokens) :]
            if len(fresh) > 1:
                fresh = fresh[:budget]
                budget -= len(fresh)
            if not fresh:
                continue
            self.prefilled += max(
                0, min(len(slot.tokens) + len(fresh), slot.job.prompt_length) - len(slot.tokens)
            )
            slot.tokens += fresh
            slot.last_used = self._clock
            batch.append(slot)
            segments.append(Segment(slot.index, len(ids), len(fresh), len(slot.tokens)))
            ids += fresh
        if not batch:
            return
        hidden = self._forward(ids, segments)  # (1, T, hidden)
        complete = [
            row for row, slot in enumerate(batch) if slot.job and len(slot.tokens) == len(slot.job.tokens)
        ]
        if complete:
            last = [segments[row].start + segments[row].count - 1 for row in complete]
            self._sample(hidden[0, last], [batch[row] for row in complete])

    def _forward(self, ids: list[int], segments: list[Segment]) -> Tensor:
        device = self.policy.device
        slots = [segment.slot for segment in segments for _ in range(segment.count)]
        positions = [p for segment in segments for p in range(segment.length - segment.count, segment.length)]
        position_ids = torch.tensor(positions, device=device)
        ragged = Ragged(self._keys, self._values, segments, torch.tensor(slots, device=device), position_ids)
        tokens = torch.tensor(ids, device=device)[None]
        return self.policy.hidden_states(tokens, position_ids=position_ids[None], ragged=ragged)

    def _sample(self, hidden: Tensor, slots: list[Slot]) -> None:
        """Draw one token a row by inverting the distribution function at the job's own next random number."""
        jobs = [slot.job for slot in slots if slot.job]
        logits = self.policy.logits(hidden)  # (R, V)
        heat = torch.tensor([job.temperature or 1.0 for job in jobs], device=logits.device)
        draws = torch.tensor([job.random.random() for job in jobs], device=logits.device)
        greedy = torch.tensor([job.temperature == 0 for job in jobs], device=logits.device)
        log_p = torch.log_softmax(logits / heat[:, None], dim=-1)
        cumulated = log_p.exp().cumsum(-1)
        drawn = torch.searchsorted(cumulated, draws[:, None] * cumulated[:, -1:], right=True)[:, 0]
        tokens = torch.where(greedy, log_p.argmax(-1), drawn.clamp(max=log_p.shape[1] - 1))
        logprobs = log_p.gather(1, tokens[:, None])[:, 0]
        self.sampled += len(jobs)
        for slot, job, token, logprob in zip(slots, jobs, tokens.tolist(), logprobs.tolist(), strict=True):
            job.tokens.append(token)
            job.logprobs.append(logprob)
            finished = token in self.stop_ids
            if finished or len(job.logprobs) == job.max_new:
                slot.job = None
                job.done.set_result(Completion(job.tokens[job.prompt_length :], job.logprobs, finished))


def _common_prefix(a: list[int], b: list[int]) -> int:
    """The number of equal tokens at the start, by bisection over slices (compared at C speed)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
