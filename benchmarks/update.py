"""One update of the same model on the same games: ours, TRL's GRPO trainer, and a naive one.

    OMP_NUM_THREADS=1 python -m benchmarks.update [--vocabulary 8192 151936] [--questions 4 1] [--rounds 2]

The naive update computes all logits of padded rows. Each variant runs in a process of its own, which holds
the weights and AdamW's moments before it begins, and the variants take turns. An update consists of packing
or padding, loss and backward of each micro-batch (five games of a question), clipping, and AdamW's step. No
variant includes the forward of the reference. Memory is the peak of the resident set above the state before
the update (Linux: VmHWM after a reset). The table has medians. The last line is JSON; its first entries are
the worst over the vocabularies.
"""

import json
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.measuring import Cost, compare, make_parser, measuring, ratio_to_ours, table
from benchmarks.update_rivals import naive_backward, padded, trl_backward, trl_trainer
from benchmarks.workload import CPU, learn_from, make_update, plan, random_games, random_model
from prompt_r1.agent import attention
from prompt_r1.agent.policy import Policy
from prompt_r1.distributed import Ranks
from prompt_r1.types import ScoredGame

GAMES = 5  # of a question
TOKENS_PER_BATCH = 6144  # enough for the five games of any question, with the opening once


@dataclass
class MeasuredUpdate(Cost):
    """One update."""

    loss: float = 0.0
    gradient: list[float] = field(default_factory=list)  # some entries of each parameter's, clipped


class Variant:
    """A model, its optimiser and the games, in this process."""

    def __init__(self, name: str, games: list[ScoredGame], vocabulary: int) -> None:
        attention.register()
        self.name = name
        self.games = games
        kind = attention.NAME if name == "ours" else "sdpa"
        self.model = random_model(attention=kind, vocabulary=vocabulary)
        ranks = Ranks(rank=0, count=1, device=CPU)
        policy = Policy(self.model, compute=torch.float32)
        self.updater = make_update(policy, ranks, tokens_per_batch=TOKENS_PER_BATCH)
        self.optimizer = self.updater.optimizer
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.optimizer.step()  # allocates the moments
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.param_groups[0]["lr"] = 1e-6
        if name == "trl":
            batches = len(games) // GAMES
            self.trainer = trl_trainer(self.model, rows=GAMES, batches=batches, loss_type="grpo")

    def update(self) -> float:
        """Do one update; returns its loss."""
        if self.name == "ours":
            return learn_from(self.updater, self.games)["loss"]
        micro_batches = []
        for start in range(0, len(self.games), GAMES):
            rows = padded(self.games[start : start + GAMES])
            del rows["old_per_token_logps"]  # the weights have not changed since sampling: ratios are 1
            micro_batches.append(rows)
        if self.name == "trl":
            loss = trl_backward(self.trainer, micro_batches)
        else:
            loss = naive_backward(self.model, micro_batches)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def measure(self) -> MeasuredUpdate:
        """Do one update and measure it."""
        run = MeasuredUpdate()

        def keep_gradient(*_: object) -> None:
            run.gradient = some_entries(self.model)

        # The hook runs after clipping, which scales the gradients of all variants equally.
        handle = self.optimizer.register_step_pre_hook(keep_gradient)
        with measuring(run):
            run.loss = self.update()
        handle.remove()
        return run


def some_entries(model: torch.nn.Module) -> list[float]:
    """A few hundred entries of the gradient of each parameter."""
    flat = [parameter.grad.flatten() for parameter in model.parameters()]
    return torch.cat([gradient[:: max(1, len(gradient) // 500)] for gradient in flat]).tolist()


def games_of(questions: int, vocabulary: int) -> list[ScoredGame]:
    """The games of the update, with the lengths of the rollout benchmark."""
    return random_games(plan(questions, GAMES, seed=1, vocabulary=vocabulary), vocabulary)


@cache
def variant_of_this_process(name: str, vocabulary: int, questions: int) -> Variant:
    """Make the variant at the first call."""
    return Variant(name, games_of(questions, vocabulary), vocabulary)


def measure(*variant: str | int) -> MeasuredUpdate:
    """Let the variant of this process do an update."""
    return variant_of_this_process(*variant).measure()


def naive_fits(games: list[ScoredGame], vocabulary: int) -> bool:
    """Whether half of the free memory holds the naive update's logits, their softmax and its gradient."""
    longest = max(len(game.trajectory.tokens) for game in games)
    free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    float32_bytes = 4
    return 3 * float32_bytes * GAMES * longest * vocabulary < free / 2


def compare_updates(names: list[str], vocabulary: int, questions: int, rounds: int) -> dict[str, float]:
    """Measure the variants in alternating rounds; prints a table and returns the ratios."""
    games = games_of(questions, vocabulary)
    tokens = sum(len(game.trajectory.tokens) for game in games)
    scored = sum(sum(game.trajectory.sampled) for game in games)
    print(f"\nvocabulary {vocabulary:,}: {len(games)} games, {tokens:,} tokens, {scored:,} the agent's")
    if not naive_fits(games, vocabulary):
        names = [name for name in names if name != "naive"]
        print("the naive update is left out: it would need more than half of the free memory")
    with ExitStack() as stack:
        variants = {}
        for name in names:
            process = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            arguments = name, vocabulary, questions
            variants[name] = lambda run=process.submit, arguments=arguments: run(measure, *arguments).result()
        runs = compare(variants, rounds)
    print(table(runs), flush=True)
    ratios = {}
    for name in names[1:]:
        ratios[f"vs_{name}"] = ratio_to_ours(runs, name, "wall")
        ratios[f"cpu_vs_{name}"] = ratio_to_ours(runs, name, "cpu")
        ratios[f"peak_ratio_{name}"] = 1 / ratio_to_ours(runs, name, "peak")
        ratios[f"loss_difference_{name}"] = difference(runs["ours"][0], runs[name][0])
    return {name: float(f"{value:.3g}") for name, value in ratios.items()}


def difference(ours: MeasuredUpdate, theirs: MeasuredUpdate) -> float:
    """The difference of the losses or the relative difference of the gradients, whichever is larger."""
    gradient = torch.tensor(ours.gradient, dtype=torch.float64)
    expected = torch.tensor(theirs.gradient, dtype=torch.float64)
    gradient_difference = (gradient - expected).norm() / expected.norm()
    return max(abs(ours.loss - theirs.loss), gradient_difference.item())


def main() -> None:
    """Compare the updates for each vocabulary."""
    parser = make_parser(__doc__)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[8192, 151936])
    parser.add_argument("--questions", type=int, nargs="+", default=[4, 1], help="for each vocabulary")
    parser.add_argument("--rounds", type=int, default=2, help="alternating rounds")
    options = parser.parse_args()
    if len(options.vocabulary) != len(options.questions):
        parser.error("--questions takes as many values as --vocabulary (by default two)")
    names = ["ours", "trl", "naive"]
    if find_spec("trl") is None:
        names.remove("trl")
        print("TRL is not installed: ours is compared with the naive update only")
    results: dict[int, dict[str, float]] = {}
    for vocabulary, questions in zip(options.vocabulary, options.questions, strict=True):
        results[vocabulary] = compare_updates(names, vocabulary, questions, options.rounds)

    def measured(name: str) -> list[float]:
        """The values of all entries that begin with `name`, over the vocabularies."""
        return [value for found in results.values() for key, value in found.items() if key.startswith(name)]

    rival = "trl" if "trl" in names else "naive"
    worst = {
        "vs_naive": min(measured("vs_naive"), default=None),
        "vs_trl": min(measured("vs_trl"), default=None),
        "peak_extra_ratio": max(measured(f"peak_ratio_{rival}"), default=None),
        "loss_difference": max(measured("loss_difference"), default=None),
    }
    print(json.dumps(worst | {"threads": torch.get_num_threads(), "by_vocabulary": results}))


if __name__ == "__main__":
    main()
