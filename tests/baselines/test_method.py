"""What a method has spent."""

from prompt_r1.baselines.method import Ledger
from prompt_r1.environments.metered import Reply
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.types import Question

QUESTION = Question("q", "pop", "Who?", ("Anna",))


def test_a_ledger_adds_calls_tokens_and_dollars_from_replies_predictions_and_ledgers():
    ledger, reply = Ledger(), Reply("Anna", tokens_in=10, tokens_out=3, usd=0.25)
    ledger.add(reply)
    ledger.add(reply, optimizer=True)
    assert ledger == Ledger(1, 1, tokens_in=20, tokens_out=6, usd=0.5) and ledger.calls == 2
    ledger.add_prediction(Prediction(QUESTION, "Anna", calls=3, tokens_in=100, tokens_out=50, usd=2.0))
    assert ledger == Ledger(4, 1, tokens_in=120, tokens_out=56, usd=2.5)
    ledger.add_ledger(Ledger(1, 2, tokens_in=1, tokens_out=2, usd=0.125))
    assert ledger == Ledger(5, 3, tokens_in=121, tokens_out=58, usd=2.625)


def test_a_billed_prediction_costs_what_its_ledger_counted():
    billed = Ledger(4, 0, tokens_in=7, tokens_out=8, usd=1.5).bill(Prediction(QUESTION, "Anna"))
    assert (billed.calls, billed.tokens_in, billed.tokens_out, billed.usd) == (4, 7, 8, 1.5)
    assert billed.answer == "Anna"
