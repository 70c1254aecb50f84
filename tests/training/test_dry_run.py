"""The estimate of --dry-run: how many games a run plays, and what a game takes at either end."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.environments.budget import Price
from prompt_r1.spending import Spending
from prompt_r1.training.dry_run import (
    Part,
    Texts,
    cost_table,
    estimate,
    parts_of_run,
    price_at,
    spending_of_game,
    texts_of_call,
)

PAPER = TrainConfig()


def test_a_run_validates_before_the_first_step_every_few_steps_and_after_the_last():
    """320 steps with validations every 20: 17 of them. Test questions are played three times."""
    assert parts_of_run(PAPER, validation=256, test=30) == [
        Part("training", 320 * 128, 320 * 128 * 5),
        Part("validation", 256, 256 * 17),
        Part("test", 30, 90),
    ]
    for steps, count in ((1, 2), (19, 2), (20, 2), (21, 3), (40, 3)):
        assert parts_of_run(TrainConfig(steps=steps), validation=7, test=0)[1] == Part(
            "validation", 7, 7 * count
        )


def test_a_game_has_one_short_call_or_one_in_every_turn_but_the_last():
    """Each call of the high estimate sends the dialogue so far again: prompts of 512, replies of 1,024."""
    low, high = (spending_of_game(PAPER, "model", ("1,10",), high=end) for end in (False, True))
    assert low == Spending(1, 40 + 60, 60, (100 * 1 + 60 * 10) / 1e6)
    sent = sum(40 + (number + 1) * 512 + number * 1024 for number in range(4))
    assert (high.calls, high.tokens) == (4, sent + 4 * 1024)
    assert abs(high.usd - (sent + 4 * 1024 * 10) / 1e6) < 1e-12
    one_turn = spending_of_game(TrainConfig(max_turns=1), "model", (), high=True)
    assert (one_turn.calls, one_turn.tokens, one_turn.usd) == (1, 40 + 512 + 1024, 0.0)
    every_word = spending_of_game(TrainConfig(max_reply_tokens=0), "model", (), high=True)
    assert every_word.tokens == high.tokens, "a reply of any length is taken to have 1,024 tokens"
    short = spending_of_game(TrainConfig(max_reply_tokens=20), "model", (), high=False)
    assert short.tokens == 40 + 60 + 20


@given(
    spec=st.sampled_from(["model", "mini"]),
    max_new=st.integers(1, 200),
    max_turns=st.integers(1, 5),
    max_reply_tokens=st.integers(0, 100),
    prices=st.sampled_from([(), ("0.5,6", "3,4"), ("1,1",), ("0,9", "9,0")]),
)
def test_the_low_estimate_never_exceeds_the_high_one(spec, max_new, max_turns, max_reply_tokens, prices):
    """With turns of 48 tokens the low estimate had prompts of 60, and the high one prompts of 24."""
    game = TrainConfig(max_new=max_new, max_turns=max_turns, max_reply_tokens=max_reply_tokens)
    low, high = (spending_of_game(game, spec, prices, high=end) for end in (False, True))
    assert low.calls <= high.calls and low.tokens <= high.tokens and low.usd <= high.usd


def test_calls_of_the_mini_world_have_a_few_words():
    texts = partial(texts_of_call, prompt=100, reply=50, high=False)
    assert texts("mini") == texts("mini@http://x") == Texts(0, 5, 1)
    assert texts("gpt-4o-mini") == Texts(40, 60, 50)
    assert spending_of_game(PAPER, "mini", (), high=False).tokens == 6


def test_of_several_prices_the_estimate_takes_the_lowest_and_the_highest():
    prices = ("3,4", "0.5,6", "1,1")
    assert (price_at(prices, high=False), price_at(prices, high=True)) == (Price(0.5, 1), Price(3, 6))
    assert price_at((), high=True) == Price()


def test_the_table_adds_up_its_parts():
    parts = [Part("training", 1000, 5000), Part("test", 10, 30)]
    low, high = Spending(1, 100, 60, 0.001), Spending(4, 3000, 1000, 0.25)
    lines = [line.split() for line in cost_table(parts, low, high, priced=True).splitlines()]
    assert lines == [
        "questions games calls tokens dollars".split(),
        "training 1,000 5,000 5,000 to 20,000 800,000 to 20,000,000 5.00 to 1,250.00".split(),
        "test 10 30 30 to 120 4,800 to 120,000 0.03 to 7.50".split(),
        "together 1,010 5,030 5,030 to 20,120 804,800 to 20,120,000 5.03 to 1,257.50".split(),
    ]
    unpriced = cost_table(parts, low, high, priced=False).splitlines()
    assert all(line.endswith(" no --env-price") for line in unpriced[1:])


def test_the_estimate_of_the_mini_preset_counts_its_own_questions():
    text = estimate(TrainConfig(**PRESETS["mini"]))
    rows = {line.split()[0]: line.split()[1:3] for line in text.splitlines() if line.strip()}
    assert rows["training"] == ["1,280", "6,400"] and rows["test"] == ["320", "960"]
    assert rows["validation"] == ["100", "500"] and text.endswith("memory: the mini agent fits everywhere")
    assert "no --env-price" in text
    alone = TrainConfig(**{**PRESETS["mini"], "env": "none", "rule": "alone", "max_turns": 1})
    table = estimate(alone).splitlines()
    assert table[1].split()[3:] == ["0", "0", "0.00"] and "memory" not in table[-1]
