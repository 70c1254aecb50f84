"""What a method has spent."""

from prompt_r1.baselines.method import Ledger
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.spending import Spending
from prompt_r1.types import Question


def test_a_ledger_is_noted_with_the_calls_of_each_model_and_the_tokens_and_dollars_of_both():
    ledger = Ledger(Spending(4, 100, 50, 2.0), Spending(1, 10, 3, 0.25))
    assert ledger.row == {
        "task_calls": 4, "optimizer_calls": 1, "tokens_in": 110, "tokens_out": 53, "usd": 2.25
    }  # fmt: skip


def test_a_billed_prediction_costs_what_its_calls_have_cost():
    billed = Prediction(Question("q", "pop", "Who?", ("Anna",)), "Anna").billed(Spending(4, 7, 8, 1.5))
    assert (billed.calls, billed.tokens_in, billed.tokens_out, billed.usd) == (4, 7, 8, 1.5)
    assert billed.answer == "Anna" and billed.spent == Spending(4, 7, 8, 1.5)
