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
) -> Iterator[dict[str, float]]:
    """An AdamW step on each batch, with the gradient clipped to a norm of 1; yields the metrics of each step.

    The loss of a batch is the mean over its sampled tokens, as is `mean_loss` of the micro-batches that it is
    split into. `rate` is the learning rate of each step, from 0.
    """
    optimizer = torch.optim.AdamW(parameters, betas=betas, weight_decay=0.0, fused=True)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate(step)
        sampled, total = [sum(game.sampled) for game in batch], 0.0  # the agent's tokens in each game
        for start in range(0, len(batch), micro_batch):
            part = slice(start, start + micro_batch)
            loss = mean_loss(batch[part]) * (sum(sampled[part]) / sum(sampled))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield {"step": step + 1, "loss": total, "lr": rate(step)}
