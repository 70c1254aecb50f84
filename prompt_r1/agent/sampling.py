"""Sample one token for each row of logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prompt_r1.agent.kv_cache import upload


@dataclass(frozen=True)
class Sampling:
    """How a sequence samples its next token."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability; 1: all

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"{self}: the temperature must be at least 0, and top_p in (0, 1]")


LOWEST_TEMPERATURE = 1e-30  # smaller ones are raised to it: float32 would round them to 0


def draw(logits: Tensor, samplings: Sequence[Sampling], numbers: Sequence[float]) -> Tensor:
    """Sample one token for each of R rows, by inverting its cumulative distribution at its number in [0, 1).

    `logits` is (R, V) float32. Returns (R, 2) float64, so that one copy brings both to the host: the tokens,
    and their log-probabilities in nats under softmax(logits / temperature) over the whole vocabulary.
    """
    if not any(sampling.temperature for sampling in samplings):
        largest, tokens = logits.max(-1)
        return _pairs(tokens, largest - logits.logsumexp(-1))
    settings = [
        (number, sampling.temperature and max(sampling.temperature, LOWEST_TEMPERATURE), sampling.top_p)
        for number, sampling in zip(numbers, samplings, strict=True)
    ]
    uniform, temperatures, top_p = upload(settings, torch.float32, logits.device)[:, :, None].unbind(1)
    greedy = temperatures == 0  # (R, 1), as these three
    temperatures = temperatures.masked_fill(greedy, 1.0)  # for the log-probabilities of greedy rows
    # On a CPU ten times as fast as `max`, which returns the index too.
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).div_(temperatures).exp_()  # (R, V), not normalised
    cumulative = weights.cumsum(-1)
    tokens = _invert(cumulative, uniform)
    if any(sampling.top_p < 1 for sampling in samplings):
        tokens = torch.where(top_p < 1, _draw_truncated(weights, top_p, uniform), tokens)
    if not all(sampling.temperature for sampling in samplings):
        tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), tokens)
    shifted = logits.gather(1, tokens) - largest
    return _pairs(tokens[:, 0], (shifted / temperatures - cumulative[:, -1:].log())[:, 0])


def _pairs(tokens: Tensor, logprobs: Tensor) -> Tensor:
    return torch.stack([tokens.double(), logprobs.double()], dim=1)


def _draw_truncated(weights: Tensor, top_p: Tensor, numbers: Tensor) -> Tensor:
    """Sample from the tokens that remain after top-p. weights (R, V) → tokens (R, 1)."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    cumulative = ranked.cumsum(-1)
    # A token remains if those before it have less than top_p, so the one that reaches top_p is included.
    ranked = ranked * (cumulative - ranked < top_p * cumulative[:, -1:])
    return order.gather(1, _invert(ranked.cumsum(-1), numbers))


def _invert(cumulative: Tensor, numbers: Tensor) -> Tensor:
    """(R, 1) the first entry whose cumulative weight exceeds the number times the total."""
    found = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    # Rounding may reach the total itself: then take the last entry with any weight.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(found, last)
