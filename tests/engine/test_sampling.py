"""Sampling against the definition of temperature and top-p, computed token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_r1.engine.sampling import draw
from tests.support.operations import RecordedOperations


def allowed_tokens(logits: list[float], temperature: float, top_p: float) -> dict[int, float]:
    """The tokens that may be drawn and their probabilities, the most likely first."""
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    total = sum(weights[token] for token in order)
    nucleus: dict[int, float] = {}
    for token in order:
        if sum(nucleus.values()) >= top_p:
            break
        nucleus[token] = weights[token] / total
    total = sum(nucleus.values())
    return {token: p / total for token, p in nucleus.items()}


LOGITS = st.lists(st.integers(-50, 50), min_size=2, max_size=12, unique=True).map(
    lambda values: [value / 10 for value in values]
)
# Numbers that no sum of probabilities equals.
TOP_P = st.sampled_from([0.123457, 0.51237, 0.87653, 1.0])


@settings(max_examples=100)
@given(LOGITS, st.sampled_from([0.3, 1.0, 1.7]), TOP_P)
def test_tokens_are_drawn_with_the_frequencies_that_top_p_defines(logits, temperature, top_p):
    count = 400  # evenly spaced numbers instead of random ones give frequencies without noise
    numbers = [(n + 0.5) / count for n in range(count)]
    rows = torch.tensor([logits] * count)
    tokens, logprobs = draw(rows, [temperature] * count, [top_p] * count, numbers).T
    expected = allowed_tokens(logits, temperature, top_p)
    frequencies = torch.bincount(tokens.long(), minlength=len(logits)) / count
    for token, frequency in enumerate(frequencies.tolist()):
        assert abs(frequency - expected.get(token, 0.0)) <= 1.01 / count
    log_p = torch.log_softmax(torch.tensor(logits) / temperature, -1)
    assert torch.allclose(logprobs.float(), log_p[tokens.long()], atol=1e-5)


def test_the_rows_of_a_batch_are_independent():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    temperatures, top_ps, numbers = [0.0, 0.8, 1.0, 1.3], [1.0, 1.0, 0.7, 0.4], [0.1, 0.5, 0.7, 0.9]
    batch = draw(logits, temperatures, top_ps, numbers)
    for row, (temperature, top_p, number) in enumerate(zip(temperatures, top_ps, numbers, strict=True)):
        alone = draw(logits[row : row + 1], [temperature], [top_p], [number])
        assert alone[0, 0] == batch[row, 0] and torch.allclose(alone[0], batch[row], atol=1e-6)


def test_a_number_close_to_one_never_draws_an_impossible_token():
    logits = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]])
    drawn = draw(logits, [1.0], [1.0], [1 - 1e-12])
    assert drawn[:, 0].tolist() == [1]
    assert draw(logits.flip(1), [1.0], [1.0], [0.0])[:, 0].tolist() == [2]


def test_a_low_temperature_draws_the_likeliest_token():
    drawn = draw(torch.tensor([[0.0, 3.0, 1.0]]), [1e-6], [1.0], [0.7])
    assert drawn.tolist() == [[1, 0]]  # the token and its log-probability


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("temperatures", [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
def test_logits_that_are_not_finite_give_no_log_probability(broken, top_p, temperatures):
    """A bug: sampled rows ended in "index 50 is out of bounds", on CUDA in a device assertion; greedy rows
    returned token 0. The other rows of the batch are drawn as ever.
    """
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    expected = draw(logits, temperatures, [top_p] * 2, [0.3, 0.6])
    logits[0, 7] = broken
    drawn = draw(logits, temperatures, [top_p] * 2, [0.3, 0.6])
    assert drawn[0, 1].isnan() and 0 <= drawn[0, 0] < 50
    assert torch.equal(drawn[1], expected[1])


def operations_of(temperatures: list[float], top_ps: list[float]) -> set[str]:
    """The names of the operations that draw from two rows, such as "sort"."""
    with RecordedOperations() as recorded:
        draw(torch.zeros(2, 50), temperatures, top_ps, [0.3, 0.6])
    return {name.split(".")[1] for name in recorded.names}


def test_a_batch_computes_only_what_one_of_its_rows_needs():
    """A bug would only cost time: sorting a large vocabulary takes longer than all other operations."""
    plain = operations_of([1.0, 0.7], [1.0, 1.0])
    assert "cumsum" in plain and not {"sort", "argmax"} & plain
    assert "sort" in operations_of([1.0, 1.0], [1.0, 0.9])
    assert "argmax" in operations_of([0.0, 1.0], [1.0, 1.0])
    assert not {"cumsum", "sort"} & operations_of([0.0, 0.0], [1.0, 0.9])
