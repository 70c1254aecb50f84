"""The rollout engine and its rivals on the same model, the same games, greedy, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout [--questions 8] [--rounds 3] [--ablations]
    python -m benchmarks.rollout --model large --lengths long --questions 16 --rivals lockstep vllm

The rivals: lockstep `model.generate` that computes every turn again from its first token (as the released
code plays), the same with a static cache, transformers' continuous batching (pages of 32, block sharing,
every game on its own), and vLLM where it is installed. Rounds alternate; the table has medians. The last
line is JSON.
"""

import argparse
import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from statistics import median

import torch
from transformers import PreTrainedModel

from benchmarks.rivals import Vllm, play_continuous, play_generate, play_lockstep
from benchmarks.runs import Run, Tokens, clock, compare, table, typical
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
from prompt_r1.agent.attention import Chunk
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.kv_cache import Segment
from prompt_r1.agent.policy import Policy

RIVALS = ("lockstep", "static", "continuous", "vllm")
VLLM_SHARE = 0.4  # of the GPU's memory


class Timed(Engine):
    """Tells what its forwards are spent on."""

    prefill_seconds = decode_seconds = active_seconds = 0.0

    async def _run(self) -> None:
        start = clock()
        await super()._run()
        self.active_seconds += clock() - start

    def _forward(self, ids: list[int], chunks: list[Chunk]) -> torch.Tensor:
        start = clock()
        hidden = super()._forward(ids, chunks)
        if len(ids) > len(chunks):
            self.prefill_seconds += clock() - start
        else:
            self.decode_seconds += clock() - start
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
    # A CPU has memory for all; on a GPU the engine takes what it takes in training.
    rows = len(games) * longest(games) * 5 // 4 if policy.device.type == "cpu" else 0
    engine = kind(policy, stop_ids=frozenset(), max_tokens=longest(games), **({"kv_tokens": rows} | options))

    async def generate(tokens: list[int], max_new: int) -> list[int]:
        return (await engine.generate(tokens, max_new=max_new, seed="", temperature=0.0)).tokens

    async def run_on_all_ranks(histories: Tokens, counts: list[int]) -> Tokens:
        return await asyncio.gather(*map(generate, histories, counts))

    def turn(histories: Tokens, counts: list[int]) -> Tokens:
        return runner.run(run_on_all_ranks(histories, counts))

    if lockstep:
        with asyncio.Runner() as runner:
            run = play_lockstep(games, turn, latency=latency)
    else:
        start = clock()
        run = Run(asyncio.run(play_async(games, generate, latency=latency)))
        run.waiting = clock() - start - engine.active_seconds
    run.prefill, run.decode = engine.prefill_seconds, engine.decode_seconds
    run.prefilled = engine.prefilled
    return run


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=8, help="each is played 5 times (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default 3)")
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=[*RIVALS],
                        help="what to compare with (all; vLLM where it is installed)")  # fmt: skip
    parser.add_argument("--model", choices=("small", "large"), default="small",
                        help="7 M random weights in float32, or of Qwen3-4B's shape in bfloat16")  # fmt: skip
    parser.add_argument("--lengths", choices=[*LENGTHS], default="short", help="of the games")
    parser.add_argument("--batches", type=int, nargs="*", default=[256], metavar="TOKENS",
                        help="largest batches of continuous batching; the best one counts (256)")  # fmt: skip
    parser.add_argument("--pages", type=int, default=0, help="its pages of 32 tokens (default: ample)")
    parser.add_argument("--ablations", action="store_true", help="switch off one ingredient at a time")
    choice = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention.register()
    games = plan(choice.questions, 5, seed=1, lengths=LENGTHS[choice.lengths])
    work = totals(games)
    print(f"{work}\nprompt tokens when nothing is computed twice: {work.prefill}", flush=True)
    model = load(choice.model, attention.NAME, device)
    policy = Policy(model, compute=model.dtype)
    rival = load(choice.model, "sdpa", device)
    with ExitStack() as stack:
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
            paged = load(choice.model, "sdpa", device)
            for batch in choice.batches:
                name = f"continuous batching, {batch} tokens"
                variants[name] = lambda batch=batch: play_continuous(
                    paged, games, latency=True, batch=batch, pages=choice.pages or 4096 * len(games) // 40
                )
        if "vllm" in choice.rivals and find_spec("vllm"):
            vllm = stack.enter_context(Vllm(rival, games, share=VLLM_SHARE))
            variants["vLLM"] = lambda: vllm.play(latency=True)
        runs = compare(variants, choice.rounds)
    print("\n" + table(runs, work, "ours"))
    if choice.ablations:
        ablate(policy, games, work, choice.rounds)
    print(json.dumps(summary(runs, rival, games, work)))


def load(model: str, attention: str, device: torch.device) -> PreTrainedModel:
    """The same random weights each time."""
    if model == "small":
        return small_model(attention=attention).to(device)
    return large_model(attention=attention, device=device)


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
    working = median(run.wall - run.waiting for run in lockstep) if lockstep else 0.0
    cpu = {name: round(typical(ran, "cpu") / typical(runs["ours"], "cpu"), 2) for name, ran in runs.items()}
    greedy = likeliest(model, games, tokens) == len(games) and all(run.tokens == tokens for run in mine)
    return {
        "vs_lockstep": ratio("lockstep generate"),
        "vs_lockstep_no_latency": round(working / idle, 2) if lockstep else None,
        "vs_static": ratio("lockstep generate, static cache"),
        "vs_generate_batch": min(
            (ratio(name) for name in runs if name.startswith("continuous")), default=None
        ),
        "vs_vllm": ratio("vLLM"),
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
