"""The answer that is read in a sentence, and the rate beside the official one."""

import pytest

from prompt_r1.evaluation.aggregate import text_metrics
from prompt_r1.evaluation.extraction import extract_answer
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.types import Question

CAPITAL = "What is the capital of Japan?"


@pytest.mark.parametrize(
    ("answer", "question", "read"),
    [
        ("The capital of Japan is Tokyo.", CAPITAL, "Tokyo"),
        ("Tokyo is the capital of Japan.", CAPITAL, "Tokyo"),
        ("I think it is Tokyo. I hope this helps.", CAPITAL, "Tokyo"),
        ("Good question! That would be Tokyo, I think.", CAPITAL, "Tokyo"),
        ("The answer is: Tokyo.", CAPITAL, "Tokyo"),
        (r"So it is \boxed{Tokyo}.", CAPITAL, "Tokyo"),
        ("Tokyo", CAPITAL, "Tokyo"),
        ("", CAPITAL, ""),
        ("Bo Li directed Mu.", "Who directed Mu?", "Bo Li"),
        ("Mu was directed by J. R. R. Li.", "Who directed Mu?", "J. R. R. Li"),
        ("Mu was released in 1999.", "When was Mu released?", "1999"),
        ("Yes, Mu was released before Nu.", "Was Mu released before Nu?", "Yes"),
        ("Mu was released first.", "Which was released first, Mu or Nu?", "Mu"),
    ],
)
def test_the_short_answer_is_read_without_a_look_at_the_gold_answer(answer, question, read):
    assert extract_answer(answer, question, "qa") == read


@pytest.mark.parametrize(
    ("answer", "read"), [("She has 42 apples left.", "42"), ("3 + 4 = $7", "$7"), ("none", "none")]
)
def test_of_a_mathematical_answer_the_last_number_is_read(answer, read):
    assert extract_answer(answer, "How many apples does she have?", "math") == read


@pytest.mark.parametrize(
    ("answer", "official", "read"),
    [
        ("The capital of Japan is Tokyo.", 0, 1),  # a gain over this environment was partly an artefact
        ("Tokyo", 1, 1),
        ("The capital of Japan is Kyoto.", 0, 0),
        ("Tokyo is not the capital of Japan, Kyoto is.", 0, 0),
    ],
)
def test_the_rate_stands_beside_the_official_one_for_every_method(answer, official, read):
    metrics = text_metrics(Prediction(Question("q", "towns", CAPITAL, ("Tokyo",)), answer))
    assert (metrics["em"], metrics["em_read"]) == (official, read)


def test_an_answer_that_is_right_as_it_stands_stays_right():
    question = Question("q", "shows", "Which show is it?", ("This Is Us",))
    metrics = text_metrics(Prediction(question, "This Is Us"))
    assert metrics["em"] == metrics["em_read"] == 1
