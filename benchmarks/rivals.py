"""Other ways to play the same games: lockstep `generate`, transformers' continuous batching, vLLM."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from benchmarks.runs import Run, Tokens, clock
from benchmarks.workload import PlannedGame, longest, play_async

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine


def play_lockstep(
    games: list[PlannedGame], turn: Callable[[Tokens, list[int]], Tokens], *, latency: bool
) -> Run:
    """All games that still run take a turn together, and wait for the slowest reply."""
    histories, run = [list(game.prompt) for game in games], Run([[] for _ in games])
    for number in range(max(len(game.turns) for game in games)):
        active = [index for index, game in enumerate(games) if number < len(game.turns)]
        plans = [games[index].turns[number] for index in active]
        new = turn([histories[index] for index in active], [planned.new_tokens for planned in plans])
        for index, planned, tokens in zip(active, plans, new, strict=True):
            run.tokens[index] += tokens
            histories[index] += tokens + planned.reply
        if latency:
            run.waiting += max(planned.latency for planned in plans)
            time.sleep(max(planned.latency for planned in plans))
    return run


def play_generate(model: PreTrainedModel, games: list[PlannedGame], *, latency: bool, static: bool) -> Run:
    """Lockstep `model.generate` on left-padded batches."""
    seconds = {"prefill": 0.0, "decode": 0.0}
    forward = model.forward

    def timed(*arguments: object, **options: object) -> object:
        start = clock()
        out = forward(*arguments, **options)
        seconds["prefill" if options["input_ids"].shape[1] > 1 else "decode"] += clock() - start
        return out

    def turn(histories: Tokens, counts: list[int]) -> Tokens:
        width = max(map(len, histories))
        ids = torch.tensor([[0] * (width - len(tokens)) + tokens for tokens in histories])
        mask = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in histories])
        options = {"cache_implementation": "static"} if static else {}
        out = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device),
                             do_sample=False, max_new_tokens=max(counts), **options)  # fmt: skip
        return [row[width : width + count] for row, count in zip(out.tolist(), counts, strict=True)]

    model.forward = timed
    try:
        with torch.inference_mode():
            run = play_lockstep(games, turn, latency=latency)
    finally:
        del model.forward
    run.prefill, run.decode = seconds["prefill"], seconds["decode"]
    return run


def play_continuous(
    model: PreTrainedModel, games: list[PlannedGame], *, latency: bool, batch: int, pages: int
) -> Run:
    """transformers' ContinuousBatchingManager (what `generate_batch` runs), every game on its own."""
    # The first argument is the page size: transformers 5.17 names it block_size, later versions page_size.
    config = ContinuousBatchingConfig(32, num_blocks=pages, max_batch_tokens=batch)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=config,
    )
    numbers = iter(range(10**9))

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
        return Run(asyncio.run(play_async(games, generate, latency=latency)))
    finally:
        manager.stop(block=True)


class Vllm:
    """vLLM on a copy of the weights, every game on its own: `with Vllm(...) as rival: rival.play(...)`.

    It starts once, before what is measured, and takes its share of the GPU's memory then.
    """

    def __init__(self, model: PreTrainedModel, games: list[PlannedGame], *, share: float) -> None:
        self._games, self._numbers = games, iter(range(10**9))
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            model.save_pretrained(folder)
            runner = stack.enter_context(asyncio.Runner())  # an engine lives in one event loop
            engine = runner.run(self._start(folder, share))
            stack.callback(engine.shutdown)
            self._runner, self._engine, self._stack = runner, engine, stack.pop_all()

    async def _start(self, folder: str, share: float) -> "AsyncLLMEngine":
        from vllm import AsyncEngineArgs, AsyncLLMEngine

        return AsyncLLMEngine.from_engine_args(AsyncEngineArgs(
            model=folder, skip_tokenizer_init=True, generation_config="vllm", dtype="auto",
            max_model_len=longest(self._games), gpu_memory_utilization=share, enable_prefix_caching=True,
        ))  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def play(self, *, latency: bool) -> Run:
        self._runner.run(self._engine.reset_prefix_cache())  # every round begins with nothing cached
        return Run(self._runner.run(play_async(self._games, self._generate, latency=latency)))

    async def _generate(self, tokens: list[int], max_new: int) -> list[int]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        how = SamplingParams(temperature=0.0, max_tokens=max_new, ignore_eos=True, detokenize=False,
                             output_kind=RequestOutputKind.FINAL_ONLY)  # fmt: skip
        prompt = TokensPrompt(prompt_token_ids=list(tokens))
        async for output in self._engine.generate(prompt, how, str(next(self._numbers))):
            new = list(output.outputs[0].token_ids)
        return new
