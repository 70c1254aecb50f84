"""Sample one token for each row of logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a sequence samples its next token."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability; 1: all

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"{self}: the temperature must be at least 0, and top_p in (0, 1]")


LOWEST_TEMPERATURE = 1e-30  # smaller ones are raised to it: float32 would round them to 0


@dataclass(frozen=True)
class SamplingMix:
    """Which kinds of rows a batch has. A recorded step serves every batch of the same mix."""

    greedy: bool
    sampled: bool
    truncated: bool  # some rows are sampled with top-p

    @staticmethod
    def of(samplings: Sequence[Sampling]) -> "SamplingMix":
        """The mix of these rows."""
        sampled = [sampling.top_p for sampling in samplings if sampling.temperature]
        return SamplingMix(len(sampled) < len(samplings), bool(sampled), any(top_p < 1 for top_p in sampled))


def settings_row(sampling: Sampling, uniform: float) -> list[float]:
    """What `draw` reads of a row: its number in [0, 1), temperature (0: greedy) and top-p."""
    temperature = sampling.temperature and max(sampling.temperature, LOWEST_TEMPERATURE)
    return [uniform, temperature, sampling.top_p]


def draw(logits: Tensor, settings: Tensor, mix: SamplingMix) -> Tensor:
    """Sample one token for each of R rows, by inverting its cumulative distribution at its number in [0, 1).

    Returns (R, 2) float64, so that one copy brings both to the host: the tokens, and their log-probabilities
    in nats under softmax(logits / temperature) over the whole vocabulary.

    `logits` is (R, V) float32, and `settings` (R, 3) float64, the `settings_row` of each row. Reads no value
    on the host, so that a CUDA graph can record it.
    """
    if not mix.sampled:
        largest, tokens = logits.max(-1)
        return _pairs(tokens, largest - logits.logsumexp(-1))
    numbers, temperatures, top_p = settings.float()[:, :, None].unbind(1)  # (R, 1) each
    greedy = temperatures == 0
    if mix.greedy:  # their log-probabilities are those at temperature 1
        temperatures = temperatures.masked_fill(greedy, 1.0)
    # On a CPU ten times as fast as `max`, which returns the index too.
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).div_(temperatures).exp_()  # (R, V), not normalised
    cumulative = weights.cumsum(-1)
    tokens = _invert(cumulative, numbers)
    if mix.truncated:
        tokens = torch.where(top_p < 1, _draw_truncated(weights, top_p, numbers), tokens)
    if mix.greedy:
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
