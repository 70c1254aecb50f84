"""Supervised training: AdamW steps on the mean loss of games.

It is in `model` because `miniworld` trains its agent with it, and may not import `training`.
training/supervised.py uses it, too, for the warm start, `sft`, `bc` and `rft`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from prompt_r1.types import Trajectory


def fine_tune(
    parameters: Sequence[nn.Parameter],
    batches: Iterable[Sequence[Trajectory]],
    mean_loss: Callable[[Sequence[Trajectory]], Tensor],
    *,
    rate: Callable[[int], float],
    betas: tuple[float, float],
    micro_batch: int,
) -> Iterator[dict[str, float]]:
    """Take an AdamW step on each batch, with the gradient clipped to a norm of 1. Yields each step's metrics.

    A batch is split into micro-batches of `micro_batch` games. `mean_loss` returns the mean loss over the
    sampled tokens of a micro-batch. The loss of a batch is the mean over all of its sampled tokens. `rate`
    returns the learning rate of a step; steps are counted from 0.
    """
    optimizer = torch.optim.AdamW(parameters, betas=betas, weight_decay=0.0, fused=True)
    for step, batch in enumerate(batches):
        lr = rate(step)
        optimizer.param_groups[0]["lr"] = lr
        tokens_of_batch = _sampled_tokens(batch)
        total = 0.0
        for start in range(0, len(batch), micro_batch):
            part = batch[start : start + micro_batch]
            loss = mean_loss(part) * (_sampled_tokens(part) / tokens_of_batch)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield {"step": step + 1, "loss": total, "lr": lr}


def _sampled_tokens(games: Sequence[Trajectory]) -> int:
    """The number of the agent's tokens in these games."""
    return sum(sum(game.sampled) for game in games)
