"""Drawing tokens against the definition, one token after the other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_r1.agent.sampling import Sampling, draw


def kept(logits: list[float], how: Sampling) -> dict[int, float]:
    """Which tokens may be drawn, likeliest first, with their probabilities: temperature, top_k, top_p."""
    weights = [math.exp((logit - max(logits)) / how.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])[: how.top_k or None]
    total = sum(weights[token] for token in order)
    nucleus: dict[int, float] = {}
    for token in order:
        if sum(nucleus.values()) >= how.top_p:
            break
        nucleus[token] = weights[token] / total
    total = sum(nucleus.values())
    return {token: p / total for token, p in nucleus.items()}


LOGITS = st.lists(st.integers(-50, 50), min_size=2, max_size=12, unique=True).map(
    lambda values: [value / 10 for value in values]
)
# Odd numbers, so that no sum of probabilities meets top_p exactly.
HOW = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.123457, 0.51237, 0.87653, 1.0]),
    top_k=st.integers(0, 5),
)


@settings(max_examples=200)
@given(LOGITS, HOW)
def test_top_k_and_top_p_keep_the_right_tokens_with_the_right_frequencies(logits, how):
    count = 400  # evenly spaced numbers instead of random ones: frequencies without noise
    numbers = [(n + 0.5) / count for n in range(count)]
    drawn = draw(torch.tensor([logits] * count), [how] * count, numbers)
    expected = kept(logits, how)
    frequencies = torch.bincount(drawn.tokens, minlength=len(logits)) / count
    for token, frequency in enumerate(frequencies.tolist()):
        assert abs(frequency - expected.get(token, 0.0)) <= 1.01 / count
    log_p = torch.log_softmax(torch.tensor(logits) / how.temperature, -1)
    assert torch.allclose(drawn.logprobs, log_p[drawn.tokens], atol=1e-5)


def test_rows_of_a_batch_do_not_depend_on_each_other():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    ways = [Sampling(0.0), Sampling(0.8), Sampling(1.0, top_k=3), Sampling(1.3, top_p=0.4)]
    numbers = [0.1, 0.5, 0.7, 0.9]
    together = draw(logits, ways, numbers)
    for row, how in enumerate(ways):
        alone = draw(logits[row : row + 1], [how], [numbers[row]])
        assert alone.tokens[0] == together.tokens[row]
        assert torch.allclose(alone.logprobs[0], together.logprobs[row], atol=1e-6)


def test_a_number_next_to_one_never_draws_what_is_impossible():
    logits = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]])
    drawn = draw(logits, [Sampling(1.0)], [1 - 1e-12])
    assert drawn.tokens.tolist() == [1]
    assert draw(logits.flip(1), [Sampling(1.0)], [0.0]).tokens.tolist() == [2]


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}])
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="temperature and top_k are at least 0"):
        Sampling(**wrong)
