"""Sliding windows against a loop over queries; test_model_types.py tests whole models."""

import pytest
import torch
from torch import Tensor

from prompt_r1.agent.attention import attend, attend_in_window


def naive_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """One query and one head at a time."""
    out, cached = torch.empty_like(query), key.shape[1] - query.shape[1]
    for head in range(len(query)):
        own = head // (len(query) // len(key))
        for row in range(query.shape[1]):
            visible = slice(max(0, cached + row + 1 - (window or 1000)), cached + row + 1)
            shares = (key[own, visible] @ query[head, row] * scale).softmax(0)
            out[head, row] = shares @ value[own, visible]
    return out


@pytest.mark.parametrize("cached", [0, 9])
@pytest.mark.parametrize("window", [1, 5, 100, None])
def test_attention_in_a_window_equals_a_loop_over_queries(window, cached):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(heads, length, 8, dtype=torch.float64, generator=generator)
        for heads, length in ((4, 13), (2, cached + 13), (2, cached + 13))
    )
    found = attend_in_window(query, key, value, 0.4, window)
    torch.testing.assert_close(found, naive_attention(query, key, value, 0.4, window))


def test_a_model_that_gives_no_scale_gets_that_of_the_head_dimension():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 7, 16, dtype=torch.float64).unbind()  # (B, H, T, D) each
    out, _ = attend(torch.nn.Identity(), query, key, value, None)
    expected = naive_attention(query[0], key[0], value[0], 16**-0.5, window=7)
    torch.testing.assert_close(out[0].transpose(0, 1), expected)
