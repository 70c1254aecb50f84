"""The rollout engine and its rivals on the same model, the same games, greedy, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout [--questions 8] [--rounds 3] [--ablations]

The rivals: lockstep `model.generate` that computes every turn again from its first token (as the released
code plays), the same with a static cache, and transformers' continuous batching (pages of 32, block sharing,
every game on its own). Rounds alternate; the table has medians. The last line is JSON.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from benchmarks.workload import PlannedGame, Totals, plan, play_async, small_model, totals
from prompt_r1 import attention
from prompt_r1.arena import Segment
from prompt_r1.attention import Chunk
from prompt_r1.engine import Engine
from prompt_r1.policy import Policy

Tokens = list[list[int]]  # what each game sampled


@dataclass
class Run:
    """One way to play the games, once."""

    tokens: Tokens
    wall: float = 0.0
    cpu: float = 0.0
    slept: float = 0.0  # lockstep only: seconds in which nothing but waiting went on
    prefill: float = 0.0  # seconds of forwards with prompt tokens in them
    decode: float = 0.0  # seconds of forwards without
    peak: float = 0.0  # MB above what was there before
    prefilled: int = 0


def measured(play: Callable[[], Run]) -> Run:
    """Play, with wall time, CPU time of the process and peak memory."""
    before = memory(reset=True)
    wall, cpu = time.perf_counter(), time.process_time()
    run = play()
    run.wall, run.cpu = time.perf_counter() - wall, time.process_time() - cpu
    run.peak = memory() - before
    return run


def memory(*, reset: bool = False) -> float:
    """Peak resident (Linux) or allocated (CUDA) memory since the last reset, MB."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 1e6
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e3


class Timed(Engine):
    """Tells what its forwards are spent on."""

    prefill_seconds = decode_seconds = 0.0

    def _forward(self, ids: list[int], chunks: list[Chunk]) -> torch.Tensor:
        start = time.perf_counter()
        hidden = super()._forward(ids, chunks)
        if len(ids) > len(chunks):
            self.prefill_seconds += time.perf_counter() - start
        else:
            self.decode_seconds += time.perf_counter() - start
        return hidden


class Unshared(Timed):
    """Every game computes its own question."""

    def _prefix_is_coming(self, _: object) -> bool:
        return False

    def _place(self, job: object) -> bool:
        for segment in self._segments:
            segment.__class__ = OwnOnly
        return super()._place(job)


class OwnOnly(Segment):
    def usable(self, prompt: list[int]) -> int:
        usable = super().usable(prompt)
        return usable if usable == len(self.tokens) else 0


class Forgetful(Timed):
    """Nothing is kept from turn to turn."""

    def _admit(self) -> None:
        busy = set(self._running.values())
        self._segments = [segment for segment in self._segments if segment in busy]
        super()._admit()


class ForgetfulUnshared(Unshared, Forgetful):
    pass


def play_ours(policy: Policy, games: list[PlannedGame], *, latency: bool, kind: type[Timed] = Timed,
              lockstep: bool = False, **options: int) -> Run:  # fmt: skip
    engine = kind(
        policy, stop_ids=frozenset(), max_tokens=2048, **({"kv_tokens": len(games) * 2500} | options)
    )

    async def generate(tokens: list[int], max_new: int) -> list[int]:
        return (await engine.generate(tokens, max_new=max_new, seed="", temperature=0.0)).tokens

    async def together(histories: Tokens, counts: list[int]) -> Tokens:
        return await asyncio.gather(*map(generate, histories, counts))

    def turn(histories: Tokens, counts: list[int]) -> Tokens:
        return runner.run(together(histories, counts))

    if lockstep:
        with asyncio.Runner() as runner:
            run = play_lockstep(games, turn, latency=latency)
    else:
        run = Run(asyncio.run(play_async(games, generate, latency=latency)))
    run.prefill, run.decode = engine.prefill_seconds, engine.decode_seconds
    run.prefilled = engine.prefilled
    return run


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
            run.slept += max(planned.latency for planned in plans)
            time.sleep(max(planned.latency for planned in plans))
    return run


def play_generate(model: PreTrainedModel, games: list[PlannedGame], *, latency: bool, static: bool) -> Run:
    """Lockstep `model.generate` on left-padded batches."""
    seconds = {"prefill": 0.0, "decode": 0.0}
    forward = model.forward

    def timed(*arguments: object, **options: object) -> object:
        start = time.perf_counter()
        out = forward(*arguments, **options)
        seconds["prefill" if options["input_ids"].shape[1] > 1 else "decode"] += time.perf_counter() - start
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
    config = ContinuousBatchingConfig(page_size=32, num_blocks=pages, max_batch_tokens=batch)
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


def likeliest(model: PreTrainedModel, games: list[PlannedGame], tokens: Tokens) -> int:
    """Games whose every token is the likeliest one in a forward over the whole text: what per-sequence
    greedy `generate` would have written.
    """
    equal = 0
    for game, sampled in zip(games, tokens, strict=True):
        text, places, rest = list(game.prompt), [], list(sampled)
        for turn in game.turns:
            places += range(len(text) - 1, len(text) - 1 + turn.new_tokens)
            text += rest[: turn.new_tokens] + turn.reply
            rest = rest[turn.new_tokens :]
        with torch.inference_mode():
            logits = model(torch.tensor([text], device=model.device)).logits[0, places]
        equal += logits.argmax(-1).tolist() == sampled
    return equal


def compare(variants: dict[str, Callable[[], Run]], rounds: int) -> dict[str, list[Run]]:
    """Alternate, so that what else the machine does hits all of them."""
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, play in variants.items():
            runs[name].append(measured(play))
            run = runs[name][-1]
            print(f"  round {number + 1}  {name:<42} {run.wall:7.2f} s wall {run.cpu:7.2f} s CPU", flush=True)
    return runs


def typical(runs: list[Run], field: str) -> float:
    return median(getattr(run, field) for run in runs)


def table(runs: dict[str, list[Run]], work: Totals, first: str) -> str:
    """One line a variant, medians; the shares of prefill, decode and the rest are of the wall time."""
    reference = typical(runs[first], "wall")
    columns = " wall s   CPU s   tok/s  ratio  peak MB  prefill  decode"
    head = f"{'':<42} {columns}"
    lines = [head]
    for name, ran in runs.items():
        wall = typical(ran, "wall")
        shares = [
            f"{typical(ran, part) / wall:.0%}" if typical(ran, "decode") else "-"
            for part in ("prefill", "decode")
        ]
        numbers = (
            f"{wall:7.2f} {typical(ran, 'cpu'):7.2f} {work.new_tokens / wall:7.0f} {wall / reference:6.2f}"
        )
        memory_and_time = f"{typical(ran, 'peak'):8.0f} {shares[0]:>8} {shares[1]:>7}"
        lines.append(f"{name:<42} {numbers} {memory_and_time}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=8, help="each is played 5 times (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default 3)")
    parser.add_argument("--rivals", nargs="*", default=["lockstep", "static", "continuous"])
    parser.add_argument("--batches", type=int, nargs="*", default=[256], metavar="TOKENS",
                        help="its largest batches; the best one counts (default 256)")  # fmt: skip
    parser.add_argument("--pages", type=int, default=0, help="its pages of 32 tokens (default: ample)")
    parser.add_argument("--ablations", action="store_true", help="switch off one ingredient at a time")
    choice = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention.register()
    policy = Policy(small_model(attention=attention.NAME).to(device), compute=torch.float32)
    rival, paged = (small_model(attention="sdpa").to(device) for _ in range(2))
    games = plan(choice.questions, 5, seed=1)
    work = totals(games)
    print(f"{work}\nprompt tokens when nothing is computed twice: {work.prefill}", flush=True)

    variants = {
        "ours": lambda: play_ours(policy, games, latency=True),
        "ours, no latency": lambda: play_ours(policy, games, latency=False),
    }
    if "lockstep" in choice.rivals:
        variants["lockstep generate"] = lambda: play_generate(rival, games, latency=True, static=False)
    if "static" in choice.rivals:
        variants["lockstep generate, static cache"] = lambda: play_generate(
            rival, games, latency=True, static=True
        )
    if "continuous" in choice.rivals:
        for batch in choice.batches:
            name = f"continuous batching, {batch} tokens"
            variants[name] = lambda batch=batch: play_continuous(
                paged, games, latency=True, batch=batch, pages=choice.pages or 4096 * len(games) // 40
            )
    runs = compare(variants, choice.rounds)
    print("\n" + table(runs, work, "ours"))
    if choice.ablations:
        ablate(policy, games, work, choice.rounds)
    print(json.dumps(summary(runs, rival, games, work)))


def ablate(policy: Policy, games: list[PlannedGame], work: Totals, rounds: int) -> None:
    def ours(**options: object) -> Callable[[], Run]:
        return lambda: play_ours(policy, games, latency=True, **options)

    runs = compare({
        "ours": ours(),
        "- sharing the question": ours(kind=Unshared),
        "- KV over turns": ours(kind=Forgetful),
        "- both": ours(kind=ForgetfulUnshared),
        "- waiting apart (lockstep turns)": ours(lockstep=True),
        "- all three": ours(kind=ForgetfulUnshared, lockstep=True),
        "- memory (5,000 tokens)": ours(kv_tokens=5000),
        "- rows (16 games decode at a time)": ours(max_games=16),
        "- small chunks (prefill of 100,000 at once)": ours(prefill_tokens=100_000),
    }, rounds)  # fmt: skip
    print("\n" + table(runs, work, "ours") + "\n")
    assert all(run.tokens == runs["ours"][0].tokens for ran in runs.values() for run in ran)


def summary(
    runs: dict[str, list[Run]], model: PreTrainedModel, games: list[PlannedGame], work: Totals
) -> dict[str, object]:
    """The last line: ratios of medians, and whether every game's tokens are the greedy ones."""
    ours, idle = typical(runs["ours"], "wall"), typical(runs["ours, no latency"], "wall")

    def ratio(name: str) -> float | None:
        return round(typical(runs[name], "wall") / ours, 2) if name in runs else None

    lockstep = runs.get("lockstep generate", [])
    mine = [run for name in ("ours", "ours, no latency") for run in runs[name]]
    others = [run for name in runs if not name.startswith("ours") for run in runs[name]]
    tokens = mine[0].tokens
    working = median(run.wall - run.slept for run in lockstep) if lockstep else 0.0
    cpu = {name: round(typical(ran, "cpu") / typical(runs["ours"], "cpu"), 2) for name, ran in runs.items()}
    greedy = likeliest(model, games, tokens) == len(games) and all(run.tokens == tokens for run in mine)
    return {
        "vs_lockstep": ratio("lockstep generate"),
        "vs_lockstep_no_latency": round(working / idle, 2) if lockstep else None,
        "vs_static": ratio("lockstep generate, static cache"),
        "vs_generate_batch": min(
            (ratio(name) for name in runs if name.startswith("continuous")), default=None
        ),
        "cpu_ratios": cpu,
        "tokens_per_s": round(work.new_tokens / ours),
        "identical": greedy,
        "rivals_identical": sum(a == b for run in others for a, b in zip(run.tokens, tokens, strict=True)),
        "rivals_games": len(others) * len(games),
        "prefill_exact": all(run.prefilled == work.prefill for run in mine),
        "overlap": round(ours / max(typical(runs["ours"], "cpu"), work.longest_chain), 2),
        "seconds_no_latency": round(idle, 2),
        "torch": torch.__version__,
        "device": str(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
