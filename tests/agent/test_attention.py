"""Windows, soft caps and sinks against a loop over queries; test_model_types.py tests whole models."""

import pytest
import torch
from torch import Tensor

from prompt_r1.agent import attention
from prompt_r1.agent.attention import ScoreRules, attend, attend_by_rules

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


def naive_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, rules: ScoreRules) -> Tensor:
    """One query and one head at a time."""
    out, cached = torch.empty_like(query), key.shape[1] - query.shape[1]
    for head in range(len(query)):
        own = head // (len(query) // len(key))
        for row in range(query.shape[1]):
            last = cached + row
            first = 0 if rules.window is None else max(0, last - rules.window + 1)
            found = key[own, first : last + 1] @ query[head, row] * scale
            if rules.softcap is not None:
                found = rules.softcap * (found / rules.softcap).tanh()
            if rules.sinks is not None:
                found = torch.cat([found, rules.sinks[head : head + 1]])
            out[head, row] = found.softmax(0)[: last + 1 - first] @ value[own, first : last + 1]
    return out


@pytest.mark.parametrize("block", [1, 4, 512])
@pytest.mark.parametrize("cached", [0, 9])
@pytest.mark.parametrize(
    "rules",
    [
        ScoreRules(),
        ScoreRules(window=5),
        ScoreRules(window=1),
        ScoreRules(softcap=1.5),
        ScoreRules(sinks=SINKS),
        ScoreRules(window=5, softcap=1.5, sinks=SINKS),
    ],
)
def test_attention_by_rules_equals_a_loop_over_queries(monkeypatch, rules, cached, block):
    monkeypatch.setattr(attention, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(heads, length, 8, dtype=torch.float64, generator=generator)
        for heads, length in ((4, 13), (2, cached + 13), (2, cached + 13))
    )
    found = attend_by_rules(query, key, value, 0.4, rules)
    torch.testing.assert_close(found, naive_attention(query, key, value, 0.4, rules), atol=1e-6, rtol=1e-6)


def test_a_model_that_gives_no_scale_gets_that_of_the_head_dimension():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 7, 16, dtype=torch.float64).unbind()  # (B, H, T, D) each
    out, _ = attend(torch.nn.Identity(), query, key, value, None)
    expected = naive_attention(query[0], key[0], value[0], 16**-0.5, ScoreRules())
    torch.testing.assert_close(out[0].transpose(0, 1), expected)
