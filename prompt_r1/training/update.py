"""What surrounds forward, loss and backward in a training step: micro-batches, optimiser step, metrics.

The loop over them stands in train.py. Every method is called by every rank or by none.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from prompt_r1.agent.policy import Policy, Scorer, TokenScores
from prompt_r1.distributed.fsdp import sum_over_nodes
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.grpo import Loss
from prompt_r1.options.advantages import has_spread
from prompt_r1.options.objectives import RATIOS
from prompt_r1.training.balance import share_games
from prompt_r1.training.batch import (
    Batch,
    empty_batch,
    make_batch,
    sequence_mean_weight,
    token_mean_weight,
)
from prompt_r1.training.gap import MEAN, STALENESS, Limit, check_gap, gap_metrics, limit_of
from prompt_r1.types import ScoredGame, Trajectory

# Weighted sums over tokens: added up over micro-batches and ranks they are means over the agent's tokens.
SUMMED = ("loss", "kl", "clip_frac", "entropy")
# One broken game can spoil one optimiser step; five in a row mean that weights or settings are broken.
MAX_SKIPPED = 5


def split(
    groups_PG: Sequence[Sequence[ScoredGame]],
    *,
    games: int,
    group_size: int,
    mini_batch: int,
    numbers: Sequence[int],
    drop_even: bool = False,
) -> list[list[ScoredGame]]:
    """This rank's games to train on, by optimiser step of `mini_batch` games out of `games` in all.

    `numbers` are the numbers of this rank's questions in the whole step. A game's place follows from the
    number of its question, so it does not depend on how many ranks there are. Groups stay whole where
    `mini_batch` is a multiple of `group_size`. `drop_even` leaves groups without spread out.
    """
    mini_batches: list[list[ScoredGame]] = [[] for _ in range(math.ceil(games / mini_batch))]
    for number, group in zip(numbers, groups_PG, strict=True):
        if drop_even and not has_spread(group):
            continue
        trained_on = [game for game in group if game.advantage is not None]
        for position, game in enumerate(trained_on):
            mini_batches[(number * group_size + position) // mini_batch].append(game)
    return mini_batches


@dataclass
class StepMetrics:
    """The metrics of one optimiser step, added up over its micro-batches."""

    sums: dict[str, Tensor] = field(default_factory=lambda: dict.fromkeys(SUMMED, torch.zeros(())))
    kl: list[Tensor] = field(default_factory=list)  # k3 of each agent token
    grad_norm: float = 0.0
    moved: float = 0.0  # sum over its tokens of the engine's minus the policy's log-probability, in nats
    moved_tokens: int = 0  # 0 in the first step: the weights are still those that sampled


class Update:
    """Prepares the micro-batches of a training step, and takes its optimiser steps."""

    def __init__(
        self,
        policy: Policy,
        reference: Scorer | None,
        optimizer: Optimizer,
        ranks: Ranks,
        *,
        grad_clip: float,
        token_mean: bool,
        tokens_per_batch: int,
        importance_cap: float = 0.0,
        ratio: str = "token",
        gap_limit: Limit | None = None,
    ) -> None:
        """`reference` is the frozen start; None: the KL is to the policy that sampled.

        `token_mean` averages the loss over tokens, not over games (eq. 17). `importance_cap` is that of the
        importance weights, in 16 bits or of stale games (0: none). `ratio` is a key of RATIOS. `gap_limit`
        None: that of the compute dtype.
        """
        self.policy = policy
        self.ratio = RATIOS[ratio]
        self.between: Callable[[], None] = lambda: None  # called between two micro-batches
        # Of games that older weights have sampled, as with --ahead 1: the engine's gap to those weights.
        self.stale_gap: Mapping[str, float] | None = None
        self._importance_cap = importance_cap
        self.optimizer = optimizer
        self.skipped_in_a_row = 0  # optimiser steps that were not taken
        self._reference = reference
        self._ranks = ranks
        self._grad_clip = grad_clip
        self._token_mean = token_mean
        self._tokens_per_batch = tokens_per_batch
        self._gap_limit = gap_limit or limit_of(policy.compute)
        self._start()

    @property
    def importance_cap(self) -> float:
        """The cap of the importance weights; 0: none. In float32, those of fresh games would be 1."""
        weighted = self.stale_gap is not None or self.policy.compute.itemsize < 4
        return self._importance_cap if weighted else 0.0

    def _start(self) -> None:
        """Forget the metrics of the training step before."""
        self._taken: list[StepMetrics] = []
        self._current = StepMetrics()
        self._skipped = 0
        # Policy's minus engine's log-probabilities of the first optimiser step's tokens, in nats.
        self._differences: list[Tensor] = []
        self._gap_metrics: dict[str, float] | None = None
        self._moved = [
            0.0,
            0.0,
        ]  # sum over the tokens of later steps of engine's minus policy's; their number

    def prepare(self, mini_batches: Sequence[Sequence[ScoredGame]]) -> list[Iterator[Batch]]:
        """The micro-batches of each optimiser step, with old and reference log-probabilities.

        `mini_batches` are the games that this rank played; the ranks exchange them, so that all train equally
        long. Both log-probabilities are those of the weights before the first optimiser step. A step without
        a game on any rank is left out.
        """
        self._start()
        shares = share_games(mini_batches, self._ranks, tokens_per_batch=self._tokens_per_batch)
        steps = [self._micro_batches(share) for share in shares if share]
        prepared = [
            [self._add_logprobs(batch, first=number == 0) for batch in batches]
            for number, batches in enumerate(steps)
        ]
        return [self._in_turn(batches) for batches in prepared]

    def _in_turn(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """The micro-batches of an optimiser step, each prepared when it is taken: nodes exchange gradients in
        the backward of the last one only.
        """
        for number, batch in enumerate(batches, start=1):
            sum_over_nodes(self.policy, wanted=number == len(batches))
            yield batch

    def _micro_batches(self, share: Sequence[Sequence[ScoredGame]]) -> list[Batch]:
        """This rank's micro-batches of an optimiser step, with the weights of their tokens.

        A rank without a game for one runs an empty one: sharded weights are gathered by all ranks for each
        forward.
        """
        games = [game for batch in share for game in batch]
        tokens = sum(sum(game.trajectory.sampled) for game in games)
        all_games, all_tokens = self._ranks.sum([len(games), tokens])
        weight: Callable[[Trajectory], float]
        if self._token_mean:
            weight = partial(token_mean_weight, tokens=int(all_tokens))
        else:
            weight = partial(sequence_mean_weight, games=int(all_games))
        device = self.policy.device
        return [make_batch(batch, weight, device) if batch else empty_batch(device) for batch in share]

    @torch.no_grad()
    def _add_logprobs(self, batch: Batch, *, first: bool) -> Batch:
        """Old and reference log-probabilities, of the weights before the first optimiser step.

        In the first optimiser step the old ones are those of its own forward: `old` stays None. In later ones
        they are computed anew. The engine's would do in float32, but their last bits depend on which games
        decoded together, so a run over a network would never be the same twice.
        """
        self.between()
        if not first:
            batch = replace(batch, old=self.policy(batch.packed).logprobs)
        if self._reference is not None:
            batch = replace(batch, ref=self._reference(batch.packed).logprobs)
        return batch

    def record(self, batch: Batch, scores: TokenScores, loss: Loss) -> None:
        """Add a micro-batch to the metrics of its optimiser step."""
        values = {**loss.metrics, "entropy": (batch.weights * scores.entropy).sum()}
        for name, value in values.items():
            self._current.sums[name] = self._current.sums[name] + value.double().cpu()
        if len(loss.kl):
            self._current.kl.append(loss.kl)
        if batch.old is None and len(batch.engine):  # the weights have not moved in this training step
            self._differences.append((scores.logprobs.detach() - batch.engine).cpu())
        if self._taken:  # the weights have moved since the games were sampled
            self._current.moved += (batch.engine - scores.logprobs.detach()).double().sum().item()
            self._current.moved_tokens += len(batch.engine)
        self.between()

    def take_step(self) -> None:
        """Sum the gradients over the ranks, clip them, and step.

        When loss or gradient is not finite on any rank, no rank takes the step. Raises UsageError, the same
        on every rank, before a step on games of another model than the policy, and when the weights are not
        finite afterwards: they must not be saved.
        """
        if self._gap_metrics is None:  # the first step: the weights have not moved yet
            self._gap_metrics = self._measure_gap()
            check_gap(self._gap_metrics, self._gap_limit)
        step, self._current = self._current, StepMetrics()
        self._ranks.sum_gradients(self.policy)
        step.grad_norm = self._ranks.clip_gradients(self.policy, self._grad_clip)
        finite = math.isfinite(step.grad_norm) and math.isfinite(step.sums["loss"])
        finite_everywhere = not self._ranks.max([not finite])[0]
        if finite_everywhere:
            self.optimizer.step()
            self._taken.append(step)
            self.skipped_in_a_row = 0
        else:
            self._skipped += 1
            self.skipped_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(self._ranks.weight_norm(self.policy)):  # the same number on every rank
            raise UsageError(
                "the weights are not finite after an optimiser step: they are not saved, and the last "
                "checkpoint is kept; start a new run with a smaller --lr"
            )

    def _measure_gap(self) -> dict[str, float]:
        shares = self._ranks.gather(self._differences)
        differences = [tokens for share in shares for tokens in share]
        metrics = gap_metrics(differences, cap=self.importance_cap)
        if self.stale_gap is None:
            return metrics
        return {**metrics, STALENESS: metrics[MEAN], **self.stale_gap}

    def check_finite(self) -> None:
        """Raise Resumable when too many optimiser steps in a row were skipped; the same on every rank."""
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise Resumable(
                f"the loss or its gradient was not finite in {self.skipped_in_a_row} optimiser steps in a "
                "row: try a smaller --lr, or go back to an earlier checkpoint"
            )

    def metrics(self) -> dict[str, float]:
        """Means over the optimiser steps that were taken and over all ranks."""
        count = max(1, len(self._taken))
        sums = [sum(float(step.sums[name]) for step in self._taken) / count for name in SUMMED]
        metrics = dict(zip(SUMMED, self._ranks.sum(sums), strict=True))
        metrics["grad_norm"] = sum(step.grad_norm for step in self._taken) / count
        metrics["update/skipped"] = float(self._skipped)
        moved, tokens = self._ranks.sum(
            [sum(step.moved for step in self._taken), sum(step.moved_tokens for step in self._taken)]
        )
        metrics["update/kl"] = moved / max(tokens, 1)
        metrics |= self._gap_metrics or self._measure_gap()
        mine = [tokens.cpu() for step in self._taken for tokens in step.kl]
        kl = [share for shares in self._ranks.gather(mine) for share in shares]
        metrics["kl_median"] = torch.cat(kl).median().item() if kl else 0.0
        return metrics
