"""`Update` and the loop of train.py over it: one optimiser step per mini-batch."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from prompt_r1.errors import UsageError
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.packing import Packed, pack
from prompt_r1.model.policy import Policy, PolicyOutput
from prompt_r1.training.batches import micro_batches_of, mini_batches_of
from prompt_r1.training.update import GAP, GRADIENT_LIMIT, IMPORTANCE_CAP, GapLimit
from prompt_r1.types import ScoredGame
from tests.support import tiny
from tests.support.games import (
    CPU,
    Learner,
    change_logprobs,
    naive_logprobs,
    random_scored_games,
    record_logprobs_of,
)
from tests.support.thread_ranks import on_each_rank


def policy_and_games(count: int) -> tuple[Policy, list[ScoredGame]]:
    """A policy, and games in which its log-probabilities are recorded."""
    policy = tiny.policy()
    return policy, record_logprobs_of(policy, random_scored_games(count))


def copy_of_weights(policy: Policy) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in policy.parameters()]


def same_weights(policy: Policy, weights: list[torch.Tensor]) -> bool:
    return all(torch.equal(got, want) for got, want in zip(policy.parameters(), weights, strict=True))


def log_likelihood(policy: Policy, game: ScoredGame) -> float:
    """The sum of the log-probabilities of the agent's tokens."""
    with torch.no_grad():
        return policy(pack([[game.trajectory]], CPU)).logprobs.sum().item()


def test_the_gap_between_engine_and_policy_is_measured_before_the_weights_move():
    policy, games = policy_and_games(4)
    assert Learner(policy).learn([games[:2], games[2:]])["engine/logprob_gap"] < 1e-5
    policy, games = policy_and_games(4)
    position = games[0].trajectory.sampled.index(True)
    games[0].trajectory.logprobs[position] -= 0.25
    assert Learner(policy).learn([games])["engine/logprob_gap"] == pytest.approx(0.25, abs=1e-4)


def test_a_mini_batch_without_games_takes_no_optimiser_step():
    policy = tiny.policy()
    before = copy_of_weights(policy)
    metrics = Learner(policy).learn([[], []])
    assert metrics["loss"] == 0 and math.isfinite(metrics["grad_norm"])
    assert same_weights(policy, before)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    """The other optimiser steps of the update are taken, and the metrics are those of these steps."""
    (policy, games), twin = policy_and_games(4), tiny.policy()
    with_infinity = [replace(games[0], advantage=math.inf), games[1]]
    metrics = Learner(policy).learn([games[2:], with_infinity])
    expected = Learner(twin).learn([games[2:]])
    assert metrics.pop("update/skipped") == 1 and expected.pop("update/skipped") == 0
    assert metrics == expected
    assert same_weights(policy, copy_of_weights(twin))


def test_an_infinite_loss_with_a_finite_gradient_is_skipped():
    """Where the reference gives every token probability 0, the KL to it is infinite."""
    policy, games = policy_and_games(2)
    before = copy_of_weights(policy)
    finite: list[bool] = []  # of each gradient
    for parameter in policy.parameters():
        parameter.register_hook(lambda gradient: finite.append(bool(gradient.isfinite().all())))

    def reference(packed: Packed) -> PolicyOutput:
        return PolicyOutput(torch.full((len(packed.targets),), -math.inf), torch.zeros(len(packed.targets)))

    assert Learner(policy, reference=reference).learn([games])["update/skipped"] == 1
    assert finite and all(finite)
    assert same_weights(policy, before)


def test_an_infinite_gradient_of_a_finite_loss_is_skipped():
    policy, games = policy_and_games(2)
    before = copy_of_weights(policy)
    first = next(policy.parameters())
    hook = first.register_hook(lambda gradient: gradient.fill_(math.inf))
    learner = Learner(policy)
    assert learner.learn([games])["update/skipped"] == 1
    assert same_weights(policy, before)
    hook.remove()
    assert learner.learn([games])["update/skipped"] == 0  # the infinite gradient was discarded
    assert all(parameter.isfinite().all() for parameter in policy.parameters())


class BrokenTwin(Ranks):
    """One of two ranks; the loss of the other one is not finite, and its gap is 0.5."""

    def gather(self, item):
        if isinstance(item, bool):
            return [item, True]
        return [item, [torch.tensor([0.5])] if item else []]


def test_a_step_that_is_not_finite_on_another_rank_is_skipped_and_the_largest_gap_is_reported():
    policy, games = policy_and_games(2)
    before = copy_of_weights(policy)
    ranks = BrokenTwin(rank=0, count=1, device=CPU)
    metrics = Learner(policy, ranks=ranks).learn([games])
    assert metrics["update/skipped"] == 1 and metrics["engine/logprob_gap"] == 0.5
    assert same_weights(policy, before)


@pytest.mark.parametrize(("stop", "is_refused"), [(0.5, False), (0.49, True)])
def test_only_a_gap_above_its_limit_ends_the_run(stop, is_refused):
    policy, games = policy_and_games(2)
    ranks = BrokenTwin(rank=0, count=1, device=CPU)  # Its gap is 0.5.
    learner = Learner(policy, ranks=ranks, gap_limit=GapLimit(GAP, alarm=0.1, stop=stop))
    with pytest.raises(UsageError, match=r"is 0\.5 nats, above 0\.49") if is_refused else nullcontext():
        learner.learn([games])


def test_between_two_updates_no_gradient_takes_memory():
    """The games are played there, and the KV cache would be smaller by as much as the trained weights."""
    policy, games = policy_and_games(2)
    Learner(policy).learn([games])
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("scale", [10.0, 0.01])
def test_a_gradient_above_the_limit_is_clipped_and_its_norm_before_clipping_is_reported(scale):
    policy, games = policy_and_games(4)
    learner = Learner(policy)
    gradients, metrics = gradients_of_steps(
        learner, [[replace(game, advantage=scale * game.advantage) for game in games]]
    )
    assert (metrics["grad_norm"] > GRADIENT_LIMIT) == (scale > 1)
    expected = min(metrics["grad_norm"], GRADIENT_LIMIT)
    assert gradients[0].norm().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("token_mean", [False, True])
def test_the_weights_of_a_mini_batch_sum_to_1_over_all_ranks(token_mean):
    """Also where one rank played four of the five games."""
    games = random_scored_games(5)

    def weight_on(ranks: Ranks) -> float:
        played = games if ranks.count == 1 else games[4:] if ranks.rank else games[:4]
        [chosen] = mini_batches_of([played], ranks, mini_batch=8)
        batches = micro_batches_of(chosen, ranks, tokens_per_batch=64, token_mean=token_mean)
        return sum(batch.weights.sum().item() for batch in batches)

    for count in (1, 2):
        assert sum(on_each_rank(count, weight_on)) == pytest.approx(1)


class CountingPolicy(Policy):
    """A policy that counts its forward passes."""

    forwards = 0

    def forward(self, packed: Packed) -> PolicyOutput:
        self.forwards += 1
        return super().forward(packed)


def test_old_and_reference_log_probs_take_no_unnecessary_forward_passes():
    """The first mini-batch's own forward gives its old ones; the reference has one for each mini-batch."""
    for compute in (torch.float32, torch.bfloat16):
        policy = CountingPolicy(tiny.model(), compute_dtype=compute)
        reference = CountingPolicy(tiny.model().requires_grad_(False), compute_dtype=compute)
        Learner(policy, reference=reference, tokens_per_batch=10_000).learn([random_scored_games(2)] * 3)
        assert policy.forwards == 5 and reference.forwards == 3


def test_in_bfloat16_nothing_is_clipped_before_the_weights_move():
    """The engine's log-probabilities differ from the policy's (here by a lot), but are not in the ratios."""
    policy = Policy(tiny.model(), compute_dtype=torch.bfloat16)
    metrics = Learner(policy, lr=0.0).learn([random_scored_games(4), random_scored_games(2)])
    assert metrics["clip_frac"] == 0 and metrics["kl"] == 0 and metrics["engine/logprob_gap"] > 0.5


def gradients_of_steps(
    learner: Learner, mini_batches: list[list[ScoredGame]]
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The gradient of each optimiser step, and the metrics."""
    policy, gradients = learner.policy, []

    def record_gradient(*_: object) -> None:
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]))

    learner.optimizer.register_step_pre_hook(record_gradient)
    return gradients, learner.learn(mini_batches)


def test_in_16_bits_every_optimiser_step_weights_tokens_by_their_importance():
    """In the first step and in later ones, which have old log-probabilities of their own. The oracle weights
    each token's advantage by min(exp(old - engine), 2), game by game. The learning rate is 0.
    """
    policy = Policy(tiny.model(), compute_dtype=torch.bfloat16)
    games = record_logprobs_of(policy, random_scored_games(4))
    for game in games:
        game.trajectory.logprobs = [min(0.0, value) for value in game.trajectory.logprobs]
    for seed in range(9):
        change_logprobs(games, seed=seed)
    settings = {"lr": 0.0, "kl_coef": 0.0, "tokens_per_batch": 1}
    got, metrics = gradients_of_steps(Learner(policy, **settings), [games, games])

    twin = Policy(tiny.model(), compute_dtype=torch.bfloat16)
    weights = []
    for game in games:
        logprobs = twin(pack([[game.trajectory]], CPU)).logprobs
        engine = torch.tensor(game.trajectory.logprobs)[torch.tensor(game.trajectory.sampled)]
        importance = (logprobs.detach() - engine).exp().clamp(max=IMPORTANCE_CAP)
        weights += importance.tolist()
        (-(importance * game.advantage * logprobs).mean() / len(games)).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])
    clipped = clipped_gradient(expected)
    for gradient in got:
        assert (gradient - clipped).norm() < 0.01 * clipped.norm()
    assert metrics["engine/importance_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    truncated = sum(weight >= IMPORTANCE_CAP for weight in weights) / len(weights)
    assert metrics["engine/importance_truncated"] == pytest.approx(truncated) and 0.1 < truncated < 0.9


def clipped_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient of at most the largest norm."""
    return gradient * min(1.0, GRADIENT_LIMIT / gradient.norm().item())


def naive_gradients(
    model: torch.nn.Module,
    games: list[ScoredGame],
    olds: list[torch.Tensor],
    references: list[torch.Tensor],
    *,
    clip: tuple[float, float],
    kl_coef: float,
    token_mean: bool,
) -> torch.Tensor:
    """The gradients of eq. 17 in float64, game by game."""
    tokens = sum(sum(game.trajectory.sampled) for game in games)
    for game, old, reference in zip(games, olds, references, strict=True):
        new = naive_logprobs(model, game.trajectory)
        ratio, advantage = (new - old).exp(), game.advantage
        limited = ratio.clamp(1 - clip[0], 1 + clip[1])
        surrogate = torch.minimum(ratio * advantage, limited * advantage)
        kl = (reference - new).exp() - (reference - new) - 1
        terms = -surrogate + kl_coef * kl
        loss = terms.sum() / tokens if token_mean else terms.mean() / len(games)
        loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@torch.no_grad()
def logprobs_under(policy: Policy, games: list[ScoredGame]) -> list[torch.Tensor]:
    """The log-probabilities of each game in float64."""
    model = copy.deepcopy(policy.model).double()
    return [naive_logprobs(model, game.trajectory) for game in games]


@pytest.mark.parametrize(("token_mean", "clip"), [(False, (0.2, 0.2)), (True, (0.2, 0.28))])
@pytest.mark.parametrize("tokens_per_batch", [1, 50, 10_000])
def test_an_update_has_the_gradients_of_the_naive_loss_in_float64(token_mean, clip, tokens_per_batch):
    """In the second optimiser step: the first has moved the weights, so that some ratios are clipped. What
    the engine has recorded plays no part.
    """
    policy, frozen = tiny.policy(), tiny.policy(seed=1).requires_grad_(False)
    games = record_logprobs_of(policy, random_scored_games(7))
    change_logprobs(games, seed=0)
    olds, references = logprobs_under(policy, games), logprobs_under(frozen, games)
    learner = Learner(
        policy,
        reference=frozen,
        lr=0.003,
        kl_coef=0.1,
        clip=clip[0],
        clip_high=clip[1],
        token_mean=token_mean,
        tokens_per_batch=tokens_per_batch,
    )
    learned_from: list[torch.nn.Module] = []  # the weights before each step is taken
    learner.optimizer.register_step_pre_hook(
        lambda *_: learned_from.append(copy.deepcopy(policy.model).double())
    )
    [_, got], metrics = gradients_of_steps(learner, [games[:1], games])
    model = learned_from[1]
    model.zero_grad()
    settings = {"clip": clip, "kl_coef": 0.1, "token_mean": token_mean}
    expected = clipped_gradient(naive_gradients(model, games, olds, references, **settings))
    assert (got - expected).norm() < 1e-5 * expected.norm()
    assert 0.05 < metrics["clip_frac"] < 0.5


def test_weights_that_overflow_end_the_run_before_they_are_saved():
    """They were saved and exported, and the run ended as a success."""
    policy, games = policy_and_games(4)
    with pytest.raises(UsageError, match=r"weights are not finite.*--lr"):
        Learner(policy, lr=1e30).learn([games])


def test_the_kl_of_an_update_is_that_of_the_tokens_after_the_first_optimiser_step():
    """Against the log-probabilities before and after one step, by hand; 0 where there is only one."""
    (policy, games), twin = policy_and_games(4), tiny.policy()
    later = games[2:]
    before = sum(log_likelihood(twin, game) for game in later)
    assert Learner(twin).learn([games[:2]])["update/kl"] == 0.0
    after = sum(log_likelihood(twin, game) for game in later)
    tokens = sum(sum(game.trajectory.sampled) for game in later)
    kl = Learner(policy).learn([games[:2], later])["update/kl"]
    assert kl == pytest.approx((before - after) / tokens, rel=1e-3) and kl != 0


def test_the_metrics_of_several_optimiser_steps_are_their_means():
    """Of steps of size 0 on the same games. With a range below 1, every game with A > 0 is clipped."""
    games = record_logprobs_of(tiny.policy(), random_scored_games(4))

    def metrics_of(steps: int) -> dict[str, float]:
        settings = {"clip_high": -0.1, "reference": tiny.policy(seed=1)}
        return Learner(tiny.policy(), lr=0.0, **settings).learn([games] * steps)

    one, three = metrics_of(1), metrics_of(3)
    for name in ("loss", "kl", "clip_frac", "entropy", "grad_norm"):
        assert three[name] == pytest.approx(one[name], rel=1e-4) and one[name] != 0, name
