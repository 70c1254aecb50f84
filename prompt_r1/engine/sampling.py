"""Sample one token for each row of logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from prompt_r1.engine.paged_attention import upload


def draw(
    logits: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> Tensor:
    """Sample one token for each of R rows of logits (R, V), float32.

    Each row has its own temperature, top-p and uniform random number in [0, 1). The token is where the
    cumulative distribution of the row exceeds the number. Temperature 0 is greedy. With top-p below 1, the
    token is drawn from the fewest most likely tokens that together have at least this probability.

    Returns (R, 2) float64: the tokens, and their log-probabilities in nats under softmax(logits /
    temperature) over the whole vocabulary. They are one tensor, so that one copy brings both to the host. If
    a row of logits is not finite, its log-probability is NaN and its token is arbitrary.
    """
    if not any(temperatures):
        largest, tokens = logits.max(-1)
        return _pairs(tokens, largest - logits.logsumexp(-1))
    settings = upload([uniforms, temperatures, top_ps], torch.float32, logits.device)
    uniform, temperature, top_p = settings[:, :, None]  # (R, 1) each
    greedy = temperature == 0
    temperature = temperature.masked_fill(greedy, 1.0)  # Greedy rows have log_softmax(logits).
    # On a CPU, amax is ten times as fast as max, which also returns the index.
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).div_(temperature).exp_()  # (R, V), not normalised
    cumulative = weights.cumsum(-1)
    tokens = _invert(cumulative, uniform)
    if min(top_ps) < 1:
        tokens = torch.where(top_p < 1, _draw_truncated(weights, top_p, uniform), tokens)
    if not all(temperatures):
        tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), tokens)
    shifted = logits.gather(1, tokens) - largest
    logprobs = shifted / temperature - cumulative[:, -1:].log()
    return _pairs(tokens[:, 0], logprobs[:, 0])


def _pairs(tokens: Tensor, logprobs: Tensor) -> Tensor:
    return torch.stack([tokens.double(), logprobs.double()], dim=1)


def _draw_truncated(weights: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Sample from the tokens that remain after top-p. weights (R, V) → tokens (R, 1)."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    cumulative = ranked.cumsum(-1)
    # A token remains if the tokens before it have less than top_p. So the token that reaches it remains.
    ranked = ranked * (cumulative - ranked < top_p * cumulative[:, -1:])
    return order.gather(1, _invert(ranked.cumsum(-1), uniform))


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """The index (R, 1) of the first entry whose cumulative weight exceeds `uniform` times the total."""
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, uniform * total, right=True)
    # `uniform * total` may be rounded up to the total, which no cumulative weight exceeds. Then take the last
    # entry with a weight above 0, where the cumulative weight reaches the total.
    last = torch.searchsorted(cumulative, total)
    # In a row with NaN, both searches return an index behind the last entry.
    return torch.minimum(found, last).clamp(max=cumulative.shape[1] - 1)
