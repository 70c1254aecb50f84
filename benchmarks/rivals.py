"""Other engines for the same games: lockstep `generate`, and transformers' continuous batching."""

import asyncio
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from benchmarks.measuring import Cost, measuring
from benchmarks.workload import PlannedGame, play_async

PAGE = 32  # tokens in a page of continuous batching


@dataclass
class PlayedRun(Cost):
    """One variant has played all games once."""

    tokens: list[list[int]] = field(default_factory=list)  # the sampled tokens of each game
    prefilled: int = 0  # how many prompt tokens our engine has computed


def play_generate(model: PreTrainedModel, games: list[PlannedGame], *, latency: bool) -> PlayedRun:
    """Play in lockstep with `model.generate`, as the released code does.

    All unfinished games take a turn in one left-padded batch, which recomputes every history. Then they wait
    for the slowest reply.
    """
    histories = [list(game.prompt) for game in games]
    run = PlayedRun(tokens=[[] for _ in games])
    with measuring(run), torch.inference_mode():
        for number in range(max(len(game.turns) for game in games)):
            active = [index for index, game in enumerate(games) if number < len(game.turns)]
            turns = [games[index].turns[number] for index in active]
            width = max(len(histories[index]) for index in active)
            padding = [width - len(histories[index]) for index in active]
            ids = [[0] * pad + histories[index] for pad, index in zip(padding, active, strict=True)]
            mask = [[0] * pad + [1] * (width - pad) for pad in padding]
            out = model.generate(
                input_ids=torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                do_sample=False,
                max_new_tokens=max(turn.new_tokens for turn in turns),
            )
            for index, turn, row in zip(active, turns, out.tolist(), strict=True):
                new = row[width : width + turn.new_tokens]
                run.tokens[index] += new
                histories[index] += new + turn.reply
            if latency:
                time.sleep(max(turn.latency for turn in turns))
    return run


def play_continuous(
    model: PreTrainedModel, games: list[PlannedGame], *, latency: bool, batch: int, pages: int
) -> PlayedRun:
    """Play independent games with transformers' ContinuousBatchingManager, which `generate_batch` uses."""
    # The first argument, the size of a page, is block_size in transformers 5.17 and page_size later.
    config = ContinuousBatchingConfig(PAGE, num_blocks=pages, max_batch_tokens=batch)
    numbers = count()

    async def generate(tokens: list[int], max_new: int) -> list[int]:
        name = str(next(numbers))
        done: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        manager.register_result_handler(name, done.set_result)
        manager.add_request(tokens, request_id=name, max_new_tokens=max_new)
        result = await done
        assert result.error is None, result.error
        return result.generated_tokens

    run = PlayedRun()
    with measuring(run):
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=config,
        )
        manager.start()
        try:
            run.tokens = asyncio.run(play_async(games, lambda: nullcontext(generate), latency=latency))
        finally:
            manager.stop(block=True)
    return run
