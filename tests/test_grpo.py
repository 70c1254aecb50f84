"""The loss against a loop over tokens in float64; advantages against the formula."""

import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_r1.agent.packing import fill
from prompt_r1.grpo import Loss, group_advantages, grpo_loss
from prompt_r1.training.batch import Batch, collate, sequence_mean_weight, token_mean_weight
from tests import tiny
from tests.games import CPU, random_scored_games


def batches_of(samples, *, token_mean=False, tokens_per_batch=10_000):
    tokens = sum(sum(sample.trajectory.sampled) for sample in samples)
    weight = partial(token_mean_weight, tokens=tokens) if token_mean else partial(
        sequence_mean_weight, games=len(samples))  # fmt: skip
    return collate(samples, weight, tokens_per_batch=tokens_per_batch, device=CPU)


def loss_by_loop(samples, logprobs, references, *, clip, kl_coef, token_mean) -> float:
    """Eq. 17 in plain Python floats: logprobs and references are keyed by (game, position)."""
    games, all_tokens = len(samples), sum(sum(s.trajectory.sampled) for s in samples)
    total = 0.0
    for number, sample in enumerate(samples):
        terms = []
        for t, sampled in enumerate(sample.trajectory.sampled):
            if not sampled:
                continue
            now, old, ref = logprobs[number, t], sample.trajectory.logprobs[t], references[number, t]
            ratio = math.exp(now - old)
            clipped = min(max(ratio, 1 - clip), 1 + clip)
            surrogate = min(ratio * sample.advantage, clipped * sample.advantage)
            terms.append(-surrogate + kl_coef * (math.exp(ref - now) - (ref - now) - 1))
        total += sum(terms) / all_tokens if token_mean else sum(terms) / len(terms) / games
    return total


@pytest.mark.parametrize("token_mean", [False, True])
@pytest.mark.parametrize("tokens_per_batch", [1, 60, 10_000])
def test_the_loss_equals_a_loop_over_tokens_in_float64(token_mean, tokens_per_batch):
    samples = random_scored_games()
    rng = random.Random(5)
    now = {
        (n, t): s.trajectory.logprobs[t] + rng.uniform(-0.5, 0.5)
        for n, s in enumerate(samples)
        for t in range(len(s.trajectory.tokens))
    }
    ref = {key: value + rng.uniform(-0.5, 0.5) for key, value in now.items()}
    games = [sample.trajectory for sample in samples]

    total = 0.0
    batches = batches_of(samples, token_mean=token_mean, tokens_per_batch=tokens_per_batch)
    for groups, batch in zip(fill(games, tokens_per_batch), batches, strict=True):
        scored = [(n, t) for group in groups for n in group for t, own in enumerate(games[n].sampled) if own]
        logprobs, references = (torch.tensor([table[key] for key in scored]) for table in (now, ref))
        total += loss_of(batch, logprobs, ref=references, kl_coef=0.1).total.item()
    expected = loss_by_loop(samples, now, ref, clip=0.2, kl_coef=0.1, token_mean=token_mean)
    assert total == pytest.approx(expected, rel=1e-5)


def loss_of(batch: Batch, logprobs: torch.Tensor, *, ref: torch.Tensor, kl_coef: float) -> Loss:
    """The loss of a batch whose old log-probabilities are the engine's."""
    return grpo_loss(logprobs, batch.engine, ref, batch.advantages, batch.weights, clip=0.2, kl_coef=kl_coef)


def gradient_of(batches, *, kl_coef=0.01) -> torch.Tensor:
    policy = tiny.policy()
    for batch in batches:
        logprobs = policy(batch.packed).logprobs
        loss_of(batch, logprobs, ref=batch.engine, kl_coef=kl_coef).total.backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


@settings(max_examples=10)
@given(st.booleans(), st.integers(1, 12), st.integers(1, 300), st.randoms(use_true_random=False))
def test_no_split_into_micro_batches_changes_the_gradient(token_mean, count, tokens_per_batch, rng):
    """Whatever the token budget, the order of the games and how often an opening is computed."""
    samples = random_scored_games(count)
    alone = gradient_of(batches_of(samples, token_mean=token_mean, tokens_per_batch=1))
    rng.shuffle(samples)
    packed = gradient_of(batches_of(samples, token_mean=token_mean, tokens_per_batch=tokens_per_batch))
    assert (packed - alone).norm() < 1e-5 * alone.norm()


def test_weights_sum_to_one_over_a_step():
    for token_mean in (False, True):
        weights = [
            batch.weights.sum()
            for batch in batches_of(random_scored_games(), token_mean=token_mean, tokens_per_batch=70)
        ]
        assert sum(weights).item() == pytest.approx(1, abs=1e-5)


def test_environment_text_gets_no_gradient():
    """Only the agent's tokens are targets: a reply is a condition of what follows, but its own
    log-probabilities are in no loss.
    """
    samples = random_scored_games(3)
    (batch,) = batches_of(samples)
    own = [
        token
        for sample in sorted(samples, key=lambda sample: len(sample.trajectory.tokens), reverse=True)
        for token, sampled in zip(sample.trajectory.tokens, sample.trajectory.sampled, strict=True)
        if sampled
    ]
    assert batch.packed.targets.tolist() == own and len(batch.weights) == len(own)


def test_kl_is_never_negative_and_zero_at_the_reference():
    (batch,) = batches_of(random_scored_games())
    at_reference = loss_of(batch, batch.engine, ref=batch.engine, kl_coef=1.0)
    assert at_reference.metrics["kl"] == 0 and at_reference.metrics["clip_frac"] == 0
    moved = batch.engine + torch.randn(batch.weights.shape)
    away = loss_of(batch, moved, ref=batch.engine, kl_coef=1.0)
    assert (away.kl >= 0).all() and away.metrics["kl"] > 0


def test_clip_frac_counts_the_tokens_whose_ratio_is_clipped_against_their_advantage():
    """Raising a good token beyond the clip range, or lowering a bad one, gains nothing: those tokens count,
    by their weight, and have no gradient. Where clipping would make the loss smaller it does not apply.
    """
    moves = torch.tensor([0.3, -0.3, -0.3, 0.3, 0.1, -0.1, 0.3, -0.3], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    clipped = [True, True, False, False, False, False, False, False]
    weights = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
    old = torch.zeros(8)
    loss = grpo_loss(moves, old, old, advantages, weights, clip=0.2, kl_coef=0.0)
    loss.total.backward()
    assert loss.metrics["clip_frac"].item() == pytest.approx(0.5)
    assert moves.grad is not None
    assert (moves.grad == 0).tolist() == [c or a == 0 for c, a in zip(clipped, advantages, strict=True)]


def test_advantages_are_standardised_within_each_group_with_bessels_correction():
    (advantages,) = group_advantages([[1, 0, 0, 0.5, 0]])
    assert advantages == pytest.approx([1.5652, -0.6708, -0.6708, 0.4472, -0.6708], abs=1e-4)


def test_a_group_without_spread_or_siblings_teaches_nothing():
    assert group_advantages([[0.3] * 5, [1.0], []]) == [[0.0] * 5, [0.0], []]


@pytest.mark.parametrize(("intact", "count"), [(4, 5), (3, 4), (6, 8), (9, 12)])
def test_a_group_with_at_least_three_quarters_of_its_games_compares_those(intact, count):
    rewards = [float(number) for number in range(intact)]
    [alone], [among_broken] = (
        group_advantages([rewards]),
        group_advantages([[*rewards, *[None] * (count - intact)]]),
    )
    assert among_broken == [*alone, *[None] * (count - intact)]


@pytest.mark.parametrize(("intact", "count"), [(3, 5), (2, 4), (5, 8), (8, 12), (0, 4)])
def test_a_group_of_which_more_than_a_quarter_broke_is_dropped(intact, count):
    rewards = [float(number) for number in range(intact)] + [None] * (count - intact)
    assert group_advantages([rewards]) == [[None] * count]
