"""Supervised training for warm start, `sft`, `bc` and `rft`."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from prompt_r1.types import Trajectory

Batch = Sequence[Trajectory]


def fine_tune(
    parameters: Sequence[nn.Parameter],
    batches: Iterable[Batch],
    mean_loss: Callable[[Batch], Tensor],
    *,
    rate: Callable[[int], float],
    betas: tuple[float, float],
    micro_batch: int,
) -> Iterator[float]:
    """An AdamW step on each batch, with the gradient clipped to a norm of 1; yields the loss of each step.

    The loss of a batch is the mean over its sampled tokens, as is `mean_loss` of the micro-batches that it is
    split into. `rate` is the learning rate of each step, from 0.
    """
    optimizer = torch.optim.AdamW(parameters, betas=betas, weight_decay=0.0, fused=True)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate(step)
        total = 0.0
        for start in range(0, len(batch), micro_batch):
            part = batch[start : start + micro_batch]
            loss = mean_loss(part) * (_sampled(part) / _sampled(batch))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield total


def _sampled(batch: Batch) -> int:
    """The number of sampled tokens."""
    return sum(sum(game.sampled) for game in batch)
