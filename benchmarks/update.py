"""One update of the same model by the same games: ours, TRL's GRPO trainer, and padded rows with all logits.

    OMP_NUM_THREADS=1 python -m benchmarks.update [--vocabulary 8192 151936] [--questions 4 1] [--rounds 2 2]

Each variant is a process of its own, with the weights and AdamW's moments in memory before it begins; they
take turns. An update is the packing or padding, loss and backward of each micro-batch (five games of a
question), clipping and AdamW's step. The reference's pass is in none of them. Memory is the peak of the
resident set above the state before (Linux: VmHWM after a reset). The largest tensor is the largest that any
operation returned. The table has medians; the last line is JSON, with the worst of the vocabularies at its
top.
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.runs import memory
from benchmarks.update_rivals import CLIP, naive_backward, padded, trl_backward, trl_trainer
from benchmarks.workload import plan, small_model
from prompt_r1.agent import attention
from prompt_r1.agent.policy import Policy
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.training.update import Updater
from prompt_r1.types import Completion, Question, Reward, ScoredGame, Trajectory

GAMES = 5  # of a question
TOKENS_PER_BATCH = 6144  # holds the five games of any question here, its opening once
CPU = torch.device("cpu")


@dataclass
class Run:
    """One update."""

    wall: float  # seconds
    cpu: float  # seconds of the process
    peak: float  # MB above the state before
    largest: float  # MB of the largest tensor that an operation returned
    loss: float
    gradient: list[float]  # some entries of every parameter's, before clipping


def some_samples(questions: int, vocabulary: int) -> list[ScoredGame]:
    """Games of the rollout benchmark's lengths, with random tokens and advantages."""
    rng = random.Random(0)
    samples = []
    for game in plan(questions, GAMES, seed=1, vocabulary=vocabulary):
        trajectory = Trajectory(Question("q", "d", "?", ("a",)), stop="answered")
        trajectory.add_context(game.prompt)
        for turn in game.turns:
            new = [rng.randrange(vocabulary) for _ in range(turn.new_tokens)]
            trajectory.add_sampled(Completion(new, [0.0] * len(new), True))
            trajectory.add_context(turn.reply)
        samples.append(ScoredGame(trajectory, Reward(0, 0, 0), rng.gauss(0.2, 1)))
    return samples


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    megabytes = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.megabytes = max(self.megabytes, leaf.nelement() * leaf.element_size() / 1e6)
        return out


class Variant:
    """A model, its optimiser and the games, in this process."""

    def __init__(self, name: str, samples: list[ScoredGame], vocabulary: int) -> None:
        attention.register()
        self.name, self.samples = name, samples
        self.model = small_model(
            attention=attention.NAME if name == "ours" else "sdpa", vocabulary=vocabulary
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # makes the moments
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.param_groups[0]["lr"] = 1e-6
        if name == "ours":
            policy, one = Policy(self.model, compute=torch.float32), Ranks(rank=0, count=1, device=CPU)
            self.updater = Updater(
                policy, None, self.optimizer, one, clip=CLIP, kl_coef=0.0, grad_clip=1.0, token_mean=False,
                tokens_per_batch=TOKENS_PER_BATCH,
            )  # fmt: skip
        if name == "trl":
            batches = len(samples) // GAMES
            self.trainer = trl_trainer(self.model, rows=GAMES, batches=batches, loss_type="grpo")

    def update(self) -> float:
        """One update; returns its loss."""
        if self.name == "ours":
            return self.updater.update([self.samples])["loss"]
        rows = [padded(self.samples[at : at + GAMES]) for at in range(0, len(self.samples), GAMES)]
        for micro_batch in rows:
            del micro_batch["old_per_token_logps"]  # the first use of the weights: ratios are 1
        backward = trl_backward if self.name == "trl" else naive_backward
        loss = backward(self.trainer if self.name == "trl" else self.model, rows)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def measure(self) -> Run:
        gradient: list[float] = []
        # Clipping has scaled the gradient alike in all variants.
        note = lambda *_: gradient.extend(some_entries(self.model))  # noqa: E731
        handle = self.optimizer.register_step_pre_hook(note)
        gc.collect()
        before = memory(reset=True)
        wall, cpu = time.perf_counter(), time.process_time()
        with Largest() as largest:
            loss = self.update()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = memory() - before
        handle.remove()
        return Run(wall, cpu, peak, largest.megabytes, loss, gradient)


def some_entries(model: torch.nn.Module) -> list[float]:
    """Some hundred entries of each parameter's gradient."""
    flat = [parameter.grad.flatten() for parameter in model.parameters()]
    return torch.cat([gradient[:: max(1, len(gradient) // 500)] for gradient in flat]).tolist()


def serve(name: str, vocabulary: int, questions: int) -> None:
    """The child: an update for each line that comes."""
    variant = Variant(name, some_samples(questions, vocabulary), vocabulary)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(asdict(variant.measure())), flush=True)


class Child:
    """A variant in a process of its own."""

    def __init__(self, name: str, vocabulary: int, questions: int) -> None:
        arguments = ["--serve", name, "--vocabulary", str(vocabulary), "--questions", str(questions)]
        command = [sys.executable, "-m", "benchmarks.update", *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.read()  # ready

    def read(self) -> str:
        line = self.process.stdout.readline()
        while line and not line.startswith(("ready", "{")):  # what libraries print
            line = self.process.stdout.readline()
        assert line, f"{self.process.args} ended"
        return line

    def measure(self) -> Run:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return Run(**json.loads(self.read()))

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def fits(samples: list[ScoredGame], vocabulary: int) -> bool:
    """Whether the naive update may run: its logits, their softmax and its gradient in half of free memory."""
    longest = max(len(sample.trajectory.tokens) for sample in samples)
    free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    return 3 * 4 * GAMES * longest * vocabulary < free / 2


def compare(names: list[str], vocabulary: int, questions: int, rounds: int) -> dict[str, float]:
    """Alternating rounds; prints a table, returns the ratios."""
    samples = some_samples(questions, vocabulary)
    tokens = sum(len(sample.trajectory.tokens) for sample in samples)
    scored = sum(sum(sample.trajectory.sampled) for sample in samples)
    print(f"\nvocabulary {vocabulary:,}: {len(samples)} games, {tokens:,} tokens, {scored:,} the agent's")
    if not fits(samples, vocabulary):
        names = [name for name in names if name != "naive"]
        print("the naive update would need more than half of the free memory: left out")
    children = {name: Child(name, vocabulary, questions) for name in names}
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, child in children.items():
            runs[name].append(child.measure())
    for child in children.values():
        child.end()

    print(f"{'':8}{'wall s':>9}{'CPU s':>9}{'extra MB':>10}{'largest MB':>12}{'wall ×':>8}{'CPU ×':>8}")
    out = {}
    for name in names:
        wall, cpu, peak, largest = (
            median(getattr(run, field) for run in runs[name]) for field in ("wall", "cpu", "peak", "largest")
        )
        ratio, cpu_ratio = _ratio(runs, name, "wall"), _ratio(runs, name, "cpu")
        print(
            f"{name:8}{wall:9.1f}{cpu:9.1f}{peak:10.0f}{largest:12.1f}{ratio:8.2f}{cpu_ratio:8.2f}",
            flush=True,
        )
        if name != "ours":
            out |= {f"vs_{name}": ratio, f"cpu_vs_{name}": cpu_ratio}
            out[f"peak_ratio_{name}"] = 1 / _ratio(runs, name, "peak")
            out[f"loss_difference_{name}"] = difference(runs["ours"][0], runs[name][0])
    return {name: float(f"{value:.3g}") for name, value in out.items()}


def _ratio(runs: dict[str, list[Run]], name: str, field: str) -> float:
    """How many times ours a variant takes: the median over the rounds."""
    pairs = zip(runs[name], runs["ours"], strict=True)
    return median(getattr(theirs, field) / getattr(ours, field) for theirs, ours in pairs)


def difference(ours: Run, theirs: Run) -> float:
    """The larger of the loss's difference and the gradient's relative one."""
    a, b = (
        torch.tensor(ours.gradient, dtype=torch.float64),
        torch.tensor(theirs.gradient, dtype=torch.float64),
    )
    return max(abs(ours.loss - theirs.loss), ((a - b).norm() / b.norm()).item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[8192, 151936])
    parser.add_argument("--questions", type=int, nargs="+", default=[4, 1], help="for each vocabulary")
    parser.add_argument("--rounds", type=int, nargs="+", default=[2, 2], help="for each vocabulary")
    parser.add_argument("--serve", metavar="VARIANT", help="be the process of one variant")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.vocabulary[0], options.questions[0])
        return
    names = ["ours", "trl", "naive"]
    if find_spec("trl") is None:
        names.remove("trl")
        print("TRL is not installed: only the naive update is compared with")
    results = {
        vocabulary: compare(names, vocabulary, questions, rounds)
        for vocabulary, questions, rounds in zip(
            options.vocabulary, options.questions, options.rounds, strict=True
        )
    }

    def over(name: str) -> list[float]:
        return [value for result in results.values() for key, value in result.items() if key.startswith(name)]

    rival = "trl" if "trl" in names else "naive"
    worst = {
        "vs_naive": min(over("vs_naive"), default=None),
        "vs_trl": min(over("vs_trl"), default=None),
        "peak_extra_ratio": max(over(f"peak_ratio_{rival}"), default=None),
        "loss_difference": max(over("loss_difference"), default=None),
    }
    print(json.dumps(worst | {"threads": torch.get_num_threads(), "by_vocabulary": results}))


if __name__ == "__main__":
    main()
