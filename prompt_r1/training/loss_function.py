"""The loss of a run: eq. 17 or the user's own (--loss-function).

The user's loss is tried before the first game, and each of its results is checked.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from prompt_r1.errors import UsageError
from prompt_r1.grpo import Loss, LossColumns, grpo_loss
from prompt_r1.settings.functions import OwnLoss, user_code
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.update import IMPORTANCE_CAP

# The trial of a user's loss has nine tokens of three made-up games. These are the tokens of all games, of
# each game, and of none: a rank may have no game, and its loss must be 0.
ALL_GAMES = slice(0, 9)
EACH_GAME = (slice(0, 4), slice(4, 6), slice(6, 9))
NO_GAME = slice(9, 9)

LossFunction = Callable[[Tensor, LossColumns], Loss]
"""Takes log π_θ (N,) of N agent tokens, and what else is known of them."""


def loss_of_run(config: TrainConfig, own: OwnLoss | None, *, importance_cap: float) -> LossFunction:
    """The loss with the settings of a run: the user's own, or `grpo_loss`.

    It raises UsageError if the user's function raises an error or returns anything but a finite loss of these
    tokens.
    """
    settings = {
        "clip": config.clip,
        "clip_high": config.clip_high,
        "kl_coef": config.kl_coef,
        "importance_cap": importance_cap,
    }
    if own is None:
        default: Callable[..., Loss] = grpo_loss
        return partial(default, **settings)
    where = f"--loss-function {config.loss_function}"
    # With --kl-coef 0 there is no reference, which many losses use.
    note = ", called without columns.reference (--kl-coef 0)," if config.kl_coef == 0 else ""

    def own_loss(logprobs: Tensor, columns: LossColumns) -> Loss:
        with user_code(where + note):
            loss = own(logprobs, columns, **settings)
        if problem := problem_of(loss, logprobs):
            raise UsageError(f"{where} returned {problem}")
        return loss

    return own_loss


def problem_of(loss: object, logprobs: Tensor) -> str:
    """What is wrong with the loss of N tokens; "" if nothing is."""
    if not isinstance(loss, Loss):
        return f"a {type(loss).__name__}, not a prompt_r1.grpo.Loss"
    for name, shape in (("total", ()), ("kl", ()), ("clip_frac", ()), ("token_kl", logprobs.shape)):
        value = getattr(loss, name)
        if not isinstance(value, Tensor) or value.shape != shape:
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            return f"{name} of shape {found}, not {list(shape)}, for {len(logprobs)} tokens"
    if not loss.total.requires_grad:
        return "total without a gradient: compute it from logprobs"
    if not math.isfinite(loss.total.item()):
        return f"the total {loss.total.item()} for {len(logprobs)} tokens"
    return ""


def try_loss(config: TrainConfig, own: OwnLoss) -> None:
    """Call the user's loss with three made-up games, before a game is played or paid for.

    Raises UsageError if the loss is not right, has no finite gradient, or does not add up: the loss of an
    optimiser step is the sum over its micro-batches, so it must not depend on which games are together.
    """
    where = f"--loss-function {config.loss_function}, tried with three made-up games:"
    loss_of = loss_of_run(config, own, importance_cap=IMPORTANCE_CAP)
    has_reference = config.kl_coef > 0
    logprobs, columns = made_up_batch(ALL_GAMES, has_reference=has_reference)
    together = loss_of(logprobs, columns).total
    together.backward()
    if logprobs.grad is None or not logprobs.grad.isfinite().all():
        raise UsageError(f"{where} its total has no finite gradient with respect to logprobs")

    one_by_one = 0.0
    for game in (*EACH_GAME, NO_GAME):
        one_by_one += loss_of(*made_up_batch(game, has_reference=has_reference)).total.item()
    if not math.isclose(one_by_one, together.item(), rel_tol=1e-3, abs_tol=1e-5):
        raise UsageError(
            f"{where} their losses one by one add up to {one_by_one:.4g}, but together it is "
            f"{together.item():.4g}; a step is the sum of its micro-batches, so sum by columns.weights"
        )


def made_up_batch(tokens: slice, *, has_reference: bool) -> tuple[Tensor, LossColumns]:
    """A micro-batch of some of the nine tokens: their log π_θ and their columns. The same in each call."""
    game = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    noise = torch.randn(4, len(game), generator=torch.Generator().manual_seed(0))
    logprobs = (noise[0].abs() + 0.1).neg()
    old, reference, engine = logprobs + 0.2 * noise[1:]
    tokens_of_game = game.bincount()[game]
    _, game_in_batch = game[tokens].unique(return_inverse=True)  # The games of a batch count from 0.
    columns = LossColumns(
        old=old[tokens],
        reference=reference[tokens] if has_reference else None,
        engine=engine[tokens],
        advantages=torch.tensor([1.0, -1.5, 0.5])[game[tokens]],
        weights=1 / (3 * tokens_of_game[tokens]),
        game=game_in_batch,
    )
    return logprobs[tokens].clone().requires_grad_(), columns
