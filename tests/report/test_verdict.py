"""The sentence on top of the report: what the curves of a run allow to say, and no more."""

import pytest

from prompt_r1.report.verdict import verdict


def validated(*rates: float, n: int = 100, **more: list[float]) -> dict[str, list[float | None]]:
    """The columns of a run that validated every 20 steps."""
    count = len(rates)
    columns: dict[str, list[float | None]] = {
        "step": [20.0 * place for place in range(count)],
        "val/em": list(rates),
        "val/n": [float(n)] * count,
        "reward/mean": [None, *[0.5] * (count - 1)],
        **more,
    }
    return columns


def sampled(rates: list[float], **more: list[float]) -> dict[str, list[float | None]]:
    """The columns of a run without validation."""
    return {"step": [1.0 + n for n in range(len(rates))], "em": [*rates], "reward/mean": [*rates], **more}


STUCK = {"groups/no_spread": [None, 1.0, 1.0], "format": [None, 0.0, 0.0]}


@pytest.mark.parametrize(
    ("columns", "kind", "sentence"),
    [
        (validated(0.18, 0.97, 0.90), "learned", "Learned: validation EM 0.18 → 0.97 at step 20 (100 "),
        (validated(0.18, 0.97, 0.20), "lost", "Learned, then lost it again: validation EM 0.18 →"),
        (validated(0.18, 0.25), "unclear", "(100 questions); the difference may be chance."),
        (validated(0.18, 0.18), "not", "Did not learn: validation EM 0.18 → 0.18"),
        (validated(0.90, 0.10), "not", "Did not learn: validation EM fell, 0.90 → 0.10"),
        (validated(0.0, 0.0, 0.0, **STUCK), "not", "because almost no game has the required format."),
        (validated(0.0, 0.0, f1=[None, 0.3]), "unclear", "no answer equals its gold answer word by word; F1"),
        ({**validated(0.18), "reward/mean": [0.1]}, "unclear", "It is too early to say"),
        ({"step": [0.0], "val/em": [0.2], "val/n": [100.0]}, "unclear", "No step has been trained yet."),
        ({}, "unclear", "No step has been trained yet."),
        (sampled([0.1, 0.2, 0.1, 0.2, 0.1, 0.8, 0.9, 0.8, 0.9, 0.8]), "learned", "0.14 → 0.84 in the last 5"),
        (sampled([0.4, 0.5, 0.4, 0.5, 0.4, 0.4, 0.5, 0.4, 0.5, 0.41]), "unclear", "may be chance"),
        (sampled([0.1, 0.2, 0.9]), "unclear", "It is too early to say"),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_intervals(columns, kind, sentence):
    found = verdict(columns)
    assert found.kind == kind and sentence in found.text


def test_more_questions_make_the_same_difference_clear():
    assert verdict(validated(0.50, 0.60, n=100)).kind == "unclear"
    assert verdict(validated(0.50, 0.60, n=1000)).kind == "learned"


def test_of_equal_validations_the_verdict_names_the_one_whose_agent_was_kept():
    """A bug: "learned … at step 20" stood beside "step 80, the best", because the reward breaks ties."""
    rewards = {"val/reward": [0.2, 0.95, 0.93, 0.97, 0.97]}
    assert " 0.96 at step 60 " in verdict(validated(0.18, 0.96, 0.96, 0.96, 0.96, **rewards)).text
