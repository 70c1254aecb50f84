"""The update of a training step: its games in mini-batches, each one optimiser step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from prompt_r1.distributed import Ranks
from prompt_r1.grpo import (
    Batch,
    Sample,
    collate,
    grpo_loss,
    nothing,
    sequence_mean_weight,
    token_mean_weight,
    with_logprobs,
)
from prompt_r1.policy import Policy
from prompt_r1.types import Trajectory

# Weighted sums: added up over batches and ranks they are means over the agent's tokens.
SUMMED = ("loss", "kl", "clip_frac", "entropy")


@dataclass(frozen=True)
class Updater:
    """What an update needs; its fields are the knobs of eq. 17."""

    policy: Policy
    reference: Policy | None  # the frozen start; None: no KL
    optimizer: Optimizer
    ranks: Ranks
    clip: float
    kl_coef: float
    grad_clip: float
    token_mean: bool
    tokens_per_batch: int

    def update(self, mini_batches: Sequence[Sequence[Sample]]) -> dict[str, float]:
        """One optimiser step for each mini-batch (this rank's share of it). Called by every rank or by none.

        Old and reference log-probabilities are fixed before the first step. Returns the means over the steps.
        """
        prepared = [self._prepare(samples) for samples in mini_batches]
        prepared = [batches for batches in prepared if batches is not None]
        totals = dict.fromkeys(SUMMED, 0.0)
        metrics = {"grad_norm": 0.0, "update/skipped": 0.0, "engine/logprob_gap": 0.0}
        kl_tokens: list[Tensor] = []
        for number, batches in enumerate(prepared):
            for batch in batches:
                scores = self.policy(batch.tokens, batch.scored)
                loss = grpo_loss(scores.logprobs, batch, clip=self.clip, kl_coef=self.kl_coef)
                loss.total.backward()
                kl_tokens += [loss.kl] * (len(loss.kl) > 0)
                entropy = (batch.weights * scores.entropy).sum()
                for name, value in {**loss.metrics, "entropy": entropy}.items():
                    totals[name] += value.item() / len(prepared)
                if number == 0:  # the weights are still those that sampled
                    gap = max(metrics["engine/logprob_gap"], _gap(scores.logprobs.detach(), batch))
                    metrics["engine/logprob_gap"] = gap
            norm = self._step()
            metrics["grad_norm"] += norm / len(prepared)
            metrics["update/skipped"] += not norm < float("inf")
        summed = self.ranks.sum(list(totals.values()))
        metrics |= dict(zip(totals, summed, strict=True))
        metrics["engine/logprob_gap"] = self.ranks.max([metrics["engine/logprob_gap"]])[0]
        metrics["kl_median"] = torch.cat(kl_tokens).median().item() if kl_tokens else 0.0
        return metrics

    def _prepare(self, samples: Sequence[Sample]) -> list[Batch] | None:
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
        return [self._with_logprobs(batch) for batch in self._as_many(batches)]

    def _as_many(self, batches: list[Batch]) -> list[Batch]:
        """Sharded weights are gathered by all ranks for each batch: who has fewer fills up with nothing."""
        if self.ranks.mesh is None:
            return batches
        most = int(self.ranks.max([len(batches)])[0])
        return batches + [nothing(self.policy.device)] * (most - len(batches))

    @torch.no_grad()
    def _with_logprobs(self, batch: Batch) -> Batch:
        """Only in float32 are the engine's log-probabilities the old ones: bfloat16's stray too far."""
        recompute = self.policy.compute != torch.float32
        old = self.policy(batch.tokens, batch.scored).logprobs if recompute else None
        reference = self.reference(batch.tokens, batch.scored).logprobs if self.reference else None
        return with_logprobs(batch, old=old, reference=reference)

    def _step(self) -> float:
        """Sum the gradients over ranks, clip, step. One that is not finite is dropped, on every rank."""
        self.ranks.sum_gradients(self.policy)
        norm = self.ranks.clip_gradients(self.policy, self.grad_clip)
        if norm < float("inf"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def _gap(logprobs: Tensor, batch: Batch) -> float:
    """Largest difference between what the engine recorded and what the policy computes, in nats."""
    gaps = (logprobs - batch.engine_logprobs)[batch.scored].abs()
    return gaps.max().item() if len(gaps) else 0.0


def split(
    samples_PG: list[list[Sample]], *, games: int, group_size: int, mini_batch: int, numbers: Sequence[int]
) -> list[list[Sample]]:
    """This rank's games by optimiser step, of a step of `games` games. A game's place follows from the number
    of its question in the whole step, so it does not depend on how many ranks there are.
    """
    mini_batches: list[list[Sample]] = [[] for _ in range(math.ceil(games / mini_batch))]
    for number, group in zip(numbers, samples_PG, strict=True):
        for position, sample in enumerate(group):
            mini_batches[(number * group_size + position) // mini_batch].append(sample)
    return mini_batches
