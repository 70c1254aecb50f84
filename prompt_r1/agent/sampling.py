"""Sample one token for each row of logits: greedy, or at a temperature, with top-k and top-p."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a sequence samples its next token. Top-k is applied before top-p."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability; 1: all
    top_k: int = 0  # sample from this many of the most likely tokens; 0: all

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0):
            raise ValueError(f"{self}: temperature and top_k must be at least 0, top_p in (0, 1]")

    @property
    def truncated(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


LOWEST_TEMPERATURE = 1e-30  # smaller ones are raised to it: float32 would round them to 0


@dataclass(frozen=True)
class Drawn:
    """One sampled token for each of R rows."""

    tokens: Tensor  # (R,)
    logprobs: Tensor  # (R,) nats under softmax(logits / temperature), over the whole vocabulary


def draw(logits: Tensor, samplings: Sequence[Sampling], uniform: Sequence[float]) -> Drawn:
    """Sample by inverting each row's cumulative distribution at its number in [0, 1).

    `logits` is (R, V) float32, with one Sampling and one number for each row.
    """
    greedy = [row for row, sampling in enumerate(samplings) if sampling.temperature == 0]
    if len(greedy) == len(samplings):
        largest, tokens = logits.max(-1)
        return Drawn(tokens, largest - logits.logsumexp(-1))
    device = logits.device
    largest = logits.amax(-1)  # ten times faster on a CPU than `max`, which also returns the index
    # Greedy rows are overwritten below; their log-probabilities are those at temperature 1.
    temperatures = torch.tensor(
        [max(s.temperature or 1.0, LOWEST_TEMPERATURE) for s in samplings], device=device
    )[:, None]
    numbers = torch.tensor(uniform, dtype=torch.float32, device=device)[:, None]
    weights = ((logits - largest[:, None]) / temperatures).exp_()  # (R, V), not normalised
    cumulative = weights.cumsum(-1)
    tokens = _invert(cumulative, numbers)
    truncated = [row for row, sampling in enumerate(samplings) if sampling.truncated]
    if truncated:
        tokens[truncated] = _draw_truncated(
            weights[truncated], [samplings[row] for row in truncated], numbers[truncated]
        )
    if greedy:
        tokens[greedy] = logits[greedy].argmax(-1)
    shifted = logits.gather(1, tokens[:, None]) - largest[:, None]
    return Drawn(tokens, (shifted / temperatures - cumulative[:, -1:].log())[:, 0])


def _draw_truncated(weights: Tensor, samplings: Sequence[Sampling], numbers: Tensor) -> Tensor:
    """Sample from the tokens that remain after top-k, then top-p. weights (R, V) → tokens (R,)."""
    device, size = weights.device, weights.shape[1]
    top_k = torch.tensor([sampling.top_k or size for sampling in samplings], device=device)[:, None]
    top_p = torch.tensor([sampling.top_p for sampling in samplings], device=device)[:, None]
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    ranked = ranked * (torch.arange(size, device=device) < top_k)
    cumulative = ranked.cumsum(-1)
    # A token remains if those before it have less than top_p, so the one that reaches top_p is included.
    ranked = ranked * (cumulative - ranked < top_p * cumulative[:, -1:])
    return order.gather(1, _invert(ranked.cumsum(-1), numbers)[:, None])[:, 0]


def _invert(cumulative: Tensor, numbers: Tensor) -> Tensor:
    """(R,) the first entry whose cumulative weight exceeds the number times the total."""
    found = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    # Rounding may reach the total itself: then take the last entry with any weight.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(found, last)[:, 0]
