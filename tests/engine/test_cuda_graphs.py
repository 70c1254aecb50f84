"""Decode steps through fixed buffers; instead of a graph, a capture that runs the step again."""

import asyncio
import math
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from prompt_r1.engine.cuda_graphs import CudaGraphs, DecodeGraphs, Step
from prompt_r1.engine.engine import Engine
from prompt_r1.engine.kv_cache import TokenSequence
from prompt_r1.engine.paged_attention import PagedBatch
from tests.support import tiny
from tests.support.at_once import at_once

pytestmark = pytest.mark.usefixtures("varlen")


class Capture:
    """As a CUDA graph does, each replay reads the buffers of the captured step and writes to its output."""

    def __init__(self, off_by: float = 0.0) -> None:
        self.captured = self.replayed = 0
        self._off_by = off_by

    def __call__(self, step: Step) -> Step:
        out = step()
        self.captured += 1

        def replay() -> torch.Tensor:
            self.replayed += 1
            return out.copy_(step() * (1 + self._off_by))

        return replay


def play(capture: Capture | None, *, block_size: int = 0) -> tuple[list[list[list[int]]], Engine]:
    """Nine greedy games of three turns, three of each question; the tokens of each turn, and the engine."""
    engine = tiny.engine(tiny.policy(), max_tokens=160, kv_tokens=1600, block_size=block_size)
    if capture is not None:  # as on a GPU: graphs record FlashAttention
        engine._pool.flash = True
        engine._graphs = DecodeGraphs(engine._forward, engine._pool, longest=160, capture=capture)

    async def game(number: int) -> list[list[int]]:
        tokens, turns = tiny.random_tokens(20 + number // 3, seed=number // 3), []
        with engine.new_sequence() as handle:
            for turn in range(3):
                drawn = await engine.generate(
                    tokens, max_new=5 + number, seed="0", sequence=handle, temperature=0.0
                )
                turns.append(drawn.tokens)
                await asyncio.sleep(0)
                tokens = tokens + drawn.tokens + tiny.random_tokens(4 + turn, seed=number)
        return turns

    return at_once(map(game, range(9))), engine


@pytest.mark.parametrize("block_size", [0, 16])
def test_captured_steps_sample_the_same_tokens_at_every_batch_size(block_size):
    capture = Capture()
    assert play(capture, block_size=block_size)[0] == play(None)[0]
    assert capture.captured == len({2, 4, 8, 16})  # nine games, padded to 16, then fewer
    assert capture.replayed > 20


@pytest.mark.parametrize("off_by", [1.0, math.nan])
def test_a_graph_with_another_result_is_not_used(off_by):
    with pytest.warns(UserWarning, match="no CUDA graphs"):
        tokens, _ = play(broken := Capture(off_by))
    assert tokens == play(None)[0]
    assert broken.replayed == broken.captured == 1


def test_a_graph_that_only_rounds_differently_is_used():
    play(capture := Capture(off_by=0.005))
    assert capture.replayed > 20


@pytest.mark.parametrize(("games", "size"), [(1, 2), (2, 2), (3, 4), (8, 8), (9, 16), (17, 32), (256, 256)])
def test_a_decode_step_is_padded_to_the_next_size_and_to_no_larger_one(games, size):
    """Idle rows are computed like others."""
    sizes: list[int] = []

    def forward(batch: PagedBatch) -> torch.Tensor:
        sizes.append(len(batch.tokens))
        return torch.ones(len(batch.tokens), 4)

    pool = tiny.pool(blocks=300, block_size=1, layers=1)
    graphs = DecodeGraphs(forward, pool, longest=1, capture=Capture())
    new_tokens: dict[TokenSequence, list[int]] = {}
    for number in range(games):
        sequence = TokenSequence(number)
        pool.allocate(sequence, 1)
        new_tokens[sequence] = [7]
    assert graphs.fits(new_tokens) and len(graphs(new_tokens)) == games
    assert set(sizes) == {size}


@pytest.mark.parametrize(("counts", "fits"), [([1] * 256, True), ([1] * 257, False), ([1, 2, 1], False)])
def test_only_decode_steps_of_at_most_the_largest_size_fit_a_graph(counts, fits):
    graphs = DecodeGraphs(
        lambda batch: torch.ones(len(batch.tokens), 4),
        tiny.pool(blocks=1, block_size=1, layers=1),
        longest=1,
        capture=Capture(),
    )
    assert graphs.fits({TokenSequence(number): [7] * count for number, count in enumerate(counts)}) == fits


def test_all_graphs_share_the_memory_of_the_first_one(monkeypatch):
    """A bug would only cost memory: each of nineteen sizes would keep the activations of its own step."""
    pools: list[str | None] = []

    class Graph:
        def pool(self) -> str:
            return "the pool"

    def capturing(graph: Graph, *, pool: str | None) -> AbstractContextManager[None]:
        pools.append(pool)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    capture = CudaGraphs()
    for _ in range(3):
        capture(lambda: torch.ones(1))
    assert pools == [None, "the pool", "the pool"]
