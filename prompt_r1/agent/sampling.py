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
class SamplingMix:
    """Which kinds of rows a batch has. A recorded step serves every batch of the same mix."""

    greedy: bool
    sampled: bool
    truncated: bool  # some rows are sampled with top-k or top-p

    @staticmethod
    def of(samplings: Sequence[Sampling]) -> "SamplingMix":
        """The mix of these rows."""
        greedy = [sampling.temperature == 0 for sampling in samplings]
        return SamplingMix(any(greedy), not all(greedy), any(sampling.truncated for sampling in samplings))


def settings_row(sampling: Sampling, uniform: float) -> list[float]:
    """What `draw` reads of a row: its number in [0, 1), temperature (0: greedy), top-p and top-k."""
    temperature = sampling.temperature and max(sampling.temperature, LOWEST_TEMPERATURE)
    return [uniform, temperature, sampling.top_p, sampling.top_k]


@dataclass(frozen=True)
class Drawn:
    """One sampled token for each of R rows."""

    tokens: Tensor  # (R,)
    logprobs: Tensor  # (R,) nats under softmax(logits / temperature), over the whole vocabulary


def draw(logits: Tensor, settings: Tensor, mix: SamplingMix) -> Drawn:
    """Sample by inverting each row's cumulative distribution at its number in [0, 1).

    `logits` is (R, V) float32, and `settings` (R, 4) float64, the `settings_row` of each row. Reads no value
    on the host, so that a CUDA graph can record it.
    """
    if not mix.sampled:
        largest, tokens = logits.max(-1)
        return Drawn(tokens, largest - logits.logsumexp(-1))
    numbers, temperatures, top_p, top_k = settings.float()[:, :, None].unbind(1)  # (R, 1) each
    greedy = temperatures == 0
    if mix.greedy:  # their log-probabilities are those at temperature 1
        temperatures = temperatures.masked_fill(greedy, 1.0)
    largest = logits.amax(
        -1, keepdim=True
    )  # ten times faster on a CPU than `max`, which also returns the index
    weights = (logits - largest).div_(temperatures).exp_()  # (R, V), not normalised
    cumulative = weights.cumsum(-1)
    tokens = _invert(cumulative, numbers)
    if mix.truncated:
        truncated = (top_p < 1) | (top_k > 0)
        tokens = torch.where(truncated, _draw_truncated(weights, top_p, top_k, numbers), tokens)
    if mix.greedy:
        tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), tokens)
    shifted = logits.gather(1, tokens) - largest
    return Drawn(tokens[:, 0], (shifted / temperatures - cumulative[:, -1:].log())[:, 0])


def _draw_truncated(weights: Tensor, top_p: Tensor, top_k: Tensor, numbers: Tensor) -> Tensor:
    """Sample from the tokens that remain after top-k, then top-p. weights (R, V) → tokens (R, 1)."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[1], device=weights.device)
    ranked = ranked * ((ranks < top_k) | (top_k == 0))
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
