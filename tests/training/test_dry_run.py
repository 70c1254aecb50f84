"""The estimate of --dry-run, against numbers computed by hand and against what a fake endpoint counts."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prompt_r1.data.questions
import train
from prompt_r1.environments.budget import Price
from prompt_r1.miniworld.questions import mini_questions
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.settings.train import PRESETS, TrainConfig
from prompt_r1.spending import Spending
from prompt_r1.training.dry_run import cases_of, estimate, shown_estimate
from prompt_r1.training.preflight import ChosenTraining
from prompt_r1.types import GameSettings

SPLITS = {"val_data": ("mini",), "test_data": ("mini",)}


questions_of_the_mini_world = cache(mini_questions)


@pytest.fixture(autouse=True)
def questions_made_once(monkeypatch) -> None:
    """Making the questions of the mini world takes longer than the estimate."""
    monkeypatch.setattr(prompt_r1.data.questions, "mini_questions", questions_of_the_mini_world)


def test_a_run_validates_before_the_first_step_every_few_steps_and_after_the_last():
    config = TrainConfig(**PRESETS["mini"], **SPLITS)
    for steps, save_every, count in (
        (1, 20, 2),
        (19, 20, 2),
        (20, 20, 2),
        (21, 20, 3),
        (40, 20, 3),
        (320, 30, 12),
    ):
        text = estimate(TrainConfig(**{**vars(config), "steps": steps, "save_every": save_every}))
        assert f"validation, {100 * count:,} games" in text
        assert f"training, {steps * 16 * 5:,} games" in text
        assert "test, 640 games" in text and "test, 320 calls" in text


def test_each_call_sends_the_whole_dialogue_before_it_again():
    """Four calls with prompts of 512 and replies of 1,024 tokens. The system message has 10 tokens."""
    _, case = cases_of(GameSettings(max_turns=5, max_new=512), 80, {"max_tokens": 1024}, [Price(1, 10)])
    sent = sum(10 + (number + 1) * 512 + number * 1024 for number in range(4))
    spent = case.game("x" * 30)
    assert (spent.calls, spent.tokens_in, spent.tokens_out) == (4, sent, 4 * 1024)
    assert abs(spent.usd - (sent + 4 * 1024 * 10) / 1e6) < 1e-12


def test_a_reply_is_as_long_as_max_tokens_allows():
    game = GameSettings(max_turns=5)
    for fields, longest in (({}, 1024), ({"max_tokens": 64}, 64), ({"max_completion_tokens": 4000}, 4000)):
        likely, high = cases_of(game, 80, fields, [Price()])
        assert [likely.calls, high.calls] == [2, 4]
        assert [likely.reply, high.reply] == [min(250, longest), longest]
        assert [likely.prompt, high.prompt] == [20, 1024]


@given(
    max_new=st.integers(1, 200),
    max_turns=st.integers(1, 6),
    question=st.integers(0, 500),
    limit=st.integers(1, 2000),
    prices=st.lists(st.builds(Price, st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=1),
)
def test_the_estimates_are_in_order(max_new, max_turns, question, limit, prices):
    """With turns of 48 tokens the lower estimate had prompts of 60, and the high one prompts of 24."""
    cases = cases_of(GameSettings(max_turns, max_new), question, {"max_tokens": limit}, prices)
    likely, high = (case.game("Be helpful.") for case in cases)
    for name in ("calls", "tokens_in", "tokens_out", "usd"):
        assert getattr(likely, name) <= getattr(high, name), name


def test_of_several_prices_the_mean_is_likely_and_the_highest_is_high():
    """A bug: with prices 0,10 and 5,1 the high estimate took the second, although long replies cost more."""
    prices = [Price(1, 2), Price(0, 10), Price(5, 6)]
    likely, high = cases_of(GameSettings(), 80, {}, prices)
    assert (likely.price, high.price) == (Price(2, 6), Price(5, 10))


def test_the_table_adds_up_its_parts():
    parts = {
        "training": {"likely": Spending(1, 100, 60, 0.5), "high": Spending(5000, 30_000_000, 1000, 1250.0)},
        "test": {"likely": Spending(2, 5, 5, 0.25), "high": Spending(30, 0, 9000, 7.5)},
        "empty": {"likely": Spending(), "high": Spending()},
    }
    lines = [line.split() for line in shown_estimate(parts, priced=True, limited=True).splitlines()]
    assert ["likely", "3", "105", "65", "0.75"] in lines
    assert ["high", "5,030", "30,000,000", "10,000", "1,257.50"] in lines
    assert ["empty"] not in lines
    unpriced = shown_estimate(parts, priced=False, limited=True)
    assert all(line.endswith("–") for line in unpriced.splitlines() if "  likely" in line)


def test_an_estimate_says_in_how_many_groups_a_question_is_played(tmp_path):
    """200 questions are played in 227 groups each, which the estimate did not say."""
    rows = [f'{{"question": "Question {number}?", "answer": "Anna"}}\n' for number in range(200)]
    (tmp_path / "own.jsonl").write_text("".join(rows))
    config = TrainConfig(data=(str(tmp_path / "own.jsonl"),), val_data=("held-out",), agent="unknown/name")
    text = estimate(config)
    assert "320 steps of 128 draw each of the 180 questions 227.6 times" in text


def test_an_estimate_says_whether_its_high_end_is_a_bound_and_what_it_needs_for_dollars():
    config = vars(TrainConfig(**PRESETS["mini"], **SPLITS))
    text = estimate(TrainConfig(**config))
    assert "no upper bound" in text and "--env-price IN,OUT" in text
    bounded = {"env_args": '{"max_tokens": 64}', "env_price": ("1,2",)}
    text = estimate(TrainConfig(**config | bounded))
    assert "upper bound" not in text and "--env-price" not in text
    calls = 640 * 2 + 6400 * 2 + 500 * 2 + 320
    likely = [line.split() for line in text.splitlines() if line.startswith("  likely")]
    assert likely[-1][1] == f"{calls:,}"
    alone = estimate(TrainConfig(**config | {"env": "none"}))
    assert "--env-price" not in alone and "upper bound" not in alone
    assert ["likely", "0", "0", "0", "–"] in [one.split() for one in alone.splitlines()]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_prints_the_estimate(monkeypatch, capsys, rank):
    """`torchrun --nproc-per-node 4 train.py --dry-run` printed the table four times."""
    monkeypatch.setenv("RANK", str(rank))
    config = TrainConfig(**PRESETS["mini"], dry_run=True)
    train.main(ChosenTraining(config, resolve_agent(config.agent), None))
    assert ("together" in capsys.readouterr().out) == (rank == 0)
