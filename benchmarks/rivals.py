"""Other engines for the same games: lockstep `generate`, transformers' continuous batching, vLLM."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from benchmarks.runs import PlayedRun, Tokens, clock
from benchmarks.workload import PlannedGame, longest, play_async

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine


def play_lockstep(
    games: list[PlannedGame], play_turn: Callable[[Tokens, list[int]], Tokens], *, latency: bool
) -> PlayedRun:
    """Play turn by turn: all unfinished games take a turn as one batch, then wait for the slowest reply."""
    histories = [list(game.prompt) for game in games]
    run = PlayedRun([[] for _ in games])
    for number in range(max(len(game.turns) for game in games)):
        active = [index for index, game in enumerate(games) if number < len(game.turns)]
        plans = [games[index].turns[number] for index in active]
        new = play_turn([histories[index] for index in active], [planned.new_tokens for planned in plans])
        for index, planned, tokens in zip(active, plans, new, strict=True):
            run.tokens[index] += tokens
            histories[index] += tokens + planned.reply
        if latency:
            slowest = max(planned.latency for planned in plans)
            run.waiting += slowest
            time.sleep(slowest)
    return run


def play_generate(
    model: PreTrainedModel, games: list[PlannedGame], *, latency: bool, static: bool
) -> PlayedRun:
    """Lockstep `model.generate` on left-padded batches; `static` selects the static cache."""
    seconds = {"prefill": 0.0, "decode": 0.0}
    forward = model.forward

    def timed(*arguments: object, **options: object) -> object:
        start = clock()
        out = forward(*arguments, **options)
        seconds["prefill" if options["input_ids"].shape[1] > 1 else "decode"] += clock() - start
        return out

    def play_turn(histories: Tokens, counts: list[int]) -> Tokens:
        width = max(map(len, histories))
        ids = torch.tensor([[0] * (width - len(tokens)) + tokens for tokens in histories])
        mask = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in histories])
        options = {"cache_implementation": "static"} if static else {}
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_new_tokens=max(counts),
            **options,
        )
        return [row[width : width + new] for row, new in zip(out.tolist(), counts, strict=True)]

    model.forward = timed
    try:
        with torch.inference_mode():
            run = play_lockstep(games, play_turn, latency=latency)
    finally:
        del model.forward
    run.prefill, run.decode = seconds["prefill"], seconds["decode"]
    return run


def play_continuous(
    model: PreTrainedModel, games: list[PlannedGame], *, latency: bool, batch: int, pages: int
) -> PlayedRun:
    """transformers' ContinuousBatchingManager (used by `generate_batch`), with independent games."""
    # The first argument is the page size, named block_size in transformers 5.17 and page_size later.
    config = ContinuousBatchingConfig(32, num_blocks=pages, max_batch_tokens=batch)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=config,
    )
    numbers = count()

    async def generate(tokens: list[int], max_new: int) -> list[int]:
        name = str(next(numbers))
        done: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        manager.register_result_handler(name, done.set_result)
        manager.add_request(tokens, request_id=name, max_new_tokens=max_new)
        result = await done
        assert result.error is None, result.error
        return result.generated_tokens

    manager.start()
    try:
        return PlayedRun(asyncio.run(play_async(games, generate, latency=latency)))
    finally:
        manager.stop(block=True)


class Vllm:
    """vLLM on a copy of the weights, with independent games: `with Vllm(...) as rival: rival.play(...)`.

    It starts once, before the measurements, and then takes its share of the GPU's memory.
    """

    def __init__(self, model: PreTrainedModel, games: list[PlannedGame], *, share: float) -> None:
        self._games = games
        self._numbers = count()
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            model.save_pretrained(folder)
            runner = stack.enter_context(asyncio.Runner())  # an engine lives in one event loop
            engine = runner.run(self._start(folder, share))
            stack.callback(engine.shutdown)
            self._runner = runner
            self._engine = engine
            self._stack = stack.pop_all()

    async def _start(self, folder: str, share: float) -> "AsyncLLMEngine":
        from vllm import AsyncEngineArgs, AsyncLLMEngine

        arguments = AsyncEngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype="auto",
            max_model_len=longest(self._games),
            gpu_memory_utilization=share,
            enable_prefix_caching=True,
        )
        return AsyncLLMEngine.from_engine_args(arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def play(self, *, latency: bool) -> PlayedRun:
        """Play all games, beginning with an empty cache."""
        self._runner.run(self._engine.reset_prefix_cache())
        return PlayedRun(self._runner.run(play_async(self._games, self._generate, latency=latency)))

    async def _generate(self, tokens: list[int], max_new: int) -> list[int]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=list(tokens))
        async for output in self._engine.generate(prompt, sampling, str(next(self._numbers))):
            new = list(output.outputs[0].token_ids)
        return new
