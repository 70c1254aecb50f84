"""One update of the same model on the same games: ours, TRL's GRPO trainer, and a naive one.

    OMP_NUM_THREADS=1 python -m benchmarks.update [--questions 4] [--rounds 2]
    OMP_NUM_THREADS=1 python -m benchmarks.update --vocabulary 151936 --questions 1 --rivals trl
    OMP_NUM_THREADS=1 python -m benchmarks.update --model smollm2 --vocabulary 49152 --lengths smollm2

The naive update computes all logits of padded rows, which take 12 GB with a large vocabulary. If TRL is not
installed, it is left out. Each variant runs in a process of its own, which holds the weights and AdamW's
moments before it begins. The variants take turns. An update consists of packing or padding, loss and backward
of each micro-batch (five games of a question), clipping, and AdamW's step. No variant includes the forward of
the reference. Memory is the peak of the resident set above the state before the update (Linux: VmHWM after a
reset). The table has medians.
"""

from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context

import torch

from benchmarks.measuring import Cost, compare, make_parser, measuring, table
from benchmarks.update_rivals import naive_backward, padded, trl_backward, trl_trainer
from benchmarks.workload import LENGTHS, learn_from, plan, random_games, random_model, smollm2
from prompt_r1.model import attention
from prompt_r1.model.policy import Policy
from prompt_r1.settings.agent import SMOLLM2
from prompt_r1.types import ScoredGame

RIVALS = ("trl", "naive")
GAMES = 5  # games of each question


@dataclass
class MeasuredUpdate(Cost):
    """The cost of one update, and what it computed."""

    loss: float = 0.0
    gradient: list[float] = field(default_factory=list)  # some entries of the clipped gradient


class Variant:
    """A model, its optimiser and the games, in this process."""

    def __init__(self, name: str, games: list[ScoredGame], model: str, vocabulary: int) -> None:
        attention.register()
        self.name = name
        self.games = games
        kind = attention.NAME if name == "ours" else "sdpa"
        is_real = model == SMOLLM2
        self.model = (
            smollm2(attention=kind) if is_real else random_model(attention=kind, vocabulary=vocabulary)
        )
        self.policy = Policy(self.model, compute_dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.policy.trained_parameters(), lr=1e-6, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.optimizer.step()  # This allocates the moments.
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.param_groups[0]["lr"] = 1e-6
        if name == "trl":
            batches = len(games) // GAMES
            self.trainer = trl_trainer(self.model, rows=GAMES, batches=batches, loss_type="grpo")

    def update(self) -> float:
        """Do one update. Returns its loss."""
        if self.name == "ours":
            size = most_tokens(self.games)
            return learn_from(self.games, self.policy, self.optimizer, tokens_per_batch=size)["loss"]
        micro_batches = []
        for start in range(0, len(self.games), GAMES):
            rows = padded(self.games[start : start + GAMES])
            # The weights have not changed since sampling, so all ratios are 1.
            del rows["old_per_token_logps"]
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


def most_tokens(games: list[ScoredGame]) -> int:
    """The most tokens that the games of a question have together. Their opening counts once."""
    played = [game.trajectory for game in games]
    own = [len(game.tokens) - game.opening_length for game in played]
    openings = [game.opening_length for game in played]
    return max(openings[start] + sum(own[start : start + GAMES]) for start in range(0, len(games), GAMES))


def some_entries(model: torch.nn.Module) -> list[float]:
    """A few hundred entries of the gradient of each parameter."""
    flat = [parameter.grad.flatten() for parameter in model.parameters()]
    return torch.cat([gradient[:: max(1, len(gradient) // 500)] for gradient in flat]).tolist()


def games_of(questions: int, lengths: str, vocabulary: int) -> list[ScoredGame]:
    """The games of the update. They have the lengths of the rollout benchmark."""
    planned = plan(questions, GAMES, seed=1, lengths=LENGTHS[lengths], vocabulary=vocabulary)
    return random_games(planned, vocabulary)


@cache
def variant_of_this_process(name: str, model: str, vocabulary: int, questions: int, lengths: str) -> Variant:
    """The variant of this process. The first call makes it."""
    return Variant(name, games_of(questions, lengths, vocabulary), model, vocabulary)


def measure(*variant: str | int) -> MeasuredUpdate:
    """Let the variant of this process do an update."""
    return variant_of_this_process(*variant).measure()


def difference(ours: MeasuredUpdate, theirs: MeasuredUpdate) -> float:
    """The difference of the losses or the relative difference of the gradients, whichever is larger."""
    gradient = torch.tensor(ours.gradient, dtype=torch.float64)
    expected = torch.tensor(theirs.gradient, dtype=torch.float64)
    gradient_difference = (gradient - expected).norm() / expected.norm()
    return max(abs(ours.loss - theirs.loss), gradient_difference.item())


def main() -> None:
    """Measure the variants in alternating rounds, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=("small", SMOLLM2), default="small")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--questions", type=int, default=4, help="questions, each played 5 times")
    parser.add_argument("--lengths", choices=LENGTHS, default="short", help="lengths of the games")
    parser.add_argument("--rounds", type=int, default=2, help="alternating rounds")
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=RIVALS, help="to compare with")
    given = parser.parse_args()
    rivals = [name for name in given.rivals if name != "trl" or find_spec("trl")]
    games = games_of(given.questions, given.lengths, given.vocabulary)
    tokens = sum(len(game.trajectory.tokens) for game in games)
    scored = sum(sum(game.trajectory.sampled) for game in games)
    print(f"{len(games)} games, {tokens:,} tokens, {scored:,} the agent's", flush=True)
    with ExitStack() as stack:
        variants = {}
        for name in ("ours", *rivals):
            process = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            arguments = name, given.model, given.vocabulary, given.questions, given.lengths
            variants[name] = lambda run=process.submit, arguments=arguments: run(measure, *arguments).result()
        runs = compare(variants, given.rounds)
    print(table(runs), flush=True)
    for name in rivals:
        print(f"{name}: loss and gradient differ by {difference(runs['ours'][0], runs[name][0]):.1g}")


if __name__ == "__main__":
    main()
