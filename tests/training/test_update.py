"""The update: one optimiser step a mini-batch, the same on one rank and on two."""

import math
import random
from functools import partial

import pytest
import torch

from prompt_r1.agent.packing import Packed, pack
from prompt_r1.agent.policy import Policy, TokenScores
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.errors import Resumable
from prompt_r1.training.update import MAX_SKIPPED, Update, split
from prompt_r1.types import ScoredGame
from tests import tiny
from tests.games import CPU, ONE_RANK, naive_logprobs, random_scored_games, record_logprobs_of
from train import learn


class Learner:
    """An update with the settings of these tests, and the loop of train.py over it."""

    def __init__(
        self, policy: Policy, *, reference: Policy | None = None, ranks: Ranks = ONE_RANK, **settings
    ) -> None:
        config = TrainConfig(**{"lr": 1e-3, "kl_coef": 0.01, "tokens_per_batch": 64, **settings})
        self.update = Update(config, policy, reference, ranks)
        self._learn = partial(learn, self.update, clip=config.clip, kl_coef=config.kl_coef)

    def learn(self, mini_batches: list[list[ScoredGame]]) -> dict[str, float]:
        return self._learn(mini_batches)


def test_better_games_become_likelier_and_worse_ones_less_likely():
    policy = tiny.policy()
    better, worse = record_logprobs_of(policy, random_scored_games(2))
    better, worse = (
        ScoredGame(better.trajectory, better.reward, 1.0),
        ScoredGame(worse.trajectory, worse.reward, -1.0),
    )
    before = [_likelihood(policy, sample) for sample in (better, worse)]
    Learner(policy).learn([[better, worse]])
    after = [_likelihood(policy, sample) for sample in (better, worse)]
    assert after[0] > before[0] and after[1] < before[1]


def _likelihood(policy, sample: ScoredGame) -> float:
    with torch.no_grad():
        return policy(pack([[sample.trajectory]], CPU)).logprobs.sum().item()


def test_the_gap_between_engine_and_policy_is_measured_before_the_weights_move():
    policy = tiny.policy()
    samples = record_logprobs_of(policy, random_scored_games(4))
    assert Learner(policy).learn([samples[:2], samples[2:]])["engine/logprob_gap"] < 1e-5
    policy = tiny.policy()
    samples = record_logprobs_of(policy, random_scored_games(4))
    position = samples[0].trajectory.sampled.index(True)
    samples[0].trajectory.logprobs[position] -= 0.25
    assert Learner(policy).learn([samples])["engine/logprob_gap"] == pytest.approx(0.25, abs=1e-4)


def test_the_kl_to_the_frozen_reference_grows_from_zero_and_pulls_back():
    reference = tiny.policy().requires_grad_(False)
    policy = tiny.policy()
    samples = record_logprobs_of(policy, random_scored_games(4))
    first = Learner(policy, reference=reference).learn([samples])
    second = Learner(policy, reference=reference).learn([samples])
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 1e-6
    assert not any(parameter.grad is not None for parameter in reference.parameters())


def test_a_mini_batch_without_games_is_no_step():
    policy = tiny.policy()
    before = [parameter.clone() for parameter in policy.parameters()]
    metrics = Learner(policy).learn([[], []])
    assert metrics["loss"] == 0 and math.isfinite(metrics["grad_norm"])
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    """The other optimiser steps of the update are taken, and the means are theirs."""
    policy, twin = tiny.policy(), tiny.policy()
    samples = record_logprobs_of(policy, random_scored_games(4))
    poisoned = [ScoredGame(samples[0].trajectory, samples[0].reward, float("inf")), samples[1]]
    metrics = Learner(policy).learn([samples[2:], poisoned])
    expected = Learner(twin).learn([samples[2:]])
    assert metrics.pop("update/skipped") == 1 and expected.pop("update/skipped") == 0
    assert metrics == expected
    for got, want in zip(policy.parameters(), twin.parameters(), strict=True):
        assert torch.equal(got, want)


class ImpossibleReference:
    """Calls every token impossible: the KL to it is infinite, but its slope is 1."""

    def __call__(self, packed: Packed) -> TokenScores:
        logprobs = torch.full((len(packed.targets),), -math.inf)
        return TokenScores(logprobs, torch.zeros_like(logprobs))


def test_an_infinite_loss_with_a_finite_gradient_is_no_step():
    policy = tiny.policy()
    samples = record_logprobs_of(policy, random_scored_games(2))
    before = [parameter.clone() for parameter in policy.parameters()]
    seen: list[bool] = []
    for parameter in policy.parameters():
        parameter.register_hook(lambda gradient: seen.append(bool(gradient.isfinite().all())))
    assert Learner(policy, reference=ImpossibleReference()).learn([samples])["update/skipped"] == 1
    assert seen and all(seen)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


def test_an_infinite_gradient_of_a_finite_loss_is_no_step():
    policy = tiny.policy()
    samples = record_logprobs_of(policy, random_scored_games(2))
    before = [parameter.clone() for parameter in policy.parameters()]
    first = next(policy.parameters())
    hook = first.register_hook(lambda gradient: gradient.fill_(math.inf))
    trainer = Learner(policy)
    assert trainer.learn([samples])["update/skipped"] == 1
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))
    hook.remove()
    assert trainer.learn([samples])["update/skipped"] == 0  # nothing of that gradient is left
    assert all(parameter.isfinite().all() for parameter in policy.parameters())


class BesideABrokenRank(Ranks):
    """One of two ranks; the other one's maxima are all 0.5."""

    def max(self, values: list[float]) -> list[float]:
        return [max(float(value), 0.5) for value in values]


def test_what_breaks_on_another_rank_is_no_step_here_and_its_gap_counts():
    policy = tiny.policy()
    samples = record_logprobs_of(policy, random_scored_games(2))
    before = [parameter.clone() for parameter in policy.parameters()]
    metrics = Learner(policy, ranks=BesideABrokenRank(rank=0, count=1, device=CPU)).learn([samples])
    assert metrics["update/skipped"] == 1 and metrics["engine/logprob_gap"] == 0.5
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize(("limit", "stepped_on"), [(0.01, 0.01), (math.inf, None)])
def test_a_gradient_is_clipped_to_the_largest_norm_and_its_own_norm_is_told(limit, stepped_on):
    policy = tiny.policy()
    samples = record_logprobs_of(policy, random_scored_games(4))
    trainer = Learner(policy, grad_clip=limit)
    norms: list[float] = []
    trainer.update.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.cat([p.grad.flatten() for p in policy.parameters()]).norm().item())
    )
    told = trainer.learn([samples])["grad_norm"]
    assert told > 0.1
    assert norms == pytest.approx([stepped_on or told], rel=1e-4)


def test_the_run_stops_when_step_after_step_is_skipped():
    policy = tiny.policy()
    good = record_logprobs_of(policy, random_scored_games(2))
    bad = [ScoredGame(good[0].trajectory, good[0].reward, float("nan"))]
    trainer = Learner(policy, lr=0.0)
    trainer.learn([bad] * (MAX_SKIPPED - 1))
    trainer.update.check_finite()
    trainer.learn([good, *[bad] * (MAX_SKIPPED - 1)])
    trainer.update.check_finite()
    trainer.learn([bad])
    with pytest.raises(Resumable, match="not finite in 5 optimiser steps in a row"):
        trainer.update.check_finite()


def test_mini_batches_after_the_first_have_ratios():
    policy = tiny.policy()
    samples = record_logprobs_of(policy, random_scored_games(6))
    metrics = Learner(policy, lr=0.05).learn([samples, samples])
    assert metrics["clip_frac"] > 0


class Counted(Policy):
    """A policy that counts its passes."""

    passes = 0

    def forward(self, packed: Packed) -> TokenScores:
        self.passes += 1
        return super().forward(packed)


def test_old_and_reference_log_probs_cost_no_pass_that_is_not_needed():
    """In float32 the engine's are the old ones. In bfloat16 the first mini-batch's are its own forward's, the
    later ones' are computed before the first step. The reference scores each game once.
    """
    for compute, passes in [(torch.float32, 3), (torch.bfloat16, 5)]:
        policy = Counted(tiny.model(), compute=compute)
        reference = Counted(tiny.model().requires_grad_(False), compute=compute)
        Learner(policy, reference=reference, tokens_per_batch=10_000).learn([random_scored_games(2)] * 3)
        assert policy.passes == passes and reference.passes == 3


def test_in_bfloat16_nothing_is_clipped_before_the_weights_move():
    """The engine's log-probabilities may stray (here by a lot): none of it is in the ratios."""
    policy = Policy(tiny.model(), compute=torch.bfloat16)
    metrics = Learner(policy, lr=0.0).learn([random_scored_games(4), random_scored_games(2)])
    assert metrics["clip_frac"] == 0 and metrics["kl"] == 0 and metrics["engine/logprob_gap"] > 0.5


def naive_gradients(samples, references, *, clip, kl_coef, token_mean) -> list[torch.Tensor]:
    """Eq. 17 with float64 weights, game by game, from all logits; ratios from the recorded log-probs."""
    model = tiny.model().double()
    tokens = sum(sum(sample.trajectory.sampled) for sample in samples)
    for sample, reference in zip(samples, references, strict=True):
        trajectory, advantage = sample.trajectory, sample.advantage
        old = torch.tensor(
            [lp for lp, own in zip(trajectory.logprobs, trajectory.sampled, strict=True) if own]
        )
        now = naive_logprobs(model, trajectory)
        ratio = (now - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        kl = (reference - now).exp() - (reference - now) - 1
        terms = -surrogate + kl_coef * kl
        (terms.sum() / tokens if token_mean else terms.mean() / len(samples)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("token_mean", [False, True])
@pytest.mark.parametrize("tokens_per_batch", [1, 50, 10_000])
def test_an_update_has_the_gradients_of_the_naive_loss_in_float64(token_mean, tokens_per_batch):
    """Games with stale old log-probabilities: in the second mini-batch, after a step of size 0."""
    policy, frozen = tiny.policy(), tiny.policy(seed=1).requires_grad_(False)
    samples = record_logprobs_of(policy, random_scored_games(7))
    rng = random.Random(0)
    for sample in samples:
        own = sample.trajectory.sampled
        sample.trajectory.logprobs = [
            lp + rng.uniform(-0.4, 0.4) * s for lp, s in zip(sample.trajectory.logprobs, own, strict=True)
        ]
    with torch.no_grad():
        references = [naive_logprobs(frozen.model.double(), sample.trajectory) for sample in samples]
    want = naive_gradients(samples, references, clip=0.2, kl_coef=0.1, token_mean=token_mean)

    knobs = {
        "kl_coef": 0.1,
        "loss": "token-mean" if token_mean else "sequence-mean",
        "tokens_per_batch": tokens_per_batch,
    }
    trainer = Learner(policy, reference=tiny.policy(seed=1), lr=0.0, grad_clip=math.inf, **knobs)
    got: list[torch.Tensor] = []
    trainer.update.optimizer.register_step_pre_hook(
        lambda optimizer, *_: got.__setitem__(slice(None), [p.grad.clone() for p in policy.parameters()])
    )
    trainer.learn([samples[:1], samples])
    error = sum((a - b).norm() ** 2 for a, b in zip(got, want, strict=True)) ** 0.5
    assert error < 1e-5 * sum(b.norm() ** 2 for b in want) ** 0.5


def test_mini_batches_of_questions_keep_groups_whole_and_of_games_do_not():
    groups = [random_scored_games(5) for _ in range(4)]
    by_game = split(groups, games=20, group_size=5, mini_batch=8, numbers=range(4))
    assert [len(games) for games in by_game] == [8, 8, 4]
    by_question = TrainConfig(questions=4, mini_batch=2, mini_batch_of="questions").games_per_update
    halves = split(groups, games=20, group_size=5, mini_batch=by_question, numbers=range(4))
    assert halves == [groups[0] + groups[1], groups[2] + groups[3]]
