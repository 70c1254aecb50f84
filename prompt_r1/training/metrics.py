"""The metrics of a training step, over all ranks: its games, its update, and what it spent.

docs/running.md explains every key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import ceil, sqrt
from statistics import mean, median, stdev
from typing import get_args

import torch
from torch import Tensor

from prompt_r1.environments.environment import Environment
from prompt_r1.f1 import exact_match, f1
from prompt_r1.grpo import Loss
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.policy import TokenScores
from prompt_r1.reward import well_formed
from prompt_r1.training.batches import Batch
from prompt_r1.types import ScoredGame, Spending, Stop

# Only games with a reward have these metrics. Games that the environment broke count in stop/*, tokens/* and
# env/* only.
SCORED = ("reward/mean", "reward/format", "reward/answer", "em", "f1", "format", "turns", "game/usd")
WITH_INTERVAL = ("reward/mean", "em", "format")
RUN_TOTALS = ("env/usd", "env/lost_usd")  # These are sums over the run so far; other counts are of one step.
GAP = "engine/logprob_gap"  # the largest difference of engine and policy, in nats
GAP_MEAN = f"{GAP}_mean"

Row = Mapping[str, float]  # the metrics of one game, by name


# The games of a training step


def is_scored(row: Row) -> bool:
    """Whether a game has a reward. The environment broke the others."""
    return "em" in row


def is_compared(row: Row) -> bool:
    """Whether a game has an advantage. If too many games of a group broke, no game of the group has one."""
    return "has_spread" in row


def metrics_of_game(game: ScoredGame) -> Row:
    """The metrics of one game. Without a reward, a game has none of the metrics in SCORED.

    EM and F1 judge the game's answer. A game without an answer has 0.
    """
    trajectory = game.trajectory
    replies = [turn.reply for turn in trajectory.turns if turn.reply is not None]
    errors = 1.0 if trajectory.stop == "env_error" else 0.0  # The game ends with its first failed call.
    row = {f"stop/{stop}": float(trajectory.stop == stop) for stop in get_args(Stop)}
    row["tokens/game"] = len(trajectory.tokens)
    row["tokens/sampled"] = sum(trajectory.sampled)
    row["env/calls"] = len(replies) + errors
    row["env/errors"] = errors
    row["usd"] = trajectory.spent.usd  # Every game has it; "game/usd" is a mean over scored games.
    if game.advantage is not None:
        row["has_spread"] = float(game.has_advantage)  # whether its advantage is not 0
    if game.reward is None:
        return row
    answer, answers = trajectory.answer or "", trajectory.question.answers
    return row | {
        "reward/mean": game.reward.total,  # The mean over games has the same name.
        "reward/format": game.reward.format,
        "reward/answer": game.reward.answer,
        "gate": 1.0 if game.reward.gate_is_open else 0.0,
        "em": exact_match(answer, answers),
        "f1": f1(answer, answers),
        "format": float(well_formed(trajectory)),
        "turns": float(len(trajectory.turns)),
        "game/usd": trajectory.spent.usd,
    }


def step_metrics(
    games_PG: list[list[ScoredGame]], ranks: Ranks, *, rollout_seconds: float
) -> dict[str, float]:
    """The metrics of a training step over all ranks: its games, its groups and its speed."""
    rows_PG = ranks.gather_lists([[metrics_of_game(game) for game in group] for group in games_PG])
    own_latencies = []
    for group in games_PG:
        for game in group:
            own_latencies += [turn.latency for turn in game.trajectory.turns if turn.reply is not None]
    metrics = game_metrics(rows_PG, ranks.gather_lists(own_latencies)) | group_metrics(rows_PG)
    metrics["tokens/s"] = metrics["tokens/sampled"] / rollout_seconds
    metrics["games/s"] = metrics["games"] / rollout_seconds
    return metrics


def game_metrics(rows_PG: Sequence[Sequence[Row]], latencies: Sequence[float]) -> dict[str, float]:
    """Means over the games of a step, and their intervals.

    An interval is the mean of the questions' means ± 1.96 standard errors, because the games of one question
    are not independent. With many questions it covers 95 %, which is enough for a curve.
    """
    rows = [row for group in rows_PG for row in group]
    scored_PG = []
    for group in rows_PG:
        scored = [row for row in group if is_scored(row)]
        if scored:
            scored_PG.append(scored)
    metrics = {name: _mean([row[name] for group in scored_PG for row in group]) for name in SCORED}
    stops = [name for name in rows[0] if name.startswith("stop/")]
    for name in [*stops, "tokens/game"]:
        metrics[name] = _mean([row[name] for row in rows])
    for name in ("tokens/sampled", "env/calls", "env/errors"):
        metrics[name] = float(sum(row[name] for row in rows))
    metrics["games"] = float(len(rows))
    metrics["env/latency"] = median(latencies) if latencies else 0.0
    metrics |= _reward_by_kind_of_group(rows_PG)
    # This is pass@k, where k is the number of a question's games; "em" is pass@1.
    metrics["em/any"] = _mean([float(any(row["em"] == 1 for row in group)) for group in scored_PG])
    if len(scored_PG) > 1:  # a single question gives no interval
        for name in WITH_INTERVAL:
            means = [mean(row[name] for row in group) for group in scored_PG]
            half_width = 1.96 * stdev(means) / sqrt(len(means))
            metrics[f"{name}_low"] = mean(means) - half_width
            metrics[f"{name}_high"] = mean(means) + half_width
    return metrics


def _reward_by_kind_of_group(rows_PG: Sequence[Sequence[Row]]) -> dict[str, float]:
    """The mean reward in groups with broken games and in whole groups; {} if no game broke.

    Games of hard questions make more calls, so they break more often, and the games that remain may be too
    easy. The two means show whether this is so.
    """
    if all(is_scored(row) for group in rows_PG for row in group):
        return {}
    rewards: dict[str, list[float]] = {"reward/broken_groups": [], "reward/whole_groups": []}
    for group in rows_PG:
        scored = [row["reward/mean"] for row in group if is_scored(row)]
        kind = "whole_groups" if len(scored) == len(group) else "broken_groups"
        rewards[f"reward/{kind}"] += scored
    return {name: float(mean(values)) for name, values in rewards.items() if values}


def group_metrics(rows_PG: Sequence[Sequence[Row]]) -> dict[str, float]:
    """The shares of dropped groups, of groups without spread and of misranked pairs.

    Also what the calls of the groups without spread have cost, because nothing is learned from them.
    """
    kept = [group for group in rows_PG if any(map(is_compared, group))]
    no_spread = [group for group in kept if not any(row.get("has_spread") for row in group)]
    pairs = [pair for group in rows_PG for pair in ranked_pairs(group)]
    return {
        "reward/misranked": pairs.count(False) / max(len(pairs), 1),
        "groups/dropped": 1 - len(kept) / len(rows_PG),
        "groups/no_spread": len(no_spread) / max(len(kept), 1),
        "groups/no_spread_calls": float(sum(row["env/calls"] for group in no_spread for row in group)),
        "groups/no_spread_usd": float(sum(row["usd"] for group in no_spread for row in group)),
    }


def ranked_pairs(group: Sequence[Row]) -> list[bool]:
    """Whether the better answer has the higher reward, for each two games of a question that differ in R_ans.

    Only games with an open gate (R_fmt = ε) are compared. Eq. 15 always ranks them by their answers; a reward
    of the user may not.
    """
    open_gate = [row for row in group if row.get("gate")]
    ranked = []
    for game, other in combinations(open_gate, 2):
        better_answer = game["reward/answer"] - other["reward/answer"]
        higher_reward = game["reward/mean"] - other["reward/mean"]
        if better_answer != 0:
            ranked.append(better_answer * higher_reward > 0)
    return ranked


# The update of a training step


@dataclass(frozen=True)
class BatchStats:
    """The measurements of a micro-batch."""

    # Loss, kl, clip_frac and entropy. The sums over the micro-batches and ranks of an optimiser step are the
    # values of the step.
    summands: dict[str, float]
    difference: Tensor  # (N,) log π_θ - log π_engine
    token_kl: Tensor  # (N,) k3 of each agent token
    weights_moved: bool  # whether an optimiser step of this training step was taken before


@dataclass
class StepStats:
    """Collects the measurements of the micro-batches and optimiser steps of one training step."""

    taken: int = 0  # optimiser steps
    skipped: int = 0  # optimiser steps whose loss or gradient was not finite
    grad_norms: float = 0.0  # summed over the steps that were taken
    # The gap is measured before the first optimiser step.
    gap: dict[str, float] = field(default_factory=lambda: gap_metrics([], cap=0.0))
    pending: list[BatchStats] = field(default_factory=list)  # micro-batches of the next optimiser step
    used: list[BatchStats] = field(default_factory=list)  # micro-batches of the steps that were taken

    @property
    def is_first(self) -> bool:
        """Whether the next optimiser step is the first of the training step."""
        return self.taken + self.skipped == 0

    def add(self, batch: Batch, scores: TokenScores, loss: Loss) -> None:
        """Add a micro-batch, after its backward."""
        difference = scores.logprobs.detach() - batch.sampled_logprobs
        summands = {
            "loss": loss.total.item(),
            "kl": loss.kl.item(),
            "clip_frac": loss.clip_frac.item(),
            "entropy": (batch.weights * scores.entropy).sum().item(),
        }
        self.pending.append(
            BatchStats(summands, difference.cpu(), loss.token_kl.cpu(), weights_moved=self.taken > 0)
        )

    def end_step(self, *, taken: bool, grad_norm: float) -> None:
        """End an optimiser step. Only the micro-batches of the steps that were taken count."""
        if taken:
            self.taken += 1
            self.grad_norms += grad_norm
            self.used += self.pending
        else:
            self.skipped += 1
        self.pending = []

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Means over the optimiser steps that were taken and over all ranks. Called by every rank."""
        used = ranks.gather_lists(self.used)
        steps = max(1, self.taken)
        means = {}
        for name in ("loss", "kl", "clip_frac", "entropy"):
            means[name] = sum(batch.summands[name] for batch in used) / steps
        moved = [batch.difference.double() for batch in used if batch.weights_moved]
        tokens = sum(map(len, moved))
        token_kl = torch.cat([torch.zeros(0), *(batch.token_kl for batch in used)])
        return {
            **means,
            "grad_norm": self.grad_norms / steps,
            "update/skipped": float(self.skipped),
            # Estimates KL(policy that sampled || policy now) from the sampled tokens.
            "update/kl": -sum(difference.sum().item() for difference in moved) / max(tokens, 1),
            **self.gap,
            "kl_median": token_kl.median().item() if len(token_kl) else 0.0,
        }


def gap_metrics(differences: Sequence[Tensor], *, cap: float) -> dict[str, float]:
    """The metrics of the gap and of the importance weights, over all tokens.

    `differences` are the policy's log-probabilities minus the engine's, in nats. The gap of a token is the
    absolute difference. Returns the maximum, the mean and the 99th percentile of the gap, the mean of the
    weights, and the share of weights that `cap` truncates.
    """
    difference = torch.cat(list(differences)) if differences else torch.zeros(1)
    gap = difference.abs()
    high = gap.kthvalue(ceil(0.99 * len(gap))).values
    ratio = difference.exp()
    weights = ratio.clamp(max=cap) if cap else torch.ones(1)
    truncated = ratio > cap if cap else torch.zeros(1)
    return {
        GAP: gap.max().item(),
        GAP_MEAN: gap.mean().item(),
        f"{GAP}_p99": high.item(),
        "engine/importance_mean": weights.mean().item(),
        "engine/importance_truncated": truncated.float().mean().item(),
    }


# Calls and dollars


def spending(environment: Environment, ranks: Ranks) -> dict[str, float]:
    """Calls and tokens since the last metrics, over all ranks, and the dollars of the whole run.

    env/lost_usd is the part of env/usd that is charged for attempts without a reply. Called by every rank.
    """
    shares = ranks.gather(environment.take_metrics())
    spent = total_spent(environment, ranks)
    metrics = {"env/usd": spent.usd, "env/lost_usd": spent.lost_usd}
    for name in sorted({name for share in shares for name in share}):
        metrics[name] = sum(share.get(name, 0.0) for share in shares)
    return metrics


def total_spent(environment: Environment, ranks: Ranks) -> Spending:
    """What the whole run has spent so far, over all ranks. Called by every rank."""
    budget = environment.budget
    # Every rank knows what the run had spent before it was resumed, so this is added only once.
    spent_since = ranks.gather(budget.spent - budget.before)
    return sum(spent_since, budget.before)


def add_spending(metrics: dict[str, float], spent: Mapping[str, float]) -> None:
    """Add what was spent since `metrics` were measured. RUN_TOTALS are replaced, the others are summed."""
    for name, value in spent.items():
        metrics[name] = value if name in RUN_TOTALS else metrics.get(name, 0.0) + value


def _mean(values: Sequence[float]) -> float:
    return float(mean(values)) if values else 0.0
