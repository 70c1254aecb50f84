"""The loss against a loop over tokens in float64, and the advantages against eq. 16."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_r1.grpo import Loss, compare_games, group_advantages, grpo_loss
from prompt_r1.training.batches import Batch, make_batch, micro_batches_of
from prompt_r1.types import Reward, ScoredGame
from tests.support import tiny
from tests.support.games import CPU, ONE_RANK, columns_of, random_game, random_scored_games

CLIP = 0.2
KL_COEF = 0.1  # the coefficient in the loss and in the loop


def batches_of(
    games: list[ScoredGame], *, token_mean: bool = False, tokens_per_batch: int = 10_000
) -> list[Batch]:
    """The micro-batches of an optimiser step on these games."""
    return micro_batches_of(games, ONE_RANK, tokens_per_batch=tokens_per_batch, token_mean=token_mean)


def loss_of(batch: Batch, logprobs: torch.Tensor, **changes) -> Loss:
    """The loss of a batch, with the engine's log-probabilities as the old ones and as the reference."""
    old, reference = changes.pop("old", batch.engine), changes.pop("ref", batch.engine)
    columns = columns_of(batch, old=old, reference=reference)
    settings = {"clip": CLIP, "clip_high": 0.0, "kl_coef": 0.0, "importance_cap": 0.0}
    return grpo_loss(logprobs, columns, **settings | changes)


def batch_of(advantages: torch.Tensor, weights: torch.Tensor) -> Batch:
    """A micro-batch of these tokens."""
    empty = make_batch([], lambda game: 1.0, CPU)
    engine = torch.zeros_like(weights)
    return replace(empty, engine=engine, advantages=advantages, weights=weights)


@pytest.mark.parametrize("token_mean", [False, True])
@pytest.mark.parametrize("cap", [0.0, 1.1, 2.0])
@pytest.mark.parametrize(("clip_high", "tokens_per_batch"), [(0.0, 1), (0.0, 60), (0.28, 10_000)])
def test_the_loss_equals_a_loop_over_tokens_in_float64(token_mean, cap, clip_high, tokens_per_batch):
    """Eq. 17 in Python floats; the importance weight multiplies the policy term and not the KL. The new
    log-probability of a token and the others are functions of the one that was recorded.
    """
    games, total = random_scored_games(), 0.0
    for batch in batches_of(games, token_mean=token_mean, tokens_per_batch=tokens_per_batch):
        engine = batch.engine
        old, new, ref = (engine + shift * torch.sin(c * engine) for shift, c in SHIFTS)
        settings = {"clip_high": clip_high, "kl_coef": KL_COEF, "importance_cap": cap}
        total += loss_of(batch, new, old=old, ref=ref, **settings).total.item()
    expected, tokens = 0.0, sum(sum(game.trajectory.sampled) for game in games)
    for game in games:
        terms = []
        for engine, sampled in zip(game.trajectory.logprobs, game.trajectory.sampled, strict=True):
            if not sampled:
                continue
            old, new, ref = (engine + shift * math.sin(c * engine) for shift, c in SHIFTS)
            ratio = math.exp(new - old)
            clipped = min(max(ratio, 1 - CLIP), 1 + (clip_high or CLIP))
            importance = min(math.exp(old - engine), cap) if cap else 1.0
            surrogate = importance * min(ratio * game.advantage, clipped * game.advantage)
            terms.append(-surrogate + KL_COEF * (math.exp(ref - new) - (ref - new) - 1))
        expected += sum(terms) / (tokens if token_mean else len(terms) * len(games))
    assert total == pytest.approx(expected, rel=1e-5)


# Amplitude and frequency of the changes of the old, the new and the reference log-probabilities.
SHIFTS = ((0.3, 40), (0.5, 50), (0.5, 60))


def gradient_of(batches: list[Batch], *, kl_coef: float = 0.01) -> torch.Tensor:
    policy = tiny.policy()
    for batch in batches:
        logprobs = policy(batch.packed).logprobs
        loss_of(batch, logprobs, kl_coef=kl_coef).total.backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


@settings(max_examples=10)
@given(st.booleans(), st.integers(1, 12), st.integers(1, 300), st.randoms(use_true_random=False))
def test_splitting_into_micro_batches_does_not_change_the_gradient(token_mean, count, tokens_per_batch, rng):
    """The token budget, the order of games and shared openings do not change it, either."""
    games = random_scored_games(count)
    one_by_one = gradient_of(batches_of(games, token_mean=token_mean, tokens_per_batch=1))
    rng.shuffle(games)
    packed = gradient_of(batches_of(games, token_mean=token_mean, tokens_per_batch=tokens_per_batch))
    assert (packed - one_by_one).norm() < 1e-5 * one_by_one.norm()


def test_environment_text_gets_no_gradient():
    """Only the agent's tokens are targets. Replies are context: their log-probabilities are in no loss."""
    games = random_scored_games(3)
    (batch,) = batches_of(games)
    targets: list[int] = []
    for game in sorted(games, key=lambda game: len(game.trajectory.tokens), reverse=True):
        pairs = zip(game.trajectory.tokens, game.trajectory.sampled, strict=True)
        targets += [token for token, sampled in pairs if sampled]
    assert batch.packed.targets.tolist() == targets and len(batch.weights) == len(targets)


def test_clip_frac_counts_the_tokens_whose_ratio_is_clipped_against_their_advantage():
    """By their weights. They have no gradient; other ratios outside of 1 ± ε are not clipped."""
    logprobs = torch.tensor([0.3, -0.3, -0.3, 0.3, 0.1, -0.1, 0.3, -0.3], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    clipped = [True, True, False, False, False, False, False, False]
    weights = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
    loss = loss_of(batch_of(advantages, weights), logprobs)
    loss.total.backward()
    assert loss.clip_frac.item() == pytest.approx(0.5)
    assert logprobs.grad is not None
    without_gradient = torch.tensor(clipped) | (advantages == 0)
    assert (logprobs.grad == 0).tolist() == without_gradient.tolist()


def test_the_gradient_of_the_kl_is_that_of_the_reference_to_the_policy():
    """Over all outcomes of a distribution, weighted by their probabilities, the expectation is exact."""
    start, other = torch.randn(2, 7, generator=torch.Generator().manual_seed(3))
    logits, ref = start.clone().requires_grad_(), other.log_softmax(0)
    logprobs = logits.log_softmax(0)
    old = logprobs.detach()
    loss_of(batch_of(torch.zeros(7), old.exp()), logprobs, old=old, ref=ref, kl_coef=1.0).total.backward()
    exact = start.clone().requires_grad_()
    (ref.exp() @ (ref - exact.log_softmax(0))).backward()
    assert torch.allclose(logits.grad, exact.grad, atol=1e-6)


def test_advantages_are_standardised_within_each_group_with_bessels_correction():
    advantages = group_advantages([1, 0, 0, 0.5, 0])
    assert advantages == pytest.approx([1.5652, -0.6708, -0.6708, 0.4472, -0.6708], abs=1e-4)


def test_centred_advantages_are_the_distances_from_the_mean():
    rewards = [1, 0, 0, 0.5, None]
    assert group_advantages(rewards, standardise=False) == pytest.approx([0.625, -0.375, -0.375, 0.125, None])
    assert group_advantages([0.3] * 5, standardise=False) == [0.0] * 5


def test_advantages_are_zero_for_equal_rewards_and_for_a_single_game():
    assert [group_advantages(group) for group in ([0.3] * 5, [1.0], [])] == [[0.0] * 5, [0.0], []]


COMPARED = [(4, 5), (3, 4), (6, 8), (9, 12)]  # (intact games, all games)
DROPPED = [(3, 5), (2, 4), (5, 8), (8, 12), (0, 4)]


@pytest.mark.parametrize(("intact", "count"), [*COMPARED, *DROPPED])
def test_a_group_compares_its_intact_games_and_is_dropped_if_more_than_a_quarter_broke(intact, count):
    rewards, broken = [float(number) for number in range(intact)], [None] * (count - intact)
    advantages = group_advantages(rewards) if (intact, count) in COMPARED else [None] * intact
    assert group_advantages([*rewards, *broken]) == [*advantages, *broken]


def test_the_games_of_a_rank_have_the_indices_of_their_questions_over_all_ranks():
    trajectories_PG = [[random_game(number) for number in range(3)] for _ in range(2)]
    rewards_PG = [[Reward(1, 0, 0.0), Reward(1, 0, 1.0), None]] * 2
    games_PG = compare_games(trajectories_PG, rewards_PG, numbers=[4, 1])
    assert [[game.index for game in group] for group in games_PG] == [[12, 13, 14], [3, 4, 5]]
    assert [game.advantage for game in games_PG[0]] == [None] * 3, "a third of the group broke"


def test_a_user_changes_the_advantages_of_the_games_that_eq_16_compares():
    """A broken game, and a group that lost too many games, are not shown to the user's function."""
    trajectories_PG = [[random_game(number) for number in range(4)] for _ in range(2)]
    rewards = [Reward(1, 0, 0.0), None, Reward(1, 0, 1.0), Reward(1, 0, 2.0)]
    rewards_PG = [rewards, [rewards[0], None, None, rewards[2]]]
    seen: list[list[ScoredGame]] = []

    def own(games):
        seen.append(list(games))
        return [[1.0, 2.0], [3.0, -3.0], [0.0, 0.0]]

    plain_PG = compare_games(trajectories_PG, rewards_PG, numbers=[0, 1])
    games_PG = compare_games(trajectories_PG, rewards_PG, numbers=[0, 1], own=own)
    assert seen == [[plain_PG[0][0], *plain_PG[0][2:]]]
    assert [game.advantage for game in games_PG[0]] == [1.5, None, 0.0, 0.0]
    assert [game.turn_advantages for game in games_PG[0]] == [[1.0, 2.0], (), [3.0, -3.0], [0.0, 0.0]]
    assert [game.has_advantage for game in games_PG[0]] == [True, False, True, False]
    assert games_PG[1] == plain_PG[1]
