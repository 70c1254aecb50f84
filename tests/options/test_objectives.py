"""The ratio of a game (GSPO), the clip range above 1 (DAPO) and importance weights, against naive loops."""

import math
import random
from dataclasses import replace
from itertools import chain

import pytest
import torch

from prompt_r1.options.objectives import RATIOS, importance_weights
from prompt_r1.training.micro_batches import Batch, empty_batch
from prompt_r1.training.parts import Objective, make_objective
from tests.support.games import CPU

BELOW, ABOVE = 0.1, 0.3
CLIP, KL_COEF = 0.2, 0.1


def objective_of(**settings) -> Objective:
    """The objective of these settings; the others are those of eq. 17 without KL."""
    paper = {"clip": CLIP, "clip_high": 0.0, "kl_coef": 0.0, "ratio": "token", "importance_cap": 0.0}
    return make_objective(**paper | settings)


def batch_of(
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    engine: torch.Tensor | None = None,
    games: torch.Tensor | None = None,
) -> Batch:
    """A micro-batch of these tokens; without `games` they belong to one."""
    return replace(
        empty_batch(CPU),
        advantages=advantages,
        weights=weights,
        engine=torch.zeros_like(weights) if engine is None else engine,
        games=torch.zeros(len(weights), dtype=torch.long) if games is None else games,
    )


def random_columns(seed: int, lengths: list[int]) -> tuple[list[list[float]], list[float], list[float]]:
    """Log-ratios of the tokens of each game, an advantage for each game, and weights of the games."""
    rng = random.Random(seed)
    log_ratios = [[rng.uniform(-0.8, 0.8) for _ in range(length)] for length in lengths]
    return log_ratios, [rng.uniform(-2, 2) for _ in lengths], [1 / len(lengths)] * len(lengths)


def test_the_ratio_of_a_game_is_the_geometric_mean_of_those_of_its_tokens():
    games, log_ratios = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0.3, -0.1, 0.4, -0.7, 0.1, 0.0])
    expected = [math.exp(0.2)] * 3 + [math.exp(-0.7)] + [math.exp(0.05)] * 2
    assert RATIOS["sequence"](games, log_ratios).tolist() == pytest.approx(expected)
    assert torch.equal(RATIOS["token"](games, log_ratios), log_ratios.exp())
    nothing = empty_batch(CPU)
    assert RATIOS["sequence"](nothing.games, nothing.weights).shape == (0,)


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_gspo_and_its_gradient_are_the_published_ones(seed):
    """The objective game by game, in float64. The gradient by autograd, and by its formula: s Â / |u|
    for each token of a game that is not clipped.
    """
    lengths = [1, 4, 7, 2, 5]
    log_ratios, advantages, weights = random_columns(seed, lengths)
    leaves = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in log_ratios]
    naive, slopes = torch.zeros((), dtype=torch.float64), []
    for row, advantage, weight in zip(leaves, advantages, weights, strict=True):
        ratio = row.mean().exp()
        limited = ratio.clamp(1 - BELOW, 1 + ABOVE)
        naive = naive - weight * torch.minimum(ratio * advantage, limited * advantage)
        is_clipped = ratio.item() * advantage > limited.item() * advantage
        slopes += [0.0 if is_clipped else -weight * ratio.item() * advantage / len(row)] * len(row)
    naive.backward()

    logprobs = torch.tensor(list(chain(*log_ratios)), dtype=torch.float64, requires_grad=True)
    old = torch.zeros_like(logprobs)
    games = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    of_tokens = torch.tensor([w / n for w, n in zip(weights, lengths, strict=True)]).double()[games]
    of_games = torch.tensor(advantages, dtype=torch.float64)[games]
    objective = objective_of(clip=BELOW, clip_high=ABOVE, ratio="sequence")
    loss = objective(logprobs, old, old, batch_of(of_games, of_tokens, games=games))
    loss.total.backward()
    assert loss.total.item() == pytest.approx(naive.item(), rel=1e-6)
    by_autograd = torch.cat([row.grad for row in leaves])
    assert logprobs.grad.tolist() == pytest.approx(by_autograd.tolist(), rel=1e-6, abs=1e-12)
    assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-12)


def test_a_clip_range_above_1_of_its_own_lets_likelier_tokens_of_good_games_pass():
    """With 0.28 above 1, a ratio of 1.25 keeps its gradient; the range below 1 stays 0.2."""
    logprobs = torch.tensor([1.25, 1.3, 0.79, 0.75]).log().requires_grad_()
    advantages, old = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.zeros(4)
    passes = {
        (0.2, 0.0): [False] * 4,
        (0.2, 0.28): [True, False, False, False],
        (0.3, 0.2): [False, False, True, True],
    }
    for (clip, clip_high), expected in passes.items():
        logprobs.grad = None
        objective = objective_of(clip=clip, clip_high=clip_high)
        objective(logprobs, old, old, batch_of(advantages, torch.full((4,), 0.25))).total.backward()
        assert (logprobs.grad != 0).tolist() == expected


def test_importance_weights_are_truncated_ratios_of_the_policy_that_sampled_to_the_engine():
    old, engine = torch.tensor([-1.0, -1.0, -3.0, -1.0]), torch.tensor([-1.0, -1.5, -1.0, -9.0])
    expected = [1.0, math.exp(0.5), math.exp(-2), 2.0]
    assert importance_weights(old, engine, cap=2.0).tolist() == pytest.approx(expected)
    assert importance_weights(old, engine, cap=0).tolist() == [1.0] * 4  # no correction


@pytest.mark.parametrize("cap", [1.1, 2.0])
def test_importance_weights_multiply_the_policy_term_and_not_the_kl(cap):
    """The oracle is a loop in Python floats."""
    rng = random.Random(0)
    new, old, engine, ref = ([rng.uniform(-3, -1) for _ in range(20)] for _ in range(4))
    advantages, weights = ([rng.uniform(low, 2) for _ in range(20)] for low in (-2, 0))
    expected, slopes = 0.0, []
    for n, o, e, f, a, w in zip(new, old, engine, ref, advantages, weights, strict=True):
        ratio, c = math.exp(n - o), min(math.exp(o - e), cap)
        clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
        expected += w * (-c * min(ratio * a, clipped * a) + KL_COEF * (math.exp(f - n) - (f - n) - 1))
        policy_slope = -c * ratio * a if ratio * a <= clipped * a else 0.0
        slopes.append(w * (policy_slope + KL_COEF * (1 - math.exp(f - n))))
    logprobs = torch.tensor(new, requires_grad=True)
    columns = [torch.tensor(column) for column in (old, ref, advantages, weights, engine)]
    batch = batch_of(columns[2], columns[3], engine=columns[4])
    loss = objective_of(kl_coef=KL_COEF, importance_cap=cap)(logprobs, *columns[:2], batch)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(expected, rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-4)


def test_an_objective_without_options_is_that_of_the_paper():
    """Every option, at the value that turns it off, gives the loss and the gradient of eq. 17."""
    rng = random.Random(0)
    new, old, ref = (torch.tensor([rng.uniform(-3, -1) for _ in range(20)]) for _ in range(3))
    advantages, weights = (torch.tensor([rng.uniform(low, 2) for _ in range(20)]) for low in (-2, 0))
    losses, gradients = [], []
    for settings in ({}, {"clip_high": CLIP}, {"importance_cap": 2.0}):
        logprobs = new.clone().requires_grad_()
        loss = objective_of(kl_coef=KL_COEF, **settings)(
            logprobs, old, ref, batch_of(advantages, weights, engine=old)
        )
        loss.total.backward()
        losses.append([loss.total.item(), loss.kl.item(), loss.clip_frac.item()])
        gradients.append(logprobs.grad)
    assert losses[1] == losses[2] == pytest.approx(losses[0])
    assert all(torch.allclose(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradient_of_the_kl_is_that_of_its_direction(reverse):
    """Over all outcomes of a distribution, weighted by their probabilities, the expectation is exact."""
    rng = torch.Generator().manual_seed(3)
    start, other = torch.randn(2, 7, generator=rng)
    logits = start.clone().requires_grad_()
    logprobs, ref = logits.log_softmax(0), other.log_softmax(0)
    old = logprobs.detach()
    batch = batch_of(torch.zeros(7), old.exp())
    objective_of(kl_coef=1.0, reverse_kl=reverse)(logprobs, old, ref, batch).total.backward()
    exact = start.clone().requires_grad_()
    policy = exact.log_softmax(0)
    kl = policy.exp() @ (policy - ref) if reverse else ref.exp() @ (ref - policy)
    kl.backward()
    assert torch.allclose(logits.grad, exact.grad, atol=1e-6)


def test_the_dual_clip_bounds_what_an_unlikely_ratio_of_a_bad_game_costs():
    """The release: where the advantage is negative, min(max(-r Â, -clip(r) Â), -c Â)."""
    ratios, advantages = torch.tensor([0.5, 1.0, 9.0, 9.0]), torch.tensor([-1.0, -2.0, -2.0, 1.0])
    losses = []
    for row, advantage in zip(ratios, advantages, strict=True):
        batch = batch_of(advantage[None], torch.ones(1))
        zero = torch.zeros(1)
        losses.append(objective_of(dual_clip=3.0)(row.log()[None], zero, zero, batch).total.item())
    assert losses == pytest.approx([0.8, 2.0, 6.0, -1.2])
