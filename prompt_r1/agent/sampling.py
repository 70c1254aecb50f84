"""One token for each row of logits: greedy, or drawn at a temperature from the top k and the top p."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How one sequence draws its next token."""

    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0  # the likeliest tokens that together have this probability; 1: all
    top_k: int = 0  # so many of the likeliest tokens; 0: all. Applied before top_p

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0):
            raise ValueError(f"{self}: temperature and top_k are at least 0, top_p is above 0 and at most 1")

    @property
    def truncated(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True)
class Drawn:
    """One drawn token for each of R rows."""

    tokens: Tensor  # (R,)
    logprobs: Tensor  # (R,) nats under softmax(logits / temperature), over the whole vocabulary


def draw(logits: Tensor, sampling: Sequence[Sampling], uniform: Sequence[float]) -> Drawn:
    """Invert each row's distribution function at its number in [0, 1). logits (R, V) float32."""
    greedy = [row for row, how in enumerate(sampling) if how.temperature == 0]
    if len(greedy) == len(sampling):
        largest, likeliest = logits.max(-1)
        return Drawn(likeliest, largest - logits.logsumexp(-1))
    device = logits.device
    largest = logits.amax(-1)  # without the index it is ten times faster on a CPU
    heat = torch.tensor([how.temperature or 1.0 for how in sampling], device=device)[:, None]
    numbers = torch.tensor(uniform, dtype=torch.float32, device=device)[:, None]
    weights = ((logits - largest[:, None]) / heat).exp_()  # (R, V), not normalised
    cumulated = weights.cumsum(-1)
    tokens = _invert(cumulated, numbers)
    cut = [row for row, how in enumerate(sampling) if how.truncated]
    if cut:
        tokens[cut] = _draw_truncated(weights[cut], [sampling[row] for row in cut], numbers[cut])
    if greedy:
        tokens[greedy] = logits[greedy].argmax(-1)
    picked = logits.gather(1, tokens[:, None]) - largest[:, None]
    return Drawn(tokens, (picked / heat - cumulated[:, -1:].log())[:, 0])


def _draw_truncated(weights: Tensor, sampling: Sequence[Sampling], numbers: Tensor) -> Tensor:
    """The same among the tokens that top_k, then top_p of what it left, keep (R, V)."""
    device, size = weights.device, weights.shape[1]
    top_k = torch.tensor([how.top_k or size for how in sampling], device=device)[:, None]
    top_p = torch.tensor([how.top_p for how in sampling], device=device)[:, None]
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    ranked = ranked * (torch.arange(size, device=device) < top_k)
    cumulated = ranked.cumsum(-1)
    # A token stays while those before it have less than top_p: the one that crosses the border is in.
    ranked = ranked * (cumulated - ranked < top_p * cumulated[:, -1:])
    return order.gather(1, _invert(ranked.cumsum(-1), numbers)[:, None])[:, 0]


def _invert(cumulated: Tensor, numbers: Tensor) -> Tensor:
    """The first entry whose cumulated weight exceeds the number's share of the total. (R,)"""
    found = torch.searchsorted(cumulated, numbers * cumulated[:, -1:], right=True)
    # Rounding may reach the total itself: then the last entry that has any weight.
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())
    return torch.minimum(found, last)[:, 0]
