"""What a method has spent."""

from prompt_r1.baselines.method import Ledger
from prompt_r1.spending import Spending


def test_a_ledger_is_noted_with_the_calls_of_each_model_and_the_tokens_and_dollars_of_both():
    ledger = Ledger(Spending(4, 100, 50, 2.0), Spending(1, 10, 3, 0.25))
    assert ledger.row == {
        "task_calls": 4, "optimizer_calls": 1, "tokens_in": 110, "tokens_out": 53, "usd": 2.25
    }  # fmt: skip
