"""The update: one optimiser step a mini-batch, the same on one rank and on two."""

import math

import pytest
import torch

from prompt_r1.distributed import Ranks
from prompt_r1.grpo import Sample
from prompt_r1.update import Updater
from tests import tiny
from tests.test_grpo import some_samples

ONE = Ranks(rank=0, count=1, device=torch.device("cpu"))


def on_policy(samples: list[Sample], policy) -> list[Sample]:
    """Give the games the policy's own log-probabilities, as the engine would have recorded them."""
    for sample in samples:
        tokens = torch.tensor([sample.trajectory.tokens])
        scored = torch.tensor([sample.trajectory.sampled])[:, 1:]
        with torch.no_grad():
            sample.trajectory.logprobs[1:] = policy(tokens, scored).logprobs[0].tolist()
    return samples


def updater(policy, *, reference=None, lr: float = 1e-3, **options) -> Updater:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    knobs = {
        "clip": 0.2,
        "kl_coef": 0.01,
        "grad_clip": 1.0,
        "token_mean": False,
        "tokens_per_batch": 64,
    } | options
    return Updater(policy, reference, optimizer, ONE, **knobs)


def test_better_games_become_likelier_and_worse_ones_less_likely():
    policy = tiny.policy()
    better, worse = on_policy(some_samples(2), policy)
    better, worse = (
        Sample(better.trajectory, better.reward, 1.0),
        Sample(worse.trajectory, worse.reward, -1.0),
    )
    before = [_likelihood(policy, sample) for sample in (better, worse)]
    updater(policy).update([[better, worse]])
    after = [_likelihood(policy, sample) for sample in (better, worse)]
    assert after[0] > before[0] and after[1] < before[1]


def _likelihood(policy, sample: Sample) -> float:
    tokens, scored = (
        torch.tensor([sample.trajectory.tokens]),
        torch.tensor([sample.trajectory.sampled])[:, 1:],
    )
    with torch.no_grad():
        return policy(tokens, scored).logprobs.sum().item()


def test_the_gap_between_engine_and_policy_is_measured_before_the_weights_move():
    policy = tiny.policy()
    samples = on_policy(some_samples(4), policy)
    assert updater(policy).update([samples[:2], samples[2:]])["engine/logprob_gap"] < 1e-5
    policy = tiny.policy()
    samples = on_policy(some_samples(4), policy)
    position = samples[0].trajectory.sampled.index(True)
    samples[0].trajectory.logprobs[position] -= 0.25
    assert updater(policy).update([samples])["engine/logprob_gap"] == pytest.approx(0.25, abs=1e-4)


def test_the_kl_to_the_frozen_reference_grows_from_zero_and_pulls_back():
    reference = tiny.policy().requires_grad_(False)
    policy = tiny.policy()
    samples = on_policy(some_samples(4), policy)
    first = updater(policy, reference=reference).update([samples])
    second = updater(policy, reference=reference).update([samples])
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 1e-6
    assert not any(parameter.grad is not None for parameter in reference.parameters())


def test_a_mini_batch_without_games_is_no_step():
    policy = tiny.policy()
    before = [parameter.clone() for parameter in policy.parameters()]
    metrics = updater(policy).update([[], []])
    assert metrics["loss"] == 0 and math.isfinite(metrics["grad_norm"])
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    policy = tiny.policy()
    samples = on_policy(some_samples(2), policy)
    poisoned = [Sample(samples[0].trajectory, samples[0].reward, float("inf")), samples[1]]
    before = [parameter.clone() for parameter in policy.parameters()]
    assert updater(policy).update([poisoned])["update/skipped"] == 1
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


def test_mini_batches_after_the_first_have_ratios():
    policy = tiny.policy()
    samples = on_policy(some_samples(6), policy)
    metrics = updater(policy, lr=0.05).update([samples, samples])
    assert metrics["clip_frac"] > 0
