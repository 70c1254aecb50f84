"""Advantages of turns: their expectation is the exact policy gradient, in a game that can be enumerated."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from prompt_r1.grpo import group_advantages, grpo_loss
from prompt_r1.options.advantages import compare_games
from prompt_r1.options.turn_advantages import turn_advantages, turn_starts
from prompt_r1.protocol import parse
from prompt_r1.reward import RULES, score
from prompt_r1.training.micro_batches import token_advantages
from prompt_r1.types import Completion, Reward, ScoredGame, Trajectory, Turn
from tests.games import ANNA, GOOD, HALF, ONE_RANK, RIGHT, WRONG, random_scored_games
from tests.tiny import think

# The agent's turns, each two tokens: its number, which the policy chooses, and an end that is certain.
TURNS = [GOOD, think("", prompt="who?"), RIGHT, HALF, WRONG]
ASKING = (0, 1)  # the second one without a thought, so that its M_t is 0
REPLIES = {20: 0.7, 21: 0.3}  # token → probability
END = 30
MAX_TURNS = 3
GROUP_SIZE = 3


@dataclass(frozen=True)
class Outcome:
    """A game that can happen: its record, the probability of its replies, and the agent's choices."""

    trajectory: Trajectory
    replies: float
    choices: tuple[tuple[tuple[int, ...], int], ...]  # the tokens before each turn, and its number


def outcomes(
    trajectory: Trajectory, replies: float = 1.0, choices: tuple[tuple[tuple[int, ...], int], ...] = ()
) -> Iterator[Outcome]:
    """All games that go on from here. In the last turn only an answer is of any use."""
    last = len(trajectory.turns) == MAX_TURNS - 1
    # Few choices after the first turn, so that all groups of games can be enumerated.
    for number in range(len(TURNS)) if not trajectory.turns else (2, 4) if last else (0, 3):
        state = (*choices, (tuple(trajectory.tokens), number))
        asks = number in ASKING and not last
        for reply, probability in REPLIES.items() if asks else [(0, 1.0)]:
            turn = Turn(TURNS[number], parse(TURNS[number]), "reply" if asks else None)
            game = replace(
                trajectory,
                tokens=list(trajectory.tokens),
                sampled=list(trajectory.sampled),
                logprobs=list(trajectory.logprobs),
                turns=[*trajectory.turns, turn],
            )
            game.add_sampled(Completion([number, END], [0.0, 0.0], True))
            if not asks:
                yield Outcome(game, replies, state)
                continue
            game.add_context([reply])
            yield from outcomes(game, replies * probability, state)


def all_outcomes() -> list[Outcome]:
    opening = Trajectory(ANNA, stop="answered")
    opening.add_context([10])
    return list(outcomes(opening))


class Policy:
    """A table of logits for each state, in float64."""

    def __init__(self, games: list[Outcome]) -> None:
        self.pairs = sorted({choice for game in games for choice in game.choices})
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(len(self.pairs), generator=generator, dtype=torch.float64).requires_grad_()
        states = sorted({state for state, _ in self.pairs})
        rows = torch.tensor([states.index(state) for state, _ in self.pairs])
        total = torch.zeros(len(states), dtype=torch.float64).index_add(0, rows, self.logits.exp())
        self.logprobs = self.logits - total.log()[rows]  # of each pair of a state and a choice

    def indices(self, game: Outcome) -> list[int]:
        """The place of each of the game's choices in the table."""
        return [self.pairs.index(choice) for choice in game.choices]

    def gradient(self, value: Tensor) -> Tensor:
        [gradient] = torch.autograd.grad(value, self.logits, retain_graph=True)
        return gradient


Compare = Callable[[list[ScoredGame]], list[ScoredGame]]


def expected_gradient(
    games: list[Outcome], rewards: list[Reward], policy: Policy, compare: Compare
) -> Tensor:
    """The expectation of the gradient of the loss over all groups, with its sign turned.

    Every token of a game weighs 1 / G: the weights do not depend on what is sampled.
    """
    places = [policy.indices(game) for game in games]
    # As constants: the loss differentiates only the log-probabilities of the sampled tokens.
    probability = [
        game.replies * math.exp(policy.logprobs[index].sum().item())
        for game, index in zip(games, places, strict=True)
    ]
    tokens, advantages, weights = [], [], []
    for group in itertools.combinations_with_replacement(range(len(games)), GROUP_SIZE):
        orders = math.factorial(GROUP_SIZE) / math.prod(map(math.factorial, Counter(group).values()))
        chance = orders * math.prod(probability[number] for number in group)
        scored = compare([ScoredGame(games[number].trajectory, rewards[number], 0.0) for number in group])
        for number, game in zip(group, scored, strict=True):
            for index in places[number]:
                tokens += [index, -1]  # the last entry of the table is the end of a turn
            advantages += token_advantages(game)
            weights += [chance / GROUP_SIZE] * 2 * len(places[number])
    table = torch.cat([policy.logprobs, torch.zeros(1, dtype=torch.float64)])
    logprobs = table[torch.tensor(tokens)]
    old = logprobs.detach()
    columns = [torch.tensor(column, dtype=torch.float64) for column in (advantages, weights)]
    return -policy.gradient(grpo_loss(logprobs, old, old, *columns, clip=0.2, kl_coef=0.0).total)


def by_eq_16(group: list[ScoredGame]) -> list[ScoredGame]:
    [advantages] = group_advantages([[game.reward.total for game in group if game.reward]])
    return [replace(game, advantage=value) for game, value in zip(group, advantages, strict=True)]


def without_std(group: list[ScoredGame]) -> list[ScoredGame]:
    [compared] = compare_games(
        [[game.trajectory for game in group]],
        [[game.reward for game in group]],
        advantages="no-std",
        rule=RULES["paper"],
        sum_over_ranks=ONE_RANK.sum,
    )
    return compared


@pytest.mark.parametrize("rule", ["paper", pytest.param("release", marks=pytest.mark.slow)])
def test_the_expectation_of_turn_advantages_is_the_exact_policy_gradient(rule):
    """Of E[R], summed over all games that can happen; the estimate is averaged over all groups. Beside it
    the group mean, which includes the own reward, gives (G - 1) / G of it, and eq. 16 another direction.
    """
    games = all_outcomes()
    assert len(games) > 15 and {len(game.trajectory.turns) for game in games} == {1, 2, 3}
    policy = Policy(games)
    rewards = [score(game.trajectory, rule=RULES[rule]) for game in games]
    probabilities = torch.stack(
        [game.replies * policy.logprobs[policy.indices(game)].sum().exp() for game in games]
    )
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-12)
    value = (probabilities * torch.tensor([reward.total for reward in rewards], dtype=torch.float64)).sum()
    exact = policy.gradient(value)
    assert exact.norm() > 0.01

    by_turn = expected_gradient(
        games, rewards, policy, lambda group: turn_advantages([group], RULES[rule])[0]
    )
    assert (by_turn - exact).abs().max() < 1e-12
    centred = expected_gradient(games, rewards, policy, without_std)
    assert (centred - exact * (GROUP_SIZE - 1) / GROUP_SIZE).abs().max() < 1e-12
    standardised = expected_gradient(games, rewards, policy, by_eq_16)
    assert torch.cosine_similarity(standardised, exact, dim=0) < 0.999


def a_game(*numbers: int, replies: tuple[int, ...] = ()) -> ScoredGame:
    """A game with these turns and replies, scored by the released rule."""
    for game in all_outcomes():
        choices = [number for _, number in game.choices]
        context = [
            t for t, own in zip(game.trajectory.tokens, game.trajectory.sampled, strict=True) if not own
        ]
        if choices == list(numbers) and context == [10, *replies]:
            return ScoredGame(game.trajectory, score(game.trajectory, rule=RULES["release"]), 0.0)
    raise AssertionError(f"no such game: {numbers}, {replies}")


def test_a_turn_is_compared_with_siblings_in_the_same_state_without_what_was_earned_before():
    """By hand, release: a good prompt earns 0.4, so E_2 is -0.6 after it, and -1 after a thoughtless one."""
    half = a_game(0, 3, replies=(20,))  # R = 2/3
    right = a_game(0, 0, 2, replies=(20, 20))  # R = 1
    other = a_game(1, 3, replies=(20,))  # R = -1 + 0.6
    [credited] = turn_advantages([[half, right, other]], RULES["release"])
    assert [game.reward.total for game in credited if game.reward] == pytest.approx([2 / 3, 1, -0.4])
    first, second, third = (game.turn_advantages for game in credited)
    assert first == pytest.approx([2 / 3 - 0.3, 2 / 3 - 1])  # the second turn against that of `right` alone
    # The third turn has no sibling in its state: against the last turns of the others.
    assert second == pytest.approx([1 - (2 / 3 - 0.4) / 2, 1 / 3, 1.6 - (2 / 3 + 0.6 + 0.6) / 2])
    assert third == pytest.approx([-0.4 - 5 / 6, 0.6 - (2 / 3 + 0.6 + 1.6) / 2])
    assert [game.advantage for game in credited] == [row[0] for row in (first, second, third)]


def test_games_that_left_get_no_credit_and_are_nobodys_baseline():
    games = [a_game(0, 3, replies=(20,)), a_game(2), a_game(4)]
    left = replace(a_game(3), reward=None, advantage=None)
    [with_left] = turn_advantages([[games[0], left, *games[1:]]], RULES["release"])
    [without] = turn_advantages([games], RULES["release"])
    assert with_left[1] is left and [with_left[0], *with_left[2:]] == without


def test_a_reward_of_ones_own_is_not_asked_about_games_that_are_cut_short():
    rule = replace(RULES["release"], own=lambda trajectory, reward: float("nan"))
    [credited] = turn_advantages([[a_game(0, 3, replies=(20,)), a_game(2)]], rule)
    assert all(math.isfinite(value) for game in credited for value in game.turn_advantages)


def test_each_token_has_the_advantage_of_its_turn():
    game = random_scored_games(1)[0]
    count = sum(game.trajectory.sampled)
    assert token_advantages(game) == [game.advantage] * count
    starts = turn_starts(game.trajectory)
    assert len(starts) == 2 and starts[0] == game.trajectory.opening
    second = sum(game.trajectory.sampled[starts[1] :])
    by_turn = replace(game, turn_advantages=(0.5, -1.5))
    assert token_advantages(by_turn) == [0.5] * (count - second) + [-1.5] * second
