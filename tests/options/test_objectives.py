"""The ratio of a game (GSPO) and the clip range above 1 (DAPO), against loops in float64 and autograd."""

import math
import random
from itertools import chain

import pytest
import torch

from prompt_r1.grpo import grpo_loss
from prompt_r1.options.objectives import RATIOS
from prompt_r1.training.batch import empty_batch
from tests.games import CPU

BELOW, ABOVE = 0.1, 0.3


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
    loss = grpo_loss(
        logprobs,
        old,
        old,
        torch.tensor(advantages, dtype=torch.float64)[games],
        of_tokens,
        clip=(BELOW, ABOVE),
        kl_coef=0.0,
        ratio_of=lambda log_ratios: RATIOS["sequence"](games, log_ratios),
    )
    loss.total.backward()
    assert loss.total.item() == pytest.approx(naive.item(), rel=1e-6)
    assert logprobs.grad is not None
    by_autograd = torch.cat([row.grad for row in leaves if row.grad is not None])
    assert logprobs.grad.tolist() == pytest.approx(by_autograd.tolist(), rel=1e-6, abs=1e-12)
    assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-12)


def test_a_clip_range_above_1_of_its_own_lets_likelier_tokens_of_good_games_pass():
    """With 0.28 above 1, a ratio of 1.25 keeps its gradient; the range below 1 stays 0.2."""
    logprobs = torch.tensor([1.25, 1.3, 0.79, 0.75]).log().requires_grad_()
    advantages, old = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.zeros(4)
    passes = {
        0.2: [False] * 4,
        (0.2, 0.28): [True, False, False, False],
        (0.3, 0.2): [False, False, True, True],
    }
    for clip, expected in passes.items():
        logprobs.grad = None
        grpo_loss(
            logprobs, old, old, advantages, torch.full((4,), 0.25), clip=clip, kl_coef=0.0
        ).total.backward()
        assert logprobs.grad is not None and (logprobs.grad != 0).tolist() == expected
