"""Our rollout engine and its rivals: the same model and games, greedy, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout [--questions 8] [--rounds 3] [--ablations]
    python -m benchmarks.rollout --model large --lengths long --questions 16 --rivals lockstep vllm

The rivals: lockstep `model.generate`, which recomputes every turn from its first token (as the released code
does), the same with a static cache, transformers' continuous batching (pages of 32 tokens, shared blocks,
independent games), and vLLM if it is installed. Rounds alternate between the variants, and the table has
medians. The last line is JSON.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from statistics import median

import torch
from transformers import PreTrainedModel

from benchmarks.rivals import Vllm, play_continuous, play_generate, play_lockstep
from benchmarks.runs import PlayedRun, Tokens, clock, compare, median_of, table
from benchmarks.workload import (
    LENGTHS,
    PlannedGame,
    Totals,
    large_model,
    longest,
    plan,
    play_async,
    small_model,
    totals,
)
from prompt_r1.agent import attention
from prompt_r1.agent.cuda_graphs import Decoded
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.kv_cache import Prefix
from prompt_r1.agent.policy import Policy
from prompt_r1.agent.scheduler import Job, Schedule, Scheduler

RIVALS = ("lockstep", "static", "continuous", "vllm")
VLLM_SHARE = 0.4  # of the GPU's memory


class TimedEngine(Engine):
    """Measures the time of its forwards, with the draw of their tokens."""

    prefill_seconds = 0.0
    decode_seconds = 0.0
    active_seconds = 0.0

    async def _run(self) -> None:
        start = clock()
        await super()._run()
        self.active_seconds += clock() - start

    def _run_schedule(self, schedule: Schedule) -> Decoded | None:
        start = clock()
        decoded = super()._run_schedule(schedule)
        if len(schedule.tokens) > len(schedule.chunks):
            self.prefill_seconds += clock() - start
        else:
            self.decode_seconds += clock() - start
        return decoded


class UnsharedScheduler(Scheduler):
    """Computes the question for every game of a group: games continue only their own sequences."""

    def _find_prefix(self, job: Job) -> Prefix | None:
        prefix = super()._find_prefix(job)
        return prefix if prefix is not None and prefix.segment is job.game.segment else None


class ForgetfulScheduler(Scheduler):
    """Keeps no sequence from turn to turn."""

    def admit(self) -> None:
        for segment in [segment for segment in self._arena.segments if segment.is_idle]:
            self._evict(segment)
        super().admit()


class ForgetfulUnsharedScheduler(UnsharedScheduler, ForgetfulScheduler):
    """Neither shares questions nor keeps sequences."""


def play_ours(
    policy: Policy,
    games: list[PlannedGame],
    *,
    latency: bool,
    scheduler: type[Scheduler] = Scheduler,
    lockstep: bool = False,
    **options: int,
) -> PlayedRun:
    """Play with our engine. `options` are arguments of the engine."""
    if policy.device.type == "cpu":
        # A cache that holds all games. On a GPU the engine sizes it as in training.
        options = {"kv_tokens": len(games) * longest(games) * 5 // 4, **options}
    engine = TimedEngine(
        policy, stop_ids=frozenset(), max_tokens=longest(games), scheduler=scheduler, **options
    )

    async def generate(tokens: list[int], max_new: int) -> list[int]:
        return (await engine.generate(tokens, max_new=max_new, seed="", temperature=0.0)).tokens

    async def generate_all(histories: Tokens, counts: list[int]) -> Tokens:
        return await asyncio.gather(*map(generate, histories, counts))

    def play_turn(histories: Tokens, counts: list[int]) -> Tokens:
        return runner.run(generate_all(histories, counts))

    if lockstep:
        with asyncio.Runner() as runner:
            run = play_lockstep(games, play_turn, latency=latency)
    else:
        start = clock()
        run = PlayedRun(asyncio.run(play_async(games, generate, latency=latency)))
        run.waiting = clock() - start - engine.active_seconds
    run.prefill = engine.prefill_seconds
    run.decode = engine.decode_seconds
    run.prefilled = engine.prefilled
    return run


def count_greedy_games(model: PreTrainedModel, games: list[PlannedGame], tokens: Tokens) -> int:
    """The number of games whose every token is the most likely one in a forward over the whole text.

    These are the tokens that per-sequence greedy `generate` would have written.
    """
    greedy = 0
    for game, sampled in zip(games, tokens, strict=True):
        text = list(game.prompt)
        sources: list[int] = []  # positions that predict the sampled tokens
        rest = list(sampled)
        for turn in game.turns:
            sources += range(len(text) - 1, len(text) - 1 + turn.new_tokens)
            text += rest[: turn.new_tokens] + turn.reply
            rest = rest[turn.new_tokens :]
        with torch.inference_mode():
            logits = model(torch.tensor([text], device=model.device)).logits[0, sources]
        if logits.argmax(-1).tolist() == sampled:
            greedy += 1
    return greedy


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=8, help="questions, each played 5 times (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default 3)")
    parser.add_argument(
        "--rivals",
        nargs="*",
        choices=RIVALS,
        default=[*RIVALS],
        help="rivals to compare with (default: all; vLLM if it is installed)",
    )
    parser.add_argument(
        "--model",
        choices=("small", "large"),
        default="small",
        help="random weights: 7 M in float32, or the shape of Qwen3-4B in bfloat16",
    )
    parser.add_argument("--lengths", choices=[*LENGTHS], default="short", help="lengths of the games")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="*",
        default=[256],
        metavar="TOKENS",
        help="largest batches of continuous batching; the fastest counts (default 256)",
    )
    parser.add_argument(
        "--pages", type=int, default=0, help="its pages of 32 tokens (default: enough for all games)"
    )
    parser.add_argument("--ablations", action="store_true", help="switch off one ingredient at a time")
    return parser.parse_args()


def main() -> None:
    """Play all variants, and print the table and the summary."""
    choice = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention.register()
    games = plan(choice.questions, 5, seed=1, lengths=LENGTHS[choice.lengths])
    work = totals(games)
    print(f"{work}\nprompt tokens if nothing is computed twice: {work.prefill}", flush=True)
    model = load(choice.model, attention.NAME, device)
    policy = Policy(model, compute=model.dtype)
    rival = load(choice.model, "sdpa", device)
    with ExitStack() as stack:
        variants: dict[str, Callable[[], PlayedRun]] = {
            "ours": partial(play_ours, policy, games, latency=True),
            "ours, no latency": partial(play_ours, policy, games, latency=False),
        }
        lockstep = partial(play_generate, rival, games, latency=True)
        if "lockstep" in choice.rivals:
            variants["lockstep generate"] = partial(lockstep, static=False)
        if "static" in choice.rivals:
            variants["lockstep generate, static cache"] = partial(lockstep, static=True)
        if "continuous" in choice.rivals:
            paged = load(choice.model, "sdpa", device)
            pages = choice.pages or 4096 * len(games) // 40
            for batch in choice.batches:
                variants[f"continuous batching, {batch} tokens"] = partial(
                    play_continuous, paged, games, latency=True, batch=batch, pages=pages
                )
        if "vllm" in choice.rivals and find_spec("vllm"):
            vllm = stack.enter_context(Vllm(rival, games, share=VLLM_SHARE))
            variants["vLLM"] = partial(vllm.play, latency=True)
        runs = compare(variants, choice.rounds)
    print("\n" + table(runs, work, "ours"))
    if choice.ablations:
        ablate(policy, games, work, choice.rounds)
    print(json.dumps(summary(runs, rival, games, work)))


def load(model: str, attention: str, device: torch.device) -> PreTrainedModel:
    """The small or the large model; the same random weights each time."""
    if model == "small":
        return small_model(attention=attention).to(device)
    return large_model(attention=attention, device=device)


def ablate(policy: Policy, games: list[PlannedGame], work: Totals, rounds: int) -> None:
    """Switch off one ingredient of our engine at a time, and print a table."""
    ours = partial(play_ours, policy, games, latency=True)
    variants: dict[str, Callable[[], PlayedRun]] = {
        "ours": ours,
        "- sharing the question": partial(ours, scheduler=UnsharedScheduler),
        "- KV over turns": partial(ours, scheduler=ForgetfulScheduler),
        "- both": partial(ours, scheduler=ForgetfulUnsharedScheduler),
        "- waiting apart (lockstep turns)": partial(ours, lockstep=True),
        "- all three": partial(ours, scheduler=ForgetfulUnsharedScheduler, lockstep=True),
        "- memory (5,000 tokens)": partial(ours, kv_tokens=5000),
        "- rows (16 games decode at a time)": partial(ours, max_games=16),
        "- small chunks (prefill of 100,000 at once)": partial(ours, prefill_tokens=100_000),
    }
    runs = compare(variants, rounds)
    print("\n" + table(runs, work, "ours") + "\n")
    expected = runs["ours"][0].tokens
    for name, played in runs.items():
        assert all(run.tokens == expected for run in played), f"{name} sampled other tokens"


def summary(
    runs: Mapping[str, list[PlayedRun]], model: PreTrainedModel, games: list[PlannedGame], work: Totals
) -> dict[str, object]:
    """The last line: ratios of medians, and whether every game's tokens are the greedy ones."""
    ours = median_of(runs["ours"], "wall")
    no_latency = median_of(runs["ours, no latency"], "wall")
    ours_cpu = median_of(runs["ours"], "cpu")
    ratios = {name: round(median_of(played, "wall") / ours, 2) for name, played in runs.items()}
    cpu_ratios = {name: round(median_of(played, "cpu") / ours_cpu, 2) for name, played in runs.items()}
    continuous = [ratio for name, ratio in ratios.items() if name.startswith("continuous")]
    lockstep_no_latency = None
    if "lockstep generate" in runs:
        # Nothing overlaps in lockstep, so the time without latency is the wall time minus the waiting.
        working = median(run.wall - run.waiting for run in runs["lockstep generate"])
        lockstep_no_latency = round(working / no_latency, 2)

    mine = [*runs["ours"], *runs["ours, no latency"]]
    tokens = mine[0].tokens
    all_equal = all(run.tokens == tokens for run in mine)
    rival_games = equal_rival_games = 0
    for name, played in runs.items():
        if name.startswith("ours"):
            continue
        for run in played:
            rival_games += len(games)
            equal_rival_games += sum(theirs == own for theirs, own in zip(run.tokens, tokens, strict=True))
    return {
        "vs_lockstep": ratios.get("lockstep generate"),
        "vs_lockstep_no_latency": lockstep_no_latency,
        "vs_static": ratios.get("lockstep generate, static cache"),
        "vs_generate_batch": min(continuous) if continuous else None,
        "vs_vllm": ratios.get("vLLM"),
        "cpu_ratios": cpu_ratios,
        "tokens_per_s": round(work.new_tokens / ours),
        "identical": count_greedy_games(model, games, tokens) == len(games) and all_equal,
        "rivals_identical": equal_rival_games,
        "rivals_games": rival_games,
        "prefill_exact": all(run.prefilled == work.prefill for run in mine),
        "overlap": round(ours / max(ours_cpu, work.longest_chain), 2),
        "seconds_no_latency": round(no_latency, 2),
        "torch": torch.__version__,
        "device": str(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
