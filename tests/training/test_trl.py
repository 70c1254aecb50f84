"""The loss, the losses of examples/losses.py and their gradients against TRL's GRPO trainer (slow: TRL takes
seconds to import).

The definitions agree in the clipped surrogate, the k3 KL (TRL with `use_bias_correction_kl=False`), and

    TRL's loss_type    ours
    grpo               the sequence mean of eq. 17; TRL needs the same number of games in all batches
    dapo               the token mean
    dr_grpo            weights of 1 / (games × max_completion_length), as in examples/losses.py

With an importance weight for each token, TRL's `token_truncate`, both weight the policy term and not the KL.

They differ: TRL's default KL is multiplied by the ratio, its advantages divide by std + 1e-4 instead of 1e-6
(here both get the same), and `bnpo` averages over the tokens of a micro-batch, as the released code does.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.update_rivals import padded, trl_backward, trl_trainer
from examples import losses
from prompt_r1.grpo import Loss, grpo_loss
from prompt_r1.model.packing import pack
from prompt_r1.model.policy import Policy
from prompt_r1.training.batches import make_batch
from prompt_r1.training.row_plans import divide
from prompt_r1.types import ScoredGame, Trajectory
from tests.support import tiny
from tests.support.games import CPU, change_logprobs, columns_of, random_scored_games, record_logprobs_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # TRL raises warnings of its own
]
MAX_TOKENS = 64  # max_completion_length


def stale_games(policy: Policy) -> list[ScoredGame]:
    """Six games of two questions, with log-probabilities that differ from the policy's."""
    games = record_logprobs_of(policy, random_scored_games(6))
    change_logprobs(games, seed=0)
    return games


def engine_of(old: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of an engine that differs from the old policy by up to 0.5 nats."""
    return old + 0.5 * torch.sin(40 * old)


@pytest.mark.parametrize(
    ("loss_type", "kl_coef", "cap"),
    [
        *itertools.product(["grpo", "dapo", "dr_grpo"], [0.0, 0.04], [0.0]),
        ("grpo", 0.04, 1.2),
        ("dapo", 0.04, 1.2),
    ],
)
def test_loss_and_gradient_equal_those_of_trl(loss_type, kl_coef, cap):
    pytest.importorskip("trl")
    policy = tiny.policy()
    games = stale_games(policy)

    def weight(game: Trajectory) -> float:
        if loss_type == "dr_grpo":
            return 1 / (6 * MAX_TOKENS)
        return weight_of(game, games, token_mean=loss_type == "dapo")

    settings = {"clip": 0.2, "clip_high": 0.0}
    ours, of_trl, error = both_losses(
        policy, games, grpo_loss, settings, weight, kl_coef=kl_coef, cap=cap, loss_type=loss_type
    )
    assert ours == pytest.approx(of_trl, rel=1e-5)
    assert error < 1e-5


@pytest.mark.parametrize("cap", [0.0, 1.2])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dr_grpo", {"loss_type": "dr_grpo"}),
        ("dual_clip", {"loss_type": "grpo", "delta": 1.3}),
        ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        ("cispo", {"loss_type": "cispo", "epsilon_high": 1.1}),
    ],
)
def test_the_losses_of_the_examples_equal_those_of_trl(name, options, cap, monkeypatch):
    """TRL's `delta` is the dual clip, and its `epsilon_high` of CISPO is 1 + ε_high."""
    pytest.importorskip("trl")
    monkeypatch.setattr(losses, "MAX_TOKENS", MAX_TOKENS)
    monkeypatch.setattr(losses, "DUAL_CLIP", 1.3)
    policy = tiny.policy()
    games = stale_games(policy)

    def weight(game: Trajectory) -> float:
        return weight_of(game, games, token_mean=name == "cispo")

    settings = {"clip": 0.2, "clip_high": 0.1 if name == "cispo" else 0.0}
    ours, of_trl, error = both_losses(
        policy, games, getattr(losses, name), settings, weight, kl_coef=0.04, cap=cap, **options
    )
    assert ours == pytest.approx(of_trl, rel=1e-5)
    assert error < 1e-5


def test_before_the_weights_move_the_first_version_has_the_gradient_of_trl():
    """Its value is another one: the advantage times the log-probability."""
    pytest.importorskip("trl")
    policy = tiny.policy()
    games = record_logprobs_of(policy, random_scored_games(6))

    def weight(game: Trajectory) -> float:
        return weight_of(game, games, token_mean=False)

    *_, error = both_losses(
        policy, games, losses.first_version, {}, weight, kl_coef=0.04, cap=0.0, loss_type="grpo"
    )
    assert error < 1e-5


def weight_of(game: Trajectory, games: list[ScoredGame], *, token_mean: bool) -> float:
    """The weight of each token of a game in the mean of eq. 17, or in the mean over all tokens."""
    if token_mean:
        return 1 / sum(sum(other.trajectory.sampled) for other in games)
    return 1 / (len(games) * sum(game.sampled))


def both_losses(
    policy: Policy,
    games: list[ScoredGame],
    loss_of: Callable[..., Loss],
    settings: dict[str, float],
    weight: Callable[[Trajectory], float],
    *,
    kl_coef: float,
    cap: float,
    **options: Any,
) -> tuple[float, float, float]:
    """Our loss of six games, TRL's with these options, and the relative distance of the two gradients."""
    reference, theirs = tiny.policy(seed=1), tiny.model()
    theirs.config._attn_implementation = "sdpa"  # TRL also pads at the left
    tokens = sum(sum(game.trajectory.sampled) for game in games)
    with torch.no_grad():
        references = [reference(pack([[game.trajectory]], CPU)).logprobs for game in games]

    trainer = trl_trainer(
        theirs, rows=3, batches=2, kl_coef=kl_coef, max_completion_length=MAX_TOKENS, **options
    )
    rows = [padded(games[start : start + 3], references[start : start + 3]) for start in (0, 3)]
    for micro_batch in rows:
        micro_batch["num_items_in_batch"] = torch.tensor(tokens)
        if cap:
            old = micro_batch["old_per_token_logps"]
            micro_batch["importance_sampling_ratio"] = (old - engine_of(old)).exp().clamp(max=cap)
            trainer.use_vllm = True  # only now: its constructor would look for vLLM
    loss_of_trl = trl_backward(trainer, rows)

    loss = 0.0
    settings = settings | {"kl_coef": kl_coef, "importance_cap": cap}
    [micro_batches] = divide([game.trajectory for game in games], ranks=1, tokens_per_batch=70)
    for numbers in micro_batches:
        batch = make_batch([games[number] for number in numbers], weight, CPU)
        with torch.no_grad():
            ref = reference(batch.packed).logprobs
        logprobs = policy(batch.packed).logprobs
        rounded = replace(batch, engine=engine_of(batch.engine))
        columns = columns_of(rounded, old=batch.engine, reference=ref)
        loss_of_batch = loss_of(logprobs, columns, **settings)
        loss_of_batch.total.backward()
        loss += loss_of_batch.total.item()

    pairs = [(a.grad, b.grad) for a, b in zip(policy.parameters(), theirs.parameters(), strict=True)]
    error = sum((ours - trl).norm() ** 2 for ours, trl in pairs) ** 0.5
    return loss, loss_of_trl, float(error / sum(trl.norm() ** 2 for _, trl in pairs) ** 0.5)
