"""The estimate of --dry-run: how many games a run plays, and what a game takes at either end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import train
from prompt_r1.settings.train import PRESETS, TrainConfig
from prompt_r1.training.dry_run import cost_table, estimate, games_of_run, spending_of_game
from prompt_r1.types import Spending


def test_a_run_validates_before_the_first_step_every_few_steps_and_after_the_last():
    """320 steps with validations every 30: 12 of them. Test questions are played three times."""
    games = games_of_run(TrainConfig(group_size=4, save_every=30), validation=256, test=30)
    assert games == {"training": 320 * 128 * 4, "validation": 256 * 12, "test": 90}
    for steps, count in ((1, 2), (19, 2), (20, 2), (21, 3), (40, 3)):
        assert games_of_run(TrainConfig(steps=steps), validation=7, test=0)["validation"] == 7 * count


def test_a_game_has_one_short_call_or_one_in_every_turn_but_the_last():
    """Each call of the high estimate sends the dialogue so far again: prompts of 512, replies of 1,024."""
    low, high = (spending_of_game(TrainConfig(env_price="1,10"), high=end) for end in (False, True))
    assert low == Spending(1, 40 + 60, 60, (100 * 1 + 60 * 10) / 1e6)
    sent = sum(40 + (number + 1) * 512 + number * 1024 for number in range(4))
    assert (high.calls, high.tokens) == (4, sent + 4 * 1024)
    assert abs(high.usd - (sent + 4 * 1024 * 10) / 1e6) < 1e-12
    every_word = spending_of_game(TrainConfig(max_reply_tokens=0), high=True)
    assert every_word.tokens == high.tokens, "a reply of any length is taken to have 1,024 tokens"


@given(
    env=st.sampled_from(["model", "mini", "none"]),
    max_new=st.integers(1, 200),
    max_turns=st.integers(1, 5),
    max_reply_tokens=st.integers(0, 100),
    price=st.sampled_from(["", "0.5,6", "9,0"]),
)
def test_the_low_estimate_never_exceeds_the_high_one(env, max_new, max_turns, max_reply_tokens, price):
    """With turns of 48 tokens the low estimate had prompts of 60, and the high one prompts of 24."""
    config = TrainConfig(
        env=env, max_new=max_new, max_turns=max_turns, max_reply_tokens=max_reply_tokens, env_price=price
    )
    low, high = (spending_of_game(config, high=end) for end in (False, True))
    assert low.calls <= high.calls and low.tokens <= high.tokens and low.usd <= high.usd


def test_the_table_adds_up_its_parts():
    low, high = Spending(1, 100, 60, 0.001), Spending(4, 3000, 1000, 0.25)
    games = {"training": 5000, "test": 30}
    assert [line.split() for line in cost_table(games, low, high, priced=True).splitlines()] == [
        "games calls tokens dollars".split(),
        "training 5,000 5,000 to 20,000 800,000 to 20,000,000 5.00 to 1,250.00".split(),
        "test 30 30 to 120 4,800 to 120,000 0.03 to 7.50".split(),
        "together 5,030 5,030 to 20,120 804,800 to 20,120,000 5.03 to 1,257.50".split(),
    ]
    unpriced = cost_table(games, low, high, priced=False).splitlines()
    assert all(line.endswith(" no --env-price") for line in unpriced[1:])


def test_the_estimate_of_the_mini_preset_counts_its_own_questions():
    splits = {"val_data": ("mini",), "test_data": ("mini",)}
    text = estimate(TrainConfig(**PRESETS["mini"], **splits, env_price="1,2"))
    assert "no --env-price" not in text
    games = {line.split()[0]: line.split()[1] for line in text.splitlines() if line.strip()}
    assert (games["training"], games["validation"], games["test"]) == ("6,400", "500", "960")
    alone = TrainConfig(**{**PRESETS["mini"], **splits, "env": "none"})
    assert estimate(alone).splitlines()[1].split()[2:] == ["0", "0", "0.00"]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_prints_the_estimate(monkeypatch, capsys, rank):
    """`torchrun --nproc-per-node 4 train.py --dry-run` printed the table four times."""
    monkeypatch.setenv("RANK", str(rank))
    train.main(TrainConfig(**PRESETS["mini"], dry_run=True))
    assert ("together" in capsys.readouterr().out) == (rank == 0)
