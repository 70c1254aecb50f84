"""The first minutes on a new CUDA machine: what works, how fast, and a number for each.

    python -m benchmarks.gpu_check
    torchrun --nproc-per-node 8 -m benchmarks.gpu_check          # also the checks of several GPUs

At most 10 minutes. Every row is PASS, FAIL (wrong), SLOW (right, but below the limit that its note gives) or
SKIP (with the reason). A row that raises is FAIL with its error, and the others still run. Of several GPUs, a
row is that of the worst. Weights are random: the shape of Qwen3-4B on GPUs of more than 100 GB, of Qwen3-0.6B
on smaller ones, and a tiny one on a CPU. The last line is JSON; paste it into an issue ("A run on GPUs").
With several GPUs a first version of it comes before the rows in which they work together: if one of them
fails there, the others wait for it and are ended.
"""

import asyncio
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from benchmarks import forwards
from benchmarks.measuring import clock, make_parser, memory, seconds
from benchmarks.workload import VOCABULARY, learn_from, make_update, plan, random_games, random_model
from prompt_r1.agent import attention, packing
from prompt_r1.agent.attention_choice import describe_attention
from prompt_r1.agent.cuda_graphs import SIZES, TOLERANCE, Record
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.kv_cache import affordable_rows
from prompt_r1.agent.lora import adapters_of, add_lora
from prompt_r1.agent.packing import Group
from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed import Ranks, full_tensor, start_ranks, stop_ranks
from prompt_r1.storage.checkpoint import Checkpoints, State
from prompt_r1.training.update import Update, limit_of
from prompt_r1.types import ScoredGame
from prompt_r1.version import installed_version

PASS, SKIP, SLOW, FAIL = VERDICTS = ("PASS", "SKIP", "SLOW", "FAIL")  # from good to bad
TIME_LIMIT = 540.0  # seconds after which no further row begins
COLLECTIVE_TIMEOUT = 120.0  # seconds that a rank waits for another
# Datasheets: bytes/s of the memory, FLOP/s of dense bfloat16 products. Names of slices of a GPU are longer.
DATASHEETS = {
    "NVIDIA A100-SXM4-40GB": (1.555e12, 312e12),
    "NVIDIA A100-SXM4-80GB": (2.039e12, 312e12),
    "NVIDIA A100-PCIE-40GB": (1.555e12, 312e12),
    "NVIDIA A100 80GB PCIe": (1.935e12, 312e12),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),
    "NVIDIA H200": (4.8e12, 989e12),
}


class Skipped(Exception):
    """A row that makes no sense here, and why."""


@dataclass(frozen=True)
class Row:
    """A line of the table: what a check measured."""

    value: float | None
    unit: str = ""
    note: str = ""
    verdict: str = PASS
    name: str = ""  # of the check


def at_least(value: float, limit: float, unit: str, note: str) -> Row:
    """PASS from a limit on, SLOW below."""
    return Row(value, unit, f"{note}; at least {limit:g} expected", PASS if value >= limit else SLOW)


def at_most(value: float, limit: float, unit: str, note: str) -> Row:
    """PASS up to a limit, FAIL above, and for NaN."""
    return Row(value, unit, f"{note}; at most {limit:g} allowed", PASS if value <= limit else FAIL)


@dataclass
class Machine:
    """The device and its models."""

    ranks: Ranks
    record: Record | None = None  # of decode steps; None: as CUDA graphs, on GPUs

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def rounding(self) -> float:
        """The relative error that attention may have."""
        return 2e-2 if self.cuda else 1e-5

    @cached_property
    def model_name(self) -> str:
        if not self.cuda:
            return "small"
        total = torch.cuda.get_device_properties(self.device).total_memory
        return "Qwen3-4B" if total > 100e9 else "Qwen3-0.6B"

    def model(self, name: str, dtype: torch.dtype) -> PreTrainedModel:
        attention.register()
        return random_model(name, attention=attention.NAME, dtype=dtype, device=self.device)

    @cached_property
    def policy(self) -> Policy:
        """The weights that play."""
        return self.new_policy(self.dtype)

    def new_policy(self, weights: torch.dtype, name: str = "") -> Policy:
        """A policy with weights of this dtype."""
        return Policy(self.model(name or self.model_name, weights), compute=self.dtype)

    @cached_property
    def bench(self) -> forwards.Bench:
        """An engine whose cache is full of random numbers."""
        longest, rows = (4096, min(150_000, affordable_rows(self.policy))) if self.cuda else (512, 8_192)
        return forwards.Bench(self.policy, rows=rows, longest=longest, rounds=9, record=self.record)

    @cached_property
    def limits(self) -> forwards.Limits:
        return forwards.measure_limits(self.device, self.dtype, 5)

    @property
    def datasheet(self) -> tuple[float, float]:
        """What the device should do; 0: unknown."""
        name = torch.cuda.get_device_name(self.device) if self.cuda else ""
        return DATASHEETS.get(name, (0.0, 0.0))

    def share(self, share: float, limit: float, note: str) -> Row:
        """A share of what the device can do, with a limit on GPUs only."""
        if self.cuda:
            return at_least(100 * share, 100 * limit, "%", note)
        return Row(100 * share, "%", note)

    def games(self, questions: int) -> list[ScoredGame]:
        """Random games to train on; on a CPU only three of them."""
        games = random_games(plan(questions, 5, seed=1), VOCABULARY)
        return games if self.cuda else games[:3]

    def free(self) -> None:
        """Free what earlier rows hold."""
        for name in ("policy", "bench"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


# Versions, memory, limits


def versions(machine: Machine) -> Row:
    packages = ("torch", "transformers", "flash-attn", "triton")
    parts = [f"{name} {installed_version(name) or 'absent'}" for name in packages]
    verdict = PASS
    if machine.cuda:
        free, total = torch.cuda.mem_get_info(machine.device)
        parts += [f"CUDA {torch.version.cuda}", torch.cuda.get_device_name(machine.device)]
        parts.append(f"{free / 1e9:.0f} of {total / 1e9:.0f} GB free")
        verdict = PASS if free > 0.9 * total else SLOW
    return Row(machine.ranks.count, "ranks", ", ".join([*parts, f"model {machine.model_name}"]), verdict)


def bandwidth(machine: Machine) -> Row:
    limit = 0.75 * machine.datasheet[0] / 1e9
    return at_least(machine.limits.bandwidth / 1e9, limit, "GB/s", "copy")


def matrix_product(machine: Machine) -> Row:
    limit = 0.6 * machine.datasheet[1] / 1e12
    return at_least(machine.limits.flops / 1e12, limit, "TFLOP/s", f"{machine.dtype}")


# Attention


def kernels(machine: Machine) -> Row:
    line = describe_attention(machine.policy.attention)
    slow = "one_by_one" in line or "game_by_game" in line
    shared = "shared" if machine.policy.attention.shares_rows else "copied"
    text = f"{line}; prompts of a group: {shared}"
    return Row(None, "", text, FAIL if slow and machine.cuda else PASS)


def arena_attention(machine: Machine) -> Row:
    kernel, error = forwards.attention_error(machine.policy)
    return at_most(error, machine.rounding, "", f"{kernel} against float64")


def packed_attention_error(machine: Machine) -> Row:
    """The relative error of output and gradients, the largest of the four."""
    shape = attention.attention_shape(machine.policy.model.config)
    attend = machine.policy.attention.packed
    groups = (Group(0, 300, (200, 450, 70)), Group(1020, 500, ()))
    torch.manual_seed(0)
    inputs = [
        torch.randn(heads, 1520, shape.dim, device=machine.device, dtype=machine.dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    ]
    found, exact = [], []
    for results, dtype, compute in (
        (found, machine.dtype, attend),
        (exact, torch.float64, packing.game_by_game),
    ):
        *leaves, gradient = [rows.to(dtype, copy=True) for rows in inputs]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.enable_grad():
            query, key, value = leaves
            out = compute(groups, query, key, value, shape.dim**-0.5, None)
            results += [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    note = f"{attend.__name__}, forward and backward, against float64"
    return at_most(max(errors), machine.rounding, "", note)


# Decoding


@torch.inference_mode()
def graphs_of_every_size(machine: Machine) -> Row:
    bench = machine.bench
    if bench.graphs is None:
        raise Skipped("the chosen attention cannot be recorded")
    context = bench.engine.max_tokens // 16
    for size in SIZES:
        bench.steps(size, min(context, bench.engine.kv_tokens // size - 1)).recorded()
        if bench.graphs.broken:
            return Row(size, "rows", "could not be recorded, or its result differs", FAIL)
    held = torch.cuda.memory_reserved(machine.device) / 1e9 if machine.cuda else 0.0
    return Row(len(SIZES), "sizes", f"{held:.1f} GB are reserved with them")


@torch.inference_mode()
def replay_after_new_weights(machine: Machine) -> Row:
    steps = machine.bench.steps(8, 100)
    if steps.recorded is None or machine.bench.graphs.broken:
        raise Skipped("nothing is recorded")
    before = steps.recorded().hidden.float().clone()
    for weight in machine.policy.parameters():
        weight.mul_(1.05)
    found = steps.recorded().hidden.float().clone()
    expected = steps.eager().hidden.float()
    for weight in machine.policy.parameters():
        weight.div_(1.05)
    if torch.equal(before, found):
        return Row(0.0, "", "the replay ignores new weights", FAIL)
    difference = float((found - expected).norm() / expected.norm())
    return at_most(difference, TOLERANCE, "", "replay against the direct step after a change of weights")


def gap(machine: Machine) -> Row:
    """The engine's log-probabilities of games, against a forward over them."""
    return _gap(machine.policy)


def gap_with_adapters(machine: Machine) -> Row:
    """The same with adapters beside the weights, as `--adapter-rank` plays and learns."""
    policy = machine.new_policy(machine.dtype)
    add_lora(policy.model, rank=8, alpha=32)
    for layer in adapters_of(policy.model).values():
        torch.nn.init.normal_(layer.b, std=0.01)
    policy.checkpoint_activations()
    return _gap(policy)


def _gap(policy: Policy) -> Row:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(20, 60))] for _ in range(8)]
    engine = Engine(policy, stop_ids=frozenset(), max_tokens=128, kv_tokens=2048)

    async def play() -> list[tuple[list[int], list[float]]]:
        games = [engine.generate(prompt, max_new=30, seed=str(n)) for n, prompt in enumerate(prompts)]
        return [(done.tokens, done.logprobs) for done in await asyncio.gather(*games)]

    gaps = []
    with torch.inference_mode():
        for prompt, (tokens, logprobs) in zip(prompts, asyncio.run(play()), strict=True):
            row = torch.tensor([prompt + tokens], device=policy.device)
            positions = torch.arange(row.shape[1], device=policy.device)[None]
            hidden = policy.hidden_states(row, position_ids=positions)[0, len(prompt) - 1 : -1]
            scores = policy.logits(hidden).log_softmax(-1)
            found = scores.gather(1, row[0, len(prompt) :, None])[:, 0].cpu()
            gaps += (found - torch.tensor(logprobs)).abs().tolist()
    note = f"mean of {len(gaps)} tokens, at most {max(gaps):.2g}"
    return at_most(sum(gaps) / len(gaps), limit_of(policy.compute).alarm, "nats", note)


def decode(sequences: int) -> Callable[[Machine], Row]:
    """The check of a decode step with this many sequences."""

    @torch.inference_mode()
    def check(machine: Machine) -> Row:
        bench = machine.bench
        context = min(1000, bench.engine.kv_tokens // sequences - 1) if machine.cuda else 30
        steps = bench.steps(sequences, context)
        run = steps.recorded or steps.eager
        taken, eager = (seconds(lambda run=run: run().drawn.tolist(), 9) for run in (run, steps.eager))
        note = f"{context} tokens each; {1e3 * taken:.2f} ms, without graphs {1e3 * eager:.2f}"
        least = bench.bytes_read(sequences, context) / machine.limits.bandwidth
        return machine.share(least / taken, 0.5, f"of the roofline with {note}")

    return check


@torch.inference_mode()
def prefill(machine: Machine) -> Row:
    tokens = min(8192 if machine.cuda else 512, machine.bench.engine.kv_tokens // 8 * 8)
    flop, taken = machine.bench.prefill(tokens, prompts=8)
    note = f"{tokens} tokens in {1e3 * taken:.1f} ms; share of the product's speed"
    return machine.share(flop / taken / machine.limits.flops, 0.4, note)


# The update


def update(machine: Machine) -> Row:
    """One optimiser step in float32 weights and the compute dtype: MFU, and its peak memory."""
    limit = 16_384 if machine.cuda else 4_096
    machine.free()
    learner = machine.new_policy(torch.float32)
    learner.checkpoint_activations()
    # The copy that plays is allocated too, as in training.
    playing = learner if machine.dtype == torch.float32 else machine.policy
    updater = make_update(learner, Ranks(0, 1, machine.device), tokens_per_batch=limit)
    games = machine.games(6)
    learn_from(updater, games)  # allocates the moments
    memory(reset=True)
    start = clock()
    learn_from(updater, games)
    taken = clock() - start
    peak = 1e6 * memory()
    del playing
    note = f"{taken:.2f} s; share of the product's speed"
    if machine.cuda:  # resident memory of a CPU process holds the libraries too
        note += f"; peak {peak / 1e9:.1f} GB"
    return machine.share(_update_flop(games, learner) / taken / machine.limits.flops, 0.3, note)


def _update_flop(games: list[ScoredGame], policy: Policy) -> float:
    """FLOP of four forwards (activations are recomputed) without attention, each opening once."""
    head = policy.model.get_output_embeddings().weight.numel()
    weights = sum(weight.numel() for weight in policy.model.parameters()) - head
    trajectories = [game.trajectory for game in games]
    openings = {tuple(game.tokens[: game.opening]): game.opening for game in trajectories}
    columns = sum(openings.values()) + sum(len(game.tokens) - game.opening for game in trajectories)
    return 8 * (weights * columns + head * sum(sum(game.sampled) for game in trajectories))


# Several ranks


def sharded(*, offload: bool = False, as_in_training: bool = False) -> Callable[[Machine], Row]:
    """The check of the gradient's norm of all ranks together against that of one process, in float32.

    `as_in_training`: with all that training adds, and the copy of the weights that plays.
    """

    def learner(machine: Machine, device: torch.device) -> Policy:
        if not as_in_training:
            return Policy(random_model(attention=attention.NAME, device=device), compute=torch.float32)
        policy = machine.new_policy(torch.float32, "small")
        policy.checkpoint_activations()
        return policy

    def check(machine: Machine) -> Row:
        ranks = machine.ranks
        if ranks.count == 1:
            raise Skipped("start it with torchrun")
        machine.free()
        attention.register()
        games = machine.games(2)
        alone = learner(machine, machine.device)
        expected = _gradient_norm(alone, Ranks(0, 1, machine.device), games)
        many = learner(machine, torch.device("cpu") if offload else machine.device)
        mesh = init_device_mesh(machine.device.type, (ranks.count,))
        many.shard(mesh, machine.device, offload=offload)
        found = _gradient_norm(many, replace(ranks, mesh=mesh), games[ranks.rank :: ranks.count])
        difference = abs(found - expected) / expected
        if as_in_training:
            playing = Policy(machine.model("small", machine.dtype), compute=machine.dtype)
            playing.copy_weights_from(many)
            for mine, weight in zip(playing.parameters(), many.parameters(), strict=True):
                if not torch.equal(mine, full_tensor(weight.detach()).to(mine.dtype)):
                    return Row(difference, "", "the copy that plays has other weights", FAIL)
        limit = 2e-2 if as_in_training and machine.cuda else 1e-4
        return at_most(difference, limit, "", "norm of the gradient against one process")

    return check


def _gradient_norm(policy: Policy, ranks: Ranks, games: list[ScoredGame]) -> float:
    updater = make_update(policy, ranks, tokens_per_batch=6_144)
    return learn_from(updater, games)["grad_norm"]


def checkpoint(machine: Machine) -> Row:
    """Write a checkpoint on all ranks, and read it in one process."""
    machine.free()
    ranks = machine.ranks
    with ExitStack() as stack:
        folder = ""
        if ranks.first:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")))
        folder = ranks.from_first(lambda: folder)
        if not all(ranks.gather(Path(folder).is_dir())):
            raise Skipped("TMPDIR must be a folder that all nodes see")

        def saved_by(update: Update, ranks: Ranks) -> Checkpoints:
            config = TrainConfig(save_every=1)
            path, optimizer = Path(folder), update.optimizer
            return Checkpoints(path, update.policy, optimizer, config, ranks, say=str)

        def read_alone() -> float:
            policy = machine.new_policy(torch.float32, "small")
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.zero_()
            alone = Ranks(0, 1, machine.device)
            checkpoints = saved_by(make_update(policy, alone, tokens_per_batch=6_144), alone)
            checkpoints.load(checkpoints.newest())
            return sum_of_squares(policy)

        policy = machine.new_policy(torch.float32, "small")
        mesh = init_device_mesh(machine.device.type, (ranks.count,)) if ranks.count > 1 else None
        if mesh is not None:
            policy.shard(mesh, machine.device, offload=False)
        share = replace(ranks, mesh=mesh)
        updater = make_update(policy, share, tokens_per_batch=6_144)
        learn_from(updater, machine.games(1)[ranks.rank :: ranks.count])
        start = clock()
        failure = saved_by(updater, share).save(State(step=1))
        taken = clock() - start
        if failure:
            return Row(taken, "s", failure, FAIL)
        written, read = sum_of_squares(policy), ranks.from_first(read_alone)
    note = f"written by {ranks.count} in {taken:.1f} s, read by one process"
    return at_most(abs(read / written - 1), 1e-9, "", note)


def sum_of_squares(policy: Policy) -> float:
    """Of all weights, sharded or not. Called by every rank that has a part of them."""
    return sum(float(full_tensor(weight.detach()).double().square().sum()) for weight in policy.parameters())


FIRST_TOGETHER = "fsdp"  # the first row in which the ranks work together
CHECKS: dict[str, Callable[[Machine], Row]] = {
    "versions": versions,
    "bandwidth": bandwidth,
    "matrix product": matrix_product,
    "kernels": kernels,
    "attention over the cache": arena_attention,
    "attention of the update": packed_attention_error,
    "graphs of every size": graphs_of_every_size,
    "replay with new weights": replay_after_new_weights,
    "gap engine - policy": gap,
    "gap with adapters": gap_with_adapters,
    **{f"decode {sequences}": decode(sequences) for sequences in (32, 64, 128, 256)},
    "prefill": prefill,
    "update": update,
    FIRST_TOGETHER: sharded(),
    "fsdp, offloaded": sharded(offload=True),
    "fsdp, as in training": sharded(as_in_training=True),
    "checkpoint": checkpoint,
}


def run_check(name: str, check: Callable[[Machine], Row], machine: Machine) -> Row:
    """A line of the table, whatever the check does."""
    try:
        found = check(machine)
    except Skipped as reason:
        found = Row(None, "", str(reason), SKIP)
    except Exception as error:  # a row must not end the others
        first_line = str(error).strip().partition("\n")[0]
        found = Row(None, "", f"{type(error).__name__}: {first_line}", FAIL)
    return replace(found, name=name)


def run_checks(machine: Machine, checks: dict[str, Callable[[Machine], Row]], end: float) -> Iterator[Row]:
    """The lines of the table; after the time `end` the checks are skipped. Called by every rank."""
    late = False
    for name, check in checks.items():
        own = Row(None, "", "no time left", SKIP, name) if late else run_check(name, check, machine)
        # They travel through CPU memory: after an illegal access, every call of CUDA would raise.
        found = machine.ranks.gather((own, time.monotonic() > end))
        late = any(is_late for _, is_late in found)
        yield worst([row for row, _ in found])


def worst(rows: Sequence[Row]) -> Row:
    """Of the ranks' rows of a check, the first of the worst verdict."""
    verdicts = [row.verdict for row in rows]
    verdict = max(verdicts, key=VERDICTS.index)
    rank, count = verdicts.index(verdict), verdicts.count(verdict)
    if count == len(rows):
        return rows[0]
    return replace(rows[rank], note=f"on {count} of {len(rows)} ranks, first rank {rank}: {rows[rank].note}")


def main() -> None:
    """Run all checks, and print the table and the JSON line."""
    make_parser(__doc__).parse_args()
    began = time.monotonic()
    parallel = "ddp" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else "none"
    ranks = start_ranks("auto", parallel, timeout=COLLECTIVE_TIMEOUT)
    rows: list[Row] = []

    def print_json() -> None:
        found = {"seconds": round(time.monotonic() - began), "rows": [asdict(row) for row in rows]}
        print(json.dumps(found), flush=True)

    for row in run_checks(Machine(ranks), CHECKS, began + TIME_LIMIT):
        rows.append(row)
        if ranks.first:
            value = "" if row.value is None else f"{row.value:.4g}"
            print(f"{row.verdict:4}  {row.name:24}  {value:>9} {row.unit:11}  {row.note}", flush=True)
            if ranks.count > 1 and len(rows) == list(CHECKS).index(FIRST_TOGETHER):
                print_json()
    if ranks.first:
        print_json()
    stop_ranks(ranks)


if __name__ == "__main__":
    main()
