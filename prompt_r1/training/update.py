"""The update of a training step: its games in mini-batches, each one optimiser step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from prompt_r1.agent.policy import Policy
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.errors import Resumable
from prompt_r1.grpo import Loss, grpo_loss
from prompt_r1.training.batch import Batch, Sample, collate, nothing, sequence_mean_weight, token_mean_weight
from prompt_r1.types import Trajectory

# Weighted sums: added up over batches and ranks they are means over the agent's tokens.
SUMMED = ("loss", "kl", "clip_frac", "entropy")
# One poisoned game can spoil an optimiser step; five in a row say that weights or settings are broken.
MAX_SKIPPED = 5


@dataclass
class Updater:
    """What an update needs; its fields are the knobs of eq. 17."""

    policy: Policy
    reference: Policy | None  # the frozen start; None: the KL is to the policy that sampled
    optimizer: Optimizer
    ranks: Ranks
    clip: float
    kl_coef: float
    grad_clip: float
    token_mean: bool
    tokens_per_batch: int
    skipped: int = 0  # optimiser steps in a row that were not taken

    def update(self, mini_batches: Sequence[Sequence[Sample]]) -> dict[str, float]:
        """One optimiser step for each mini-batch (this rank's share of it). Called by every rank or by none.

        Old and reference log-probabilities are fixed before the first step. Returns the means over the steps
        that were taken; one whose loss or gradient is not finite on any rank is taken by none.
        """
        weighted = [self._micro_batches(samples) for samples in mini_batches]
        steps = [
            [self._with_logprobs(batch, on_policy=number == 0) for batch in batches]
            for number, batches in enumerate(batches for batches in weighted if batches is not None)
        ]
        watched: list[_Watched] = []
        gap = 0.0
        for number, batches in enumerate(steps):
            watch = _Watched()
            for batch in batches:
                scores = self.policy(batch.packed)
                if number == 0:  # the weights are still those that sampled
                    gap = max(gap, _gap(scores.logprobs.detach(), batch))
                    batch = self._on_policy(batch, scores.logprobs.detach())
                loss = grpo_loss(scores.logprobs, batch, clip=self.clip, kl_coef=self.kl_coef)
                loss.total.backward()
                watch.add(loss, entropy=(batch.weights * scores.entropy).sum())
            if self._take_step(watch):
                watched.append(watch)
        return self._metrics(watched, gap=gap, skipped=len(steps) - len(watched))

    def _micro_batches(self, samples: Sequence[Sample]) -> list[Batch] | None:
        """This rank's micro-batches of a step, weighted over all ranks; None when no rank has a game."""
        tokens = sum(sum(sample.trajectory.sampled) for sample in samples)
        all_games, all_tokens = self.ranks.sum([len(samples), tokens])
        if not all_games:
            return None
        weight: Callable[[Trajectory], float] = (
            partial(token_mean_weight, tokens=int(all_tokens)) if self.token_mean
            else partial(sequence_mean_weight, games=int(all_games))
        )  # fmt: skip
        batches = collate(samples, weight, tokens_per_batch=self.tokens_per_batch, device=self.policy.device)
        return self._as_many(batches)

    def _as_many(self, batches: list[Batch]) -> list[Batch]:
        """Sharded weights are gathered by all ranks for each batch: who has fewer fills up with nothing."""
        if self.ranks.mesh is None:
            return batches
        most = int(self.ranks.max([len(batches)])[0])
        return batches + [nothing(self.policy.device)] * (most - len(batches))

    @torch.no_grad()
    def _with_logprobs(self, batch: Batch, *, on_policy: bool) -> Batch:
        """Old and reference log-probabilities of the weights before the first step.

        Only in float32 are the engine's log-probabilities the old ones: bfloat16's stray too far. The first
        mini-batch needs neither: its old log-probabilities are those of its own forward (`_on_policy`).
        """
        if not on_policy and self.policy.compute != torch.float32:
            batch = self._on_policy(batch, self.policy(batch.packed).logprobs)
        return (
            batch
            if self.reference is None
            else replace(batch, ref_logprobs=self.reference(batch.packed).logprobs)
        )

    def _on_policy(self, batch: Batch, logprobs: Tensor) -> Batch:
        """The batch with the log-probabilities of the weights that sampled it."""
        batch = replace(batch, old_logprobs=logprobs)
        return batch if self.reference else replace(batch, ref_logprobs=logprobs)

    def _take_step(self, watch: "_Watched") -> bool:
        """Sum the gradients over ranks, clip, step; all ranks or none. False: not finite, dropped."""
        self.ranks.sum_gradients(self.policy)
        norm = self.ranks.clip_gradients(self.policy, self.grad_clip)
        broken = self.ranks.max([not (math.isfinite(norm) and math.isfinite(watch.sums["loss"]))])[0]
        if not broken:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        watch.grad_norm = norm
        self.skipped = self.skipped + 1 if broken else 0
        return not broken

    def stop_if_broken(self) -> None:
        """Raise Resumable when too many optimiser steps in a row were skipped; the same on every rank."""
        if self.skipped >= MAX_SKIPPED:
            raise Resumable(
                f"the loss or its gradient was not finite in {self.skipped} optimiser steps in a row: try a "
                "smaller --lr, or go back to an earlier checkpoint"
            )

    def _metrics(self, watched: "list[_Watched]", *, gap: float, skipped: int) -> dict[str, float]:
        """Means over the steps that were taken and over all ranks."""
        steps = max(1, len(watched))
        sums = [sum(float(watch.sums[name]) for watch in watched) / steps for name in SUMMED]
        metrics = dict(zip(SUMMED, self.ranks.sum(sums), strict=True))
        metrics["grad_norm"] = sum(watch.grad_norm for watch in watched) / steps
        metrics["update/skipped"] = float(skipped)
        metrics["engine/logprob_gap"] = self.ranks.max([gap])[0]
        mine = [tokens.cpu() for watch in watched for tokens in watch.kl]
        kl = torch.cat([tokens for share in self.ranks.gather(mine) for tokens in share] or [torch.zeros(1)])
        metrics["kl_median"] = kl.median().item()
        return metrics


@dataclass
class _Watched:
    """What to tell of an optimiser step, added up over its micro-batches."""

    sums: dict[str, Tensor] = field(default_factory=lambda: dict.fromkeys(SUMMED, torch.zeros(())))
    kl: list[Tensor] = field(default_factory=list)  # k3 of each agent token
    grad_norm: float = 0.0

    def add(self, loss: Loss, *, entropy: Tensor) -> None:
        for name, value in {**loss.metrics, "entropy": entropy}.items():
            self.sums[name] = self.sums[name] + value.double().cpu()
        self.kl += [loss.kl] * (len(loss.kl) > 0)


def _gap(logprobs: Tensor, batch: Batch) -> float:
    """Largest difference between what the engine recorded and what the policy computes, in nats."""
    return (logprobs - batch.engine_logprobs).abs().max().item() if len(logprobs) else 0.0


def split(
    samples_PG: list[list[Sample]], *, games: int, group_size: int, mini_batch: int, numbers: Sequence[int]
) -> list[list[Sample]]:
    """This rank's games by optimiser step of `mini_batch` games, of a training step of `games` games.

    A game's place follows from the number of its question in the whole step, so it does not depend on how
    many ranks there are. Groups stay whole where `mini_batch` is a multiple of `group_size`.
    """
    mini_batches: list[list[Sample]] = [[] for _ in range(math.ceil(games / mini_batch))]
    for number, group in zip(numbers, samples_PG, strict=True):
        for position, sample in enumerate(group):
            mini_batches[(number * group_size + position) // mini_batch].append(sample)
    return mini_batches
