"""The loss against a loop over tokens in float64, and the advantages against eq. 16."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_r1.agent.packing import fill
from prompt_r1.grpo import Loss, group_advantages, grpo_loss
from prompt_r1.training.micro_batches import Batch
from prompt_r1.types import ScoredGame
from tests.support import tiny
from tests.support.games import Learner, random_scored_games

CLIP = 0.2
KL_COEF = 0.1  # of the loss that is compared with the loop


# A log-probability for each agent token, by (number of the game, position in the game).
TokenLogprobs = dict[tuple[int, int], float]


def sampled_tokens(games: list[ScoredGame]) -> int:
    return sum(sum(game.trajectory.sampled) for game in games)


def batches_of(
    games: list[ScoredGame], *, token_mean: bool = False, tokens_per_batch: int = 10_000
) -> list[Batch]:
    """The micro-batches of an optimiser step on these games."""
    learner = Learner(tiny.policy(), token_mean=token_mean, tokens_per_batch=tokens_per_batch)
    [batches] = learner.update.prepare([games])
    return list(batches)


def loss_by_loop(
    games: list[ScoredGame], logprobs: TokenLogprobs, references: TokenLogprobs, *, token_mean: bool
) -> float:
    """Eq. 17 in plain Python floats."""
    total = 0.0
    for number, game in enumerate(games):
        terms = []
        for position, sampled in enumerate(game.trajectory.sampled):
            if not sampled:
                continue
            new, old = logprobs[number, position], game.trajectory.logprobs[position]
            ref = references[number, position]
            ratio = math.exp(new - old)
            clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
            surrogate = min(ratio * game.advantage, clipped * game.advantage)
            kl = math.exp(ref - new) - (ref - new) - 1
            terms.append(-surrogate + KL_COEF * kl)
        if token_mean:
            total += sum(terms) / sampled_tokens(games)
        else:
            total += sum(terms) / len(terms) / len(games)
    return total


@pytest.mark.parametrize("token_mean", [False, True])
@pytest.mark.parametrize("tokens_per_batch", [1, 60, 10_000])
def test_the_loss_equals_a_loop_over_tokens_in_float64(token_mean, tokens_per_batch):
    games = random_scored_games()
    rng = random.Random(5)
    logprobs: TokenLogprobs = {}
    references: TokenLogprobs = {}
    for number, game in enumerate(games):
        for position, engine_logprob in enumerate(game.trajectory.logprobs):
            logprobs[number, position] = engine_logprob + rng.uniform(-0.5, 0.5)
            references[number, position] = logprobs[number, position] + rng.uniform(-0.5, 0.5)

    total = 0.0
    batches = batches_of(games, token_mean=token_mean, tokens_per_batch=tokens_per_batch)
    groups_of_batches = fill([game.trajectory for game in games], tokens_per_batch)
    for groups, batch in zip(groups_of_batches, batches, strict=True):
        keys = []  # of the batch's agent tokens, in its order
        for number in itertools.chain(*groups):
            sampled = games[number].trajectory.sampled
            keys += [(number, position) for position, own in enumerate(sampled) if own]
        batch_logprobs = torch.tensor([logprobs[key] for key in keys])
        batch_references = torch.tensor([references[key] for key in keys])
        total += loss_of(batch, batch_logprobs, ref=batch_references, kl_coef=KL_COEF).total.item()
    expected = loss_by_loop(games, logprobs, references, token_mean=token_mean)
    assert total == pytest.approx(expected, rel=1e-5)


def loss_of(batch: Batch, logprobs: torch.Tensor, *, ref: torch.Tensor, kl_coef: float) -> Loss:
    """The loss of a batch, with the engine's log-probabilities as the old ones."""
    return grpo_loss(logprobs, batch.engine, ref, batch.advantages, batch.weights, clip=CLIP, kl_coef=kl_coef)


def gradient_of(batches: list[Batch], *, kl_coef: float = 0.01) -> torch.Tensor:
    policy = tiny.policy()
    for batch in batches:
        logprobs = policy(batch.packed).logprobs
        loss_of(batch, logprobs, ref=batch.engine, kl_coef=kl_coef).total.backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


@settings(max_examples=10)
@given(st.booleans(), st.integers(1, 12), st.integers(1, 300), st.randoms(use_true_random=False))
def test_splitting_into_micro_batches_does_not_change_the_gradient(token_mean, count, tokens_per_batch, rng):
    """Nor do the token budget, the order of the games and the sharing of their openings."""
    games = random_scored_games(count)
    one_by_one = gradient_of(batches_of(games, token_mean=token_mean, tokens_per_batch=1))
    rng.shuffle(games)
    packed = gradient_of(batches_of(games, token_mean=token_mean, tokens_per_batch=tokens_per_batch))
    assert (packed - one_by_one).norm() < 1e-5 * one_by_one.norm()


def test_weights_sum_to_one_over_a_step():
    for token_mean in (False, True):
        batches = batches_of(random_scored_games(), token_mean=token_mean, tokens_per_batch=70)
        assert sum(batch.weights.sum().item() for batch in batches) == pytest.approx(1, abs=1e-5)


def test_environment_text_gets_no_gradient():
    """Only the agent's tokens are targets. Replies are context: their log-probabilities are in no loss."""
    games = random_scored_games(3)
    (batch,) = batches_of(games)
    targets: list[int] = []
    for game in sorted(games, key=lambda game: len(game.trajectory.tokens), reverse=True):
        pairs = zip(game.trajectory.tokens, game.trajectory.sampled, strict=True)
        targets += [token for token, sampled in pairs if sampled]
    assert batch.packed.targets.tolist() == targets and len(batch.weights) == len(targets)


def test_kl_is_never_negative_and_zero_at_the_reference():
    (batch,) = batches_of(random_scored_games())
    at_reference = loss_of(batch, batch.engine, ref=batch.engine, kl_coef=1.0)
    assert at_reference.kl == 0 and at_reference.clip_frac == 0
    moved = batch.engine + torch.randn(batch.weights.shape)
    away = loss_of(batch, moved, ref=batch.engine, kl_coef=1.0)
    assert (away.token_kl >= 0).all() and away.kl > 0


def test_clip_frac_counts_the_tokens_whose_ratio_is_clipped_against_their_advantage():
    """A token counts by its weight when its ratio is above 1 + ε with a positive advantage, or below 1 - ε
    with a negative one. Such tokens have no gradient. Other ratios outside the range are not clipped.
    """
    logprobs = torch.tensor([0.3, -0.3, -0.3, 0.3, 0.1, -0.1, 0.3, -0.3], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    clipped = [True, True, False, False, False, False, False, False]
    weights = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
    old = torch.zeros(8)
    loss = grpo_loss(logprobs, old, old, advantages, weights, clip=CLIP, kl_coef=0.0)
    loss.total.backward()
    assert loss.clip_frac.item() == pytest.approx(0.5)
    assert logprobs.grad is not None
    without_gradient = torch.tensor(clipped) | (advantages == 0)
    assert (logprobs.grad == 0).tolist() == without_gradient.tolist()


def test_advantages_are_standardised_within_each_group_with_bessels_correction():
    (advantages,) = group_advantages([[1, 0, 0, 0.5, 0]])
    assert advantages == pytest.approx([1.5652, -0.6708, -0.6708, 0.4472, -0.6708], abs=1e-4)


def test_advantages_are_zero_for_equal_rewards_and_for_a_single_game():
    assert group_advantages([[0.3] * 5, [1.0], []]) == [[0.0] * 5, [0.0], []]


@pytest.mark.parametrize(("intact", "count"), [(4, 5), (3, 4), (6, 8), (9, 12)])
def test_a_group_with_at_least_three_quarters_intact_games_compares_only_those(intact, count):
    rewards = [float(number) for number in range(intact)]
    broken = [None] * (count - intact)
    [without_broken] = group_advantages([rewards])
    [with_broken] = group_advantages([[*rewards, *broken]])
    assert with_broken == [*without_broken, *broken]


@pytest.mark.parametrize(("intact", "count"), [(3, 5), (2, 4), (5, 8), (8, 12), (0, 4)])
def test_a_group_with_more_than_a_quarter_broken_games_is_dropped(intact, count):
    rewards = [float(number) for number in range(intact)] + [None] * (count - intact)
    assert group_advantages([rewards]) == [[None] * count]
