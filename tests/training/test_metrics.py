"""The metrics of a game, of a training step and of its spending, against numbers computed by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from prompt_r1.errors import EnvError
from prompt_r1.model.distributed import Ranks
from prompt_r1.reward import RULES, OwnReward
from prompt_r1.spending import Spending
from prompt_r1.training.metrics import (
    GameMetrics,
    Score,
    add_spending,
    game_metrics,
    metrics_of_game,
    step_metrics,
)
from prompt_r1.types import Question, Reward, ScoredGame, Trajectory
from tests.support.games import GOOD, HALF, ONE_RANK, RIGHT, WRONG, game_of_turns, score_and_compare
from tests.support.played import play_script
from tests.support.thread_ranks import on_each_rank
from tests.support.tiny import think

RULE = RULES["release"]
QUESTION = Question("q7", "bridge", "Who made it?", ("Anna Keller",))


def scored(*games: Trajectory) -> list[ScoredGame]:
    """Games of one question with rewards."""
    [group] = score_and_compare([list(games)], RULE)
    return group


def metrics_of(game: Trajectory) -> GameMetrics:
    """Score a game and return its metrics."""
    return metrics_of_game(scored(game)[0])


def test_the_metrics_of_a_game_count_its_turns_calls_and_tokens():
    game = play_script(
        QUESTION,
        [think("a", prompt="Who?"), think("b", prompt="Who else?"), think("c", answer="Keller")],
        ["Bob.", "Anna."],
    )
    game.spent = Spending(calls=2, usd=0.25)
    [found] = scored(game)
    metrics = metrics_of_game(found)
    assert (metrics.score.em, metrics.score.f1, metrics.score.is_well_formed) == (0.0, 2 / 3, True)
    assert (metrics.score.turns, metrics.calls) == (3, 2)
    assert metrics.sampled_tokens == sum(game.sampled) and metrics.tokens == len(game.tokens)
    assert 0 < metrics.sampled_tokens < metrics.tokens and metrics.usd == 0.25
    assert metrics.score.reward == found.reward and metrics.stop == "answered"
    step = game_metrics([[metrics]])
    parts = [step[f"reward/{name}"] for name in ("mean", "format", "answer")]
    assert parts == [found.reward.total, found.reward.format, found.reward.answer]
    assert step["env/errors"] == 0 and step["game/usd"] == 0.25
    stops = {name: value for name, value in step.items() if name.startswith("stop/")}
    assert stops.pop("stop/answered") == 1.0 and len(stops) == 4 and not any(stops.values())


def test_a_game_that_the_environment_broke_has_its_failed_call_but_no_score():
    texts = [think("a", prompt="Who?"), think("b", prompt="Who?")]
    game = play_script(QUESTION, texts, ["Bob.", EnvError("HTTP 500")])
    game.spent = Spending(calls=2)
    broken = metrics_of(game)
    assert (broken.stop, broken.calls) == ("env_error", 2)
    assert broken.score is None and broken.sampled_tokens > 0


def test_the_metrics_of_games_count_broken_games_but_leave_them_out_of_the_means():
    broken = metrics_of(game_of_turns(GOOD, stop="env_error"))
    metrics = game_metrics(
        [[metrics_of(game_of_turns(GOOD, RIGHT)), metrics_of(game_of_turns(WRONG)), broken]]
    )
    assert metrics["reward/mean"] == pytest.approx(0.3) and metrics["em"] == 0.5
    assert metrics["stop/env_error"] == pytest.approx(1 / 3) and metrics["env/errors"] == 1
    assert game_metrics([[broken]])["reward/mean"] == 0.0


def test_groups_that_lost_games_have_a_mean_reward_of_their_own():
    games_PG = [[with_reward(None), with_reward(-1.0)], [with_reward(0.5), with_reward(1.0)]]
    metrics = game_metrics(games_PG)
    assert (metrics["reward/broken_groups"], metrics["reward/whole_groups"]) == (-1.0, 0.75)
    assert "reward/broken_groups" not in game_metrics(games_PG[1:])


def with_reward(total: float | None) -> GameMetrics:
    """The metrics of a game with this reward; all else is 0. None: the environment broke it."""
    score = None if total is None else Score(Reward(0.0, 0.0, total), 0.0, 0.0, is_well_formed=False, turns=0)
    stop = "env_error" if total is None else "answered"
    return GameMetrics(
        stop,
        tokens=0,
        sampled_tokens=0,
        calls=0,
        latencies=[],
        usd=0.0,
        score=score,
        is_compared=False,
        has_advantage=False,
    )


def test_the_metrics_of_a_step_are_means_and_sums_over_its_games():
    games = scored(game_of_turns(GOOD, RIGHT), game_of_turns(WRONG))
    games += scored(game_of_turns(GOOD, GOOD, WRONG))
    measured = [
        replace(metrics_of_game(game), latencies=[latency])
        for game, latency in zip(games, (1.0, 5.0, 2.0), strict=True)
    ]
    metrics = game_metrics([measured[:2], measured[2:]])
    scores = [game.score for game in measured]
    for name in ("em", "f1", "turns"):
        assert metrics[name] == pytest.approx(sum(getattr(score, name) for score in scores) / 3), name
    for name, part in (("mean", "total"), ("format", "format"), ("answer", "answer")):
        mean = sum(getattr(score.reward, part) for score in scores) / 3
        assert metrics[f"reward/{name}"] == pytest.approx(mean), name
    assert metrics["format"] == pytest.approx(sum(score.is_well_formed for score in scores) / 3)
    assert [score.em for score in scores] == [1.0, 0.0, 0.0]
    assert metrics["games"] == 3.0 and metrics["turns"] == 2.0
    assert metrics["tokens/game"] == sum(game.tokens for game in measured) / 3
    assert metrics["tokens/sampled"] == sum(game.sampled_tokens for game in measured)
    assert (metrics["env/calls"], metrics["env/errors"], metrics["env/latency"]) == (3.0, 0.0, 2.0)
    stops = {name: value for name, value in metrics.items() if name.startswith("stop/")}
    assert sum(stops.values()) == 1.0 and len(stops) == 5 and stops["stop/answered"] == 1.0


def test_the_latency_of_a_step_is_the_median_over_its_replies():
    game = game_of_turns(GOOD, GOOD, GOOD, RIGHT)
    turns = [replace(turn, latency=n) for turn, n in zip(game.turns, (0.5, 9.0, 1.5, 0.0), strict=True)]
    metrics = step_metrics([scored(replace(game, turns=turns))], ONE_RANK, rollout_seconds=1.0)
    assert metrics["env/latency"] == 1.5, "the last turn has no reply"
    alone = step_metrics([scored(game_of_turns(RIGHT))], ONE_RANK, rollout_seconds=1.0)
    assert alone["env/latency"] == 0.0


def test_the_intervals_of_a_step_count_questions_not_games():
    """Five equal games of a question are one observation: repeating each game leaves the bounds unchanged."""
    endings = [RIGHT, RIGHT, WRONG, RIGHT, WRONG, RIGHT, RIGHT, WRONG]
    measured = [metrics_of(game_of_turns(GOOD, ending)) for ending in endings]
    once = game_metrics([[one] for one in measured])
    five_times = game_metrics([[one] * 5 for one in measured])
    half = 1.96 * (5 / 8 * 3 / 8 / 7) ** 0.5  # the standard error of 5 right answers out of 8
    assert (once["em_low"], once["em_high"]) == pytest.approx((5 / 8 - half, 5 / 8 + half))
    bounds = [name for name in once if name.endswith(("low", "high"))]
    assert all(five_times[name] == pytest.approx(once[name]) for name in bounds)
    assert "em_low" in once and "reward/mean_high" in once and "format_low" in once


def test_a_question_counts_as_within_reach_when_one_of_its_games_is_right():
    right, wrong = metrics_of(game_of_turns(GOOD, RIGHT)), metrics_of(game_of_turns(GOOD, WRONG))
    metrics = game_metrics([[right, wrong, wrong], [wrong, wrong, wrong], [right, right, right]])
    assert metrics["em/any"] == pytest.approx(2 / 3) and metrics["em"] == pytest.approx(4 / 9)


def test_dropped_groups_are_a_share_of_all_groups_and_no_spread_of_the_kept_ones():
    """One of three groups is broken; one of the other two has equal rewards."""
    right, wrong = game_of_turns(GOOD, RIGHT), game_of_turns(WRONG)
    broken = game_of_turns(GOOD, stop="env_error")
    right.spent = Spending(calls=1, usd=0.25)
    games_PG = score_and_compare([[broken, broken], [right, right], [right, wrong]], RULE)
    metrics = step_metrics(games_PG, ONE_RANK, rollout_seconds=2.0)
    assert metrics["groups/dropped"] == pytest.approx(1 / 3) and metrics["groups/no_spread"] == 1 / 2
    assert metrics["games/s"] == 3.0
    assert metrics["groups/no_spread_calls"] == 2 and metrics["groups/no_spread_usd"] == 0.5
    only_broken = step_metrics(games_PG[:1], ONE_RANK, rollout_seconds=2.0)
    assert only_broken["groups/dropped"] == 1 and only_broken["groups/no_spread"] == 0


def pays_for_turns(trajectory: Trajectory, reward: Reward) -> float:
    """A leak: the reward of the user's depends on the turns alone."""
    return len(trajectory.turns) / 10


def test_a_pair_is_misranked_when_the_better_answer_gets_no_higher_reward():
    """Of games with an open gate. Here the longer games have the worse answers."""
    right, half = game_of_turns(GOOD, RIGHT), game_of_turns(GOOD, HALF)
    wrong = game_of_turns(GOOD, GOOD, WRONG)
    malformed = game_of_turns(RIGHT)  # no interaction: the gate is shut
    group = [right, half, wrong, malformed]

    def misranked(own: OwnReward | None) -> float:
        games_PG = score_and_compare([group, [right, right]], RULE, own)
        return step_metrics(games_PG, ONE_RANK, rollout_seconds=1.0)["reward/misranked"]

    assert misranked(None) == 0.0
    # right against half (equal rewards), right against wrong, half against wrong
    assert misranked(pays_for_turns) == 1.0
    assert misranked(lambda game, reward: reward.total + len(game.turns)) == 2 / 3


def test_two_ranks_with_different_shares_have_the_metrics_of_one_process():
    """A mean of the means of the ranks would weigh the games of the smaller share more."""
    right, half, wrong = game_of_turns(GOOD, RIGHT), game_of_turns(GOOD, HALF), game_of_turns(WRONG)
    broken = game_of_turns(GOOD, stop="env_error")
    right.spent = Spending(calls=1, usd=0.25)
    half.turns[0] = replace(half.turns[0], latency=3.0)
    games = [[right, half], [right, wrong], [right, right], [broken, broken], [wrong, wrong]]
    games_PG = score_and_compare(games, RULE, pays_for_turns)
    one = step_metrics(games_PG, ONE_RANK, rollout_seconds=2.0)
    assert all(one[name] > 0 for name in one if name.startswith(("groups/", "reward/mis")))
    shares = games_PG[:2], games_PG[2:]
    two = on_each_rank(2, lambda ranks: step_metrics(shares[ranks.rank], ranks, rollout_seconds=2.0))
    assert two == [pytest.approx(one)] * 2


@pytest.mark.parametrize("count", [1, 2])
def test_the_spending_of_a_step_adds_what_earlier_parts_of_the_run_were_charged(count):
    """Once, not once for each rank: every rank reads the journals of all."""
    before = Spending(usd=2.0, lost_usd=0.5)
    budget = SimpleNamespace(charged_before=before, charged=Spending(calls=3, usd=2.75, lost_usd=0.75))
    pool = SimpleNamespace(budget=budget, take_metrics=lambda: {"env/paid": 3.0, "env/reused": 1.0})
    expected = {
        "env/usd": 2.0 + count * 0.75,
        "env/lost_usd": 0.5 + count * 0.25,
        "env/paid": 1.0 + count * 3.0,
        "env/reused": count * 1.0,
    }

    def added(ranks: Ranks) -> dict[str, float]:
        metrics = {"env/usd": 2.5, "env/paid": 1.0}
        add_spending(metrics, pool, ranks)
        return metrics

    assert on_each_rank(count, added) == [expected] * count
