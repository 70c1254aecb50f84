"""Rollouts of the real engine on a virtual clock: host CPU time is measured, device time is calculated.

The engine, its scheduler and its sampler run as in training. Only the model does no arithmetic: for each
forward it adds the time that Qwen3-4B would take on the device to the clock. Waiting for the environment
takes no real time. So the rollout of a large model passes in seconds, without a GPU, and every millisecond
that the engine's Python takes is in the result. No GPU has confirmed the assumptions of `Device`.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import mean

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_outputs import BaseModelOutputWithPast

from benchmarks.workload import Lengths, PlannedGame
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.policy import Policy
from prompt_r1.types import GameSettings

# Qwen3-4B in bfloat16.
WEIGHT_BYTES = 8.04e9  # read by every decode step: the layers and the tied head
CACHE_BYTES = 147_456  # of a token's keys and values
TOKEN_FLOP = 7.27e9  # of a token's products with the weights of the layers
CONTEXT_FLOP = 0.59e6  # of its attention to each token before it
SCORED_FLOP = 0.78e9  # of its product with the head

INSTRUCTION = 400  # first tokens of every prompt, the same for all questions


@dataclass(frozen=True)
class Device:
    """What a GPU is assumed to do, and the games that it plays in a step."""

    name: str
    bandwidth: float  # bytes a second
    flops: float  # FLOP/s of dense bfloat16 products
    update_mfu: float  # share of them that an update reaches
    kv_tokens: int  # of its arena
    decode_efficiency: float = 0.82  # share of the bandwidth that a decode step reaches
    prefill_mfu: float = 0.52
    graph_launch: float = 2.0e-6  # seconds of a small kernel in a CUDA graph
    eager_launch: float = 10e-6  # seconds of any launch outside of one


A100 = Device("A100-40", 1.555e12, 312e12, update_mfu=0.45, kv_tokens=59_000)
H200 = Device("H200", 4.8e12, 989e12, update_mfu=0.355, kv_tokens=224_000)


@dataclass(frozen=True)
class Launches:
    """Kernels of a decode step."""

    products: int
    attention: int
    small: int  # norms, rotary embeddings, gates, casts, and so on

    @property
    def total(self) -> int:
        return self.products + self.attention + self.small


@dataclass
class VirtualClock:
    """CPU time of this process, without the toy model's, plus device time and waiting."""

    device_seconds: float = 0.0
    graph_seconds: float = 0.0  # the part of it in recorded steps
    waiting: float = 0.0  # seconds in which every unfinished game waited for its reply
    replaying: bool = False
    _hidden_cpu: float = 0.0  # CPU time that is replaced by device time
    _start: float = field(default_factory=time.process_time)

    @property
    def host(self) -> float:
        """CPU seconds of engine and games so far."""
        return time.process_time() - self._start - self._hidden_cpu

    def now(self) -> float:
        return self.host + self.device_seconds + self.waiting

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """The CPU time of this block does not count: the device does this work."""
        start = time.process_time()
        yield
        self._hidden_cpu += time.process_time() - start

    def spend(self, seconds: float) -> None:
        self.device_seconds += seconds
        if self.replaying:
            self.graph_seconds += seconds

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """In place of a CUDA graph: a replay costs the host nothing."""

        def replay() -> Tensor:
            with self.replaced():
                self.replaying = True
                out = step()
                self.replaying = False
            return out

        return replay


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on the virtual clock: instead of sleeping, it moves the clock on."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Skip(clock))
        self._clock = clock

    def time(self) -> float:
        return self._clock.now()


class _Skip(selectors.DefaultSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every game waits, and nothing will wake them"
        self._clock.waiting += max(timeout, 0.0)
        return super().select(0)


class ToyModel(nn.Module):
    """A model of three numbers that ends its turns after a random number of tokens.

    The token after `start` is uniform over the lengths of a turn minus 1, the token after n is n - 1, and 0
    stops. The logits -s(j - (t - 1))² are a product of (t - 1, 1, 0) with (2sj, -sj², …); after `start`, the
    third column excludes what is not a length. Each forward costs the time of Qwen3-4B's.
    """

    SHARPNESS = 30.0

    def __init__(
        self, device: Device, launches: Launches, clock: VirtualClock, turn: tuple[int, int]
    ) -> None:
        super().__init__()
        self.config = Qwen3Config(
            vocab_size=turn[1], hidden_size=2, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=1, intermediate_size=1, max_position_embeddings=1 << 20,
        )  # fmt: skip
        self.start = turn[1]  # the token that begins a turn
        number = torch.arange(turn[1], dtype=torch.float32)
        no_length = 1e6 * (number < turn[0] - 1)
        columns = [2 * self.SHARPNESS * number, -self.SHARPNESS * number**2, -no_length]
        self.head = nn.Linear(3, len(number), bias=False)
        self.head.weight.data = torch.stack(columns, dim=1)
        self.batches: list[int] = []  # rows of each decode step
        self._device, self._launches, self._clock = device, launches, clock

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def base_model(self) -> "ToyModel":
        return self

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, **_: object) -> BaseModelOutputWithPast:
        with self._clock.replaced() if not self._clock.replaying else nullcontext():
            self._clock.spend(self._seconds(position_ids[0]))
            token = input_ids.float()
            begins = (input_ids == self.start).float()
            hidden = torch.stack([(token - 1) * (1 - begins), 1 - begins, begins], dim=-1)
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    def _seconds(self, positions: Tensor) -> float:
        """The time of a forward of tokens at these positions of their sequences."""
        device, launches = self._device, self._launches
        ends = torch.ones_like(positions, dtype=torch.bool)
        ends[:-1] = positions[1:] != positions[:-1] + 1
        cached = float((positions[ends] + 1).sum())  # tokens whose keys and values are read
        attended = float((positions + 1).sum())
        if len(positions) == int(ends.sum()):
            self.batches.append(int((positions > 0).sum()))  # the rest pads the batch
        reading = (WEIGHT_BYTES + CACHE_BYTES * cached) / device.bandwidth / device.decode_efficiency
        flop = TOKEN_FLOP * len(positions) + CONTEXT_FLOP * attended
        work = max(reading, flop / device.flops / device.prefill_mfu)
        if self._clock.replaying:
            return work + (launches.small + launches.attention) * device.graph_launch
        return max(work, launches.total * device.eager_launch)


class HostTimedEngine(Engine):
    """Measures the CPU time of admission and of the rest of each step."""

    clock: VirtualClock

    def __init__(self, policy: Policy, clock: VirtualClock, **options: int) -> None:
        super().__init__(policy, stop_ids=frozenset({0}), record=clock.record, share_prompts=True, **options)
        self.clock = clock
        self.admissions: list[float] = []  # seconds
        self.steps: list[float] = []

    def _admit(self) -> None:
        start = self.clock.host
        super()._admit()
        self.admissions.append(self.clock.host - start)

    def _step(self) -> None:
        start = self.clock.host
        super()._step()
        self.steps.append(self.clock.host - start)


@dataclass(frozen=True)
class VirtualRollout:
    """A rollout on the virtual clock."""

    seconds: float
    graph_seconds: float  # recorded decode steps
    eager_seconds: float  # other forwards: those with prompt tokens
    host_seconds: float  # CPU time of engine and games
    waiting_seconds: float
    decode_batch: float  # mean rows of the steps that only decode
    sampled: int
    prefilled: int  # prompt tokens computed
    needed: int  # prompt tokens if nothing is computed twice, each question once
    admissions: list[float]  # host seconds of each step
    steps: list[float]
    games: list[list[int]]  # of each game: the tokens of its prompt, turn, reply, turn, …

    @property
    def prefill_ratio(self) -> float:
        return self.prefilled / self.needed


def play_virtually(
    games: list[PlannedGame],
    lengths: Lengths,
    device: Device,
    launches: Launches,
    *,
    latency: bool = True,
    prefill_tokens: int = 8192,
    max_games: int = 256,
) -> VirtualRollout:
    """Play the games: prompts, turns, replies and latencies are planned, the length of a turn is drawn."""
    clock = VirtualClock()
    settings = GameSettings()
    model = ToyModel(device, launches, clock, lengths.new)
    engine = HostTimedEngine(
        Policy(model, compute=torch.float32),
        clock,
        max_tokens=settings.max_tokens,
        kv_tokens=device.kv_tokens,
        max_games=max_games,
        prefill_tokens=prefill_tokens,
    )
    instruction = games[0].prompt[:INSTRUCTION]

    async def play(number: int, game: PlannedGame) -> list[int]:
        # Through a tensor, so that every game has ints of its own: a tokenizer's are never the same objects,
        # and comparing them takes far longer.
        tokens = torch.tensor([*instruction, *game.prompt[INSTRUCTION:-1], model.start]).tolist()
        parts = [len(tokens)]
        for turn, planned in enumerate(game.turns):
            room = settings.max_tokens - len(tokens)
            completion = await engine.generate(
                tokens, max_new=min(settings.max_new, room), seed=f"{number}/{turn}"
            )
            tokens = tokens + completion.tokens
            parts.append(len(completion.tokens))
            if planned.reply:
                if latency:
                    await asyncio.sleep(planned.latency)
                tokens += [*planned.reply[:-1], model.start]
                parts.append(len(planned.reply))
        return parts

    async def play_all() -> list[list[int]]:
        return await asyncio.gather(*(play(number, game) for number, game in enumerate(games)))

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        played = runner.run(play_all())
    turns = sum(len(game.turns) for game in games)
    replies = sum(len(turn.reply) for game in games for turn in game.turns)
    questions = {tuple(game.prompt) for game in games}
    return VirtualRollout(
        seconds=clock.now(),
        graph_seconds=clock.graph_seconds,
        eager_seconds=clock.device_seconds - clock.graph_seconds,
        host_seconds=clock.host,
        waiting_seconds=clock.waiting,
        decode_batch=mean(model.batches),
        sampled=engine.sampled,
        prefilled=engine.prefilled,
        needed=sum(map(len, questions)) + replies + turns - len(games),
        admissions=engine.admissions,
        steps=engine.steps,
        games=played,
    )
