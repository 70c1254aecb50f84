"""Recorded decode steps. In place of a CUDA graph, a recording runs the step again on the same buffers."""

import asyncio
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prompt_r1.agent import cuda_graphs
from prompt_r1.agent.cuda_graphs import DecodeGraphs, _padded
from prompt_r1.agent.decode_kernels import flash
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.kv_cache import Arena
from prompt_r1.agent.policy import Policy
from prompt_r1.agent.sampling import SamplingMix
from prompt_r1.agent.scheduler import MAX_PROMPT_WAIT
from tests.agent.conftest import kernel_in_plain_torch
from tests.support import tiny


class Recorder:
    """Records a step as a CUDA graph does: a replay reads and writes the same buffers."""

    def __init__(self, *, off_by: float = 0.0) -> None:
        self.recorded = self.replayed = 0
        self.off_by = off_by

    def __call__(self, step):
        self.recorded += 1
        out = step()  # the memory that every replay writes to

        def replay():
            self.replayed += 1
            again = step()
            out.hidden.copy_(again.hidden + self.off_by)
            out.drawn.copy_(again.drawn)
            return out

        return replay


@pytest.fixture
def play(monkeypatch):
    """Play some greedy games of three turns with a tiny model; the tokens of each turn, and the engine."""
    monkeypatch.setattr(Policy, "attention", SimpleNamespace(decode=kernel_in_plain_torch, shares_rows=False))

    def run(record, *, share_prompts=False, count=9):
        engine = Engine(
            tiny.policy(),
            stop_ids=frozenset(),
            max_tokens=160,
            kv_tokens=1440,
            record=record,
            share_prompts=share_prompts,
        )

        async def game(number: int) -> list[list[int]]:
            tokens, turns = tiny.random_tokens(20 + number // 3, seed=number // 3), []
            for turn in range(3):
                drawn = await engine.generate(tokens, max_new=5 + number, seed="0", temperature=0.0)
                turns.append(drawn.tokens)
                await asyncio.sleep(0)
                tokens = tokens + drawn.tokens + tiny.random_tokens(4 + turn, seed=number)
            return turns

        async def games():
            return await asyncio.gather(*(game(number) for number in range(count)))

        return asyncio.run(games()), engine

    return run


def test_recorded_steps_sample_the_same_tokens_at_every_batch_size(play):
    record = Recorder()
    plain, without = play(None)
    assert without._graphs is None
    recorded, _ = play(record)
    assert recorded == plain
    assert record.recorded == len({1, 2, 4, 8, 16})  # nine games, padded to 16, then fewer
    assert record.replayed > 20


def test_recorded_steps_of_games_that_share_their_prompt_sample_the_same_tokens(play):
    record = Recorder()
    recorded, engine = play(record, share_prompts=True)
    assert recorded == play(None)[0]
    keys = engine._graphs._replays
    assert {shared for *_, shared in keys} == {True} and record.replayed > 20


def test_a_recording_with_another_result_is_not_used(play):
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        tokens, engine = play(Recorder(off_by=1.0))
    assert tokens == play(None)[0]
    assert engine._graphs.broken


def test_a_recording_that_only_rounds_differently_is_used(play):
    _, engine = play(Recorder(off_by=0.005))
    assert not engine._graphs.broken


@pytest.mark.parametrize("count", [1, 9])
def test_a_graph_that_replays_nothing_is_not_used(play, monkeypatch, count):
    """As one whose kernels ran on another device: its buffers hold what was computed during the capture."""
    stream = SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda _: None)
    fakes = {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "current_stream": lambda _: stream,
        "stream": lambda _: nullcontext(),
        "graph": lambda *_, **__: nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    with pytest.warns(UserWarning, match="the recorded step differs"):
        tokens, engine = play(
            partial(cuda_graphs._record_cuda_graph, pool=(0, 1), stream=stream), count=count
        )
    assert tokens == play(None, count=count)[0] and engine._graphs.broken


def test_sizes_waste_at_most_15_rows():
    """33 sequences were once padded to 64, and 130 to 256."""
    assert [_padded(count) for count in (1, 3, 5, 9, 17, 33, 130, 256)] == [1, 4, 8, 16, 32, 48, 144, 256]
    assert all(_padded(count) - count < 16 for count in range(1, 257))


@pytest.mark.parametrize("ending_the_capture_fails", [False, True])
def test_memory_that_runs_out_while_recording_halves_the_batch_until_the_next_rollout(
    play, ending_the_capture_fails
):
    """It was once the end of graphs for the whole run."""

    class Short(Recorder):
        def __call__(self, step):
            self.recorded += 1
            if self.recorded > 1:
                return super().__call__(step)
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError:
                if ending_the_capture_fails:
                    raise RuntimeError("operation failed due to a previous error") from None
                raise

    record = Short()
    with pytest.warns(UserWarning, match="out of memory"):
        tokens, engine = play(record)
    assert tokens == play(None)[0]
    assert record.recorded == 1 and not engine._graphs.broken
    assert engine._scheduler.max_games < 9 and engine._scheduler.prefill_tokens < 512
    engine.clear_cache()
    assert (engine._scheduler.max_games, engine._scheduler.prefill_tokens) == (256, 512)

    prompts = [tiny.random_tokens(9, seed=number) for number in range(9)]

    async def rollout():
        calls = (engine.generate(tokens, max_new=5, seed="0", temperature=0.0) for tokens in prompts)
        return await asyncio.gather(*calls)

    asyncio.run(rollout())
    assert record.recorded > 1 and record.replayed


def test_decoding_continues_if_recording_fails(play):
    def record(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.warns(UserWarning, match="not permitted"):
        tokens, _ = play(record)
    assert tokens == play(None)[0]


def test_prompts_wait_for_each_other_only_if_steps_are_recorded(play):
    """They are then computed in fewer forwards, and every game still ends."""
    forwards = {}
    for name, record in {"plain": None, "recorded": Recorder()}.items():
        counts: list[int] = []
        original = Engine._run_schedule

        def counted(self, schedule, counts=counts, original=original):
            counts.append(sum(chunk.count > 1 for chunk in schedule.chunks))
            return original(self, schedule)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "_run_schedule", counted)
            play(record)
        forwards[name] = sum(count > 0 for count in counts)
    assert forwards["recorded"] < forwards["plain"]


def test_each_prompt_waits_for_others_a_limited_number_of_steps(monkeypatch):
    """Two prompts arrive one after the other while a long game decodes: neither waits for its end."""
    monkeypatch.setattr(Policy, "attention", SimpleNamespace(decode=kernel_in_plain_torch, shares_rows=False))
    engine = Engine(tiny.policy(), stop_ids=frozenset(), max_tokens=120, kv_tokens=480, record=Recorder())
    decoded: list[int] = []  # tokens of the long game
    waited: list[int] = []  # how many of them were sampled while each prompt waited

    async def long_game() -> None:
        await engine.generate(tiny.random_tokens(9, seed=0), max_new=100, seed="0", watch=decoded.append)

    async def prompt(seed: int) -> None:
        begin = len(decoded)
        await engine.generate(tiny.random_tokens(9, seed=seed), max_new=1, seed="0")
        waited.append(len(decoded) - begin)

    async def play() -> None:
        game = asyncio.create_task(long_game())
        while not decoded:
            await asyncio.sleep(0)
        await prompt(1)
        await prompt(2)
        await game

    asyncio.run(play())
    assert all(MAX_PROMPT_WAIT <= steps <= MAX_PROMPT_WAIT + 2 for steps in waited), waited


@pytest.mark.parametrize("any_shared", [False, True])
def test_a_recorded_step_needs_nothing_from_the_host(any_shared, monkeypatch):
    """A step that read a value on the host, or copied one from it, could not be recorded. Traced with meta
    tensors, which also pass FlashAttention's checks of shapes.
    """
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # has no meta device
    model = tiny.model().to("meta", torch.bfloat16)
    policy = Policy(model, compute=torch.bfloat16)

    engine = Engine(policy, stop_ids=frozenset(), max_tokens=200, prefill_tokens=1)
    graphs = DecodeGraphs(
        engine._hidden_states,
        engine._sample,
        Arena(policy, 600),
        flash,
        longest=200,
        record=lambda step: step,
    )
    with OnlyOn("meta") as operations:
        decoded = graphs._step(8, SamplingMix(greedy=True, sampled=True, truncated=True), any_shared)
    assert decoded.hidden.shape == (8, model.config.hidden_size) and decoded.hidden.dtype == torch.bfloat16
    assert decoded.drawn.shape == (8, 2)
    layers = model.config.num_hidden_layers
    assert operations.count("aten._flash_attention_forward.default") == (1 + any_shared) * layers
    assert operations.count("aten.index_copy_.default") == 2 * layers


class OnlyOn(TorchDispatchMode):
    """Collects the operations, and asserts that all their tensors are on the device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.operations: list[str] = []

    def __enter__(self) -> list[str]:
        super().__enter__()
        return self.operations

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self.operations.append(str(operation))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.device.type == self.device for tensor in tensors), operation
        return out
