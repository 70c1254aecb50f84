"""Games are divided among ranks and micro-batches by tokens."""

import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_r1.model.distributed import Ranks
from prompt_r1.model.packing import pack
from prompt_r1.training.batches import games_to_learn_from, make_batch, micro_batches_of, mini_batches_of
from prompt_r1.training.row_plans import divide
from prompt_r1.types import Completion, Question, Reward, ScoredGame, Trajectory
from tests.support import tiny
from tests.support.games import CPU, ONE_RANK, game_of_turns, random_game, random_scored_games, siblings
from tests.support.thread_ranks import on_each_rank

some_games = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=6).map(
    lambda shapes: [game for seed, count in shapes for game in siblings(seed, count)]
)


def game(question: int, opening: int, own: int) -> Trajectory:
    """A game with this opening, and so many further columns in a row."""
    game = Trajectory(Question("q", "d", "?", ("a",)))
    game.add_context([question] * opening)
    game.add_sampled(Completion([7] * (own + 1), [-1.0] * (own + 1), True))
    return game


def tokens_of(games: list[Trajectory], numbers: list[int]) -> int:
    """Columns of the packed row of a micro-batch."""
    groups: dict[tuple[int, ...], list[Trajectory]] = {}
    for number in numbers:
        one = games[number]
        groups.setdefault(tuple(one.tokens[: one.opening_length]), []).append(one)
    return len(pack(list(groups.values()), CPU).tokens) if numbers else 0


@settings(max_examples=60)
@given(some_games, st.integers(1, 6), st.integers(1, 200))
def test_each_game_is_assigned_once_and_no_micro_batch_exceeds_the_limit(games, ranks, limit):
    shares = divide(games, ranks=ranks, tokens_per_batch=limit)
    batches = [batch for share in shares for batch in share]
    assert sorted(number for batch in batches for number in batch) == list(range(len(games)))
    assert all(tokens_of(games, batch) <= limit or len(batch) == 1 for batch in batches)
    assert len(shares) == ranks and len({len(share) for share in shares}) == 1
    assert shares == divide(games, ranks=ranks, tokens_per_batch=limit)


@pytest.mark.parametrize(("ranks", "least"), [(2, 0.95), (16, 0.8)])
def test_ranks_wait_little_for_each_other_in_mini_batches_of_64_games(ranks, least):
    """Groups of five games of one to five turns, with the lengths of the benchmarks' workload "long". The
    share of useful columns on the critical path: the largest micro-batch of each time, over the ranks.
    """
    ideal = critical = 0.0
    for seed in range(3):
        rng = random.Random(seed)
        games = [
            game(question, 600, rng.randint(120, 320) + sum(rng.randint(320, 720) for _ in range(turns)))
            for question in range(13)
            for turns in rng.choices(range(5), k=5)
        ][:64]
        shares = divide(games, ranks=ranks, tokens_per_batch=16_384)
        ideal += tokens_of(games, list(range(64))) / ranks
        critical += sum(
            max(tokens_of(games, batch) for batch in batches) for batches in zip(*shares, strict=True)
        )
    assert ideal / critical >= least


def test_games_that_end_with_their_opening_are_spread_over_the_ranks():
    """A bug: games longer than a micro-batch that add no column were put together again and again."""
    games = [game(0, 10, 0) for _ in range(4)]
    assert sorted(divide(games, ranks=2, tokens_per_batch=5)) == [[[0], [2]], [[1], [3]]]


def test_one_rank_keeps_groups_whole_and_several_ranks_split_what_they_would_wait_for():
    groups = [game(question, 10, 5) for question in (0, 0, 1, 1)]
    assert divide(groups, ranks=1, tokens_per_batch=40) == [[[0, 1, 2, 3]]]
    assert divide(groups, ranks=1, tokens_per_batch=39) == [[[0, 1], [2, 3]]]
    one_group = [game(0, 10, 50), game(0, 10, 50)]
    assert divide(one_group, ranks=2, tokens_per_batch=1000) == [[[0]], [[1]]]
    assert divide(one_group[:1], ranks=3, tokens_per_batch=80) == [[[0]], [[]], [[]]]


def random_play(ranks: int, mini_batches: int, *, seed: int) -> list[list[list[ScoredGame]]]:
    """Groups of five games by the rank that played them; some ranks played none, some games broke."""
    rng = random.Random(seed)
    played: list[list[list[ScoredGame]]] = [[] for _ in range(ranks)]
    for question in range(2 * mini_batches):
        group = []
        for number, trajectory in enumerate(siblings(100 * seed + question, 5)):
            trajectory.turns = game_of_turns("text").turns
            advantage = rng.choice([None, rng.gauss(0, 1)])
            group.append(ScoredGame(trajectory, Reward(1, 0, 0), advantage, index=5 * question + number))
        played[rng.randrange(ranks)].append(group)
    return played


def mini_batches_of_10(games_PG: list[list[ScoredGame]], ranks: Ranks) -> list[list[ScoredGame]]:
    """The games that enter the loss, by optimiser steps of ten games."""
    used_PG = games_to_learn_from(games_PG, ranks, mask_truncated=False, skip_no_spread=False)
    return mini_batches_of(used_PG, ranks, mini_batch=10)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_mini_batches_do_not_depend_on_which_rank_played_a_game(ranks, seed):
    """They hold each game that is trained on, without the text of its turns."""
    played = random_play(ranks, 3, seed=seed)
    everything = [group for groups in played for group in groups]
    expected = mini_batches_of_10(everything, ONE_RANK)
    for got in on_each_rank(ranks, lambda rank: mini_batches_of_10(played[rank.rank], rank)):
        assert got == expected
    trained_on = [game for group in everything for game in group if game.advantage is not None]
    for step, games in enumerate(expected):
        wanted = [
            replace(one, trajectory=replace(one.trajectory, turns=[]))
            for one in trained_on
            if one.index // 10 == step
        ]
        assert games == sorted(wanted, key=lambda one: one.index)


def test_an_optimiser_step_of_whole_groups_does_not_split_them():
    games = random_scored_games(20)
    groups = [games[start : start + 5] for start in range(0, 20, 5)]
    by_game = mini_batches_of(groups, ONE_RANK, mini_batch=8)
    assert [len(games) for games in by_game] == [8, 8, 4]
    whole_groups = mini_batches_of(groups, ONE_RANK, mini_batch=10)
    assert [[game.index for game in games] for games in whole_groups] == [[*range(10)], [*range(10, 20)]]


def test_games_are_sent_to_other_ranks_without_the_columns_that_only_rewards_read():
    """A function of the user gave its questions a database, which cannot be pickled, and the run ended."""
    [scored] = random_scored_games(1)
    question = replace(scored.trajectory.question, extra={"database": (row for row in "abc")})
    scored = replace(scored, trajectory=replace(scored.trajectory, question=question))
    [[sent]] = mini_batches_of([[scored]], ONE_RANK, mini_batch=64)
    assert pickle.loads(pickle.dumps(sent)).trajectory.tokens == scored.trajectory.tokens
    assert scored.trajectory.question.extra, "a reward can still read them"


def test_advantages_and_logprobs_stay_with_their_tokens_where_games_of_two_questions_alternate():
    played = [random_game(seed) for seed in (0, 3, 1, 4)]  # 0 and 1 share an opening, 3 and 4 another
    games = [ScoredGame(game, Reward(0, 0, 0), float(number), number) for number, game in enumerate(played)]
    batch = make_batch(games, lambda game: float(sum(game.sampled)), CPU)
    rows = zip(batch.packed.targets, batch.engine, batch.advantages, batch.weights, strict=True)
    assert Counter((int(token), *map(float, row)) for token, *row in rows) == Counter(
        (token, logprob, float(number), float(sum(game.sampled)))
        for number, game in enumerate(played)
        for token, logprob, sampled in zip(
            game.tokens, torch.tensor(game.logprobs).tolist(), game.sampled, strict=True
        )
        if sampled
    )
    games_of_advantages = {
        (int(game), float(advantage)) for game, advantage in zip(batch.game, batch.advantages, strict=True)
    }
    assert sorted(games_of_advantages) == [(0, 0.0), (1, 2.0), (2, 1.0), (3, 3.0)], "in the order of the row"


def test_nothing_is_scored_in_an_empty_batch_and_its_gradients_are_zero():
    """The pass of a rank that has no game, while the others have one."""
    policy, batch = tiny.policy(), make_batch([], lambda game: 1.0, CPU)
    logprobs = policy(batch.packed).logprobs
    tensors = (logprobs, batch.engine, batch.advantages, batch.weights, batch.game)
    assert [tensor.shape for tensor in tensors] == [(0,)] * 5
    logprobs.sum().backward()
    gradients = [weight.grad for weight in policy.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_a_token_has_the_advantage_of_its_turn():
    """Where a user's function gives advantages of turns; beside a game that has one advantage."""
    games = random_scored_games(3)
    games[1] = replace(games[1], turn_advantages=(0.25, -4.0))
    batch = make_batch(games, lambda game: 1.0, CPU)
    found = dict(zip(batch.engine.tolist(), batch.advantages.tolist(), strict=True))
    for one in games:
        trajectory = one.trajectory
        end_of_first_turn = trajectory.sampled.index(False, trajectory.opening_length)
        for position, sampled in enumerate(trajectory.sampled):
            if sampled:
                of_turn = one.turn_advantages or (one.advantage, one.advantage)
                expected = of_turn[0] if position < end_of_first_turn else of_turn[1]
                logprob = torch.tensor(trajectory.logprobs[position]).item()
                assert found[logprob] == torch.tensor(expected).item()


def group_of(advantages: list[float | None], *, stops: str = "", start: int = 0) -> list[ScoredGame]:
    """A group with these advantages; a game whose letter in `stops` is "m" was cut off by a limit."""
    games = []
    for number, advantage in enumerate(advantages):
        stop = "max_tokens" if stops[number : number + 1] == "m" else "answered"
        trajectory = random_game(start + number, stop=stop)
        games.append(ScoredGame(trajectory, Reward(1, 0, 0), advantage, index=start + number))
    return games


def learned(games_PG: list[list[ScoredGame]], ranks=ONE_RANK, **settings: bool) -> list[int]:
    """The indices of the games that enter the loss."""
    chosen = {"mask_truncated": False, "skip_no_spread": False} | settings
    return [one.index for group in games_to_learn_from(games_PG, ranks, **chosen) for one in group]


def test_games_that_a_limit_cut_off_leave_the_loss_and_keep_their_group():
    """A turn that is malformed without being cut off stays: the reward of the format is about such turns."""
    games_PG = [group_of([1.0, -1.0, None, 0.5], stops="amaa"), group_of([0.0, 0.0], stops="am", start=4)]
    games_PG[0][3].trajectory.stop = "malformed"
    assert learned(games_PG) == [0, 1, 3, 4, 5]
    assert learned(games_PG, mask_truncated=True) == [0, 3, 4]
    assert learned(games_PG, mask_truncated=True, skip_no_spread=True) == [0, 3]


def test_groups_without_spread_leave_the_update_unless_no_rank_has_another_group():
    even, odd = group_of([0.0, 0.0, None]), group_of([0.0, 1.0, -1.0], start=3)
    even_on_average = [replace(one, turn_advantages=(1.0, -1.0)) for one in even]
    assert learned([even, odd], skip_no_spread=True) == [3, 4, 5]
    assert learned([even], skip_no_spread=True) == [0, 1]
    assert learned([even_on_average, odd], skip_no_spread=True) == [0, 1, 3, 4, 5]
    for other, expected in ((odd, [[], [3, 4, 5]]), (even, [[0, 1], [0, 1]])):
        played = [[even], [other]]
        assert expected == on_each_rank(
            2, lambda rank, played=played: learned(played[rank.rank], rank, skip_no_spread=True)
        )


@pytest.mark.parametrize("token_mean", [False, True])
def test_the_means_of_the_loss_are_over_the_games_that_are_learned_from(token_mean):
    """The policy gradient is the one with all groups, times all games (or tokens) by the games that stay."""
    games_PG = [group_of([0.0, 0.0]), group_of([0.5, -0.5], start=3), group_of([0.0, 0.0], start=6)]
    gradients, sizes = [], []
    for skip in (False, True):
        policy = tiny.policy()
        kept_PG = games_to_learn_from(games_PG, ONE_RANK, mask_truncated=False, skip_no_spread=skip)
        [games] = mini_batches_of(kept_PG, ONE_RANK, mini_batch=100)
        for batch in micro_batches_of(games, ONE_RANK, tokens_per_batch=50, token_mean=token_mean):
            (batch.weights * batch.advantages * policy(batch.packed).logprobs).sum().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in policy.parameters()]))
        sizes.append(sum(sum(one.trajectory.sampled) for one in games) if token_mean else len(games))
    assert sizes[0] > sizes[1]
    expected = gradients[0] * sizes[0] / sizes[1]
    assert (gradients[1] - expected).norm() < 1e-5 * expected.norm()
