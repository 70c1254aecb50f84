"""Decode steps through fixed buffers; instead of a graph, a capture that runs the step again."""

import asyncio
import math

import pytest
import torch

from prompt_r1.engine.cuda_graphs import DecodeGraphs, Step
from prompt_r1.engine.engine import Engine
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
    engine = Engine(
        tiny.policy(), stop_ids=frozenset(), max_tokens=160, kv_tokens=1600, block_size=block_size
    )
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
