"""The loss of a run: eq. 17 or the user's own (--loss-function).

The user's loss is tried before the first game, and each of its results is checked.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from prompt_r1.errors import UsageError
from prompt_r1.grpo import Loss, LossColumns, grpo_loss
from prompt_r1.settings.functions import find_loss, loss_settings_of, user_code
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.update import IMPORTANCE_CAP

LossFunction = Callable[[Tensor, LossColumns], Loss]
"""Takes log π_θ (N,) of N agent tokens, and what else is known of them."""


def loss_of_run(config: TrainConfig, *, importance_cap: float) -> LossFunction:
    """The loss with the settings of a run: `grpo_loss` or the user's own."""
    function = checked_loss(config.loss_function) if config.loss_function else grpo_loss
    return partial(
        function,
        clip=config.clip,
        clip_high=config.clip_high,
        kl_coef=config.kl_coef,
        importance_cap=importance_cap,
    )


def checked_loss(name: str) -> Callable[..., Loss]:
    """The function MODULE:FUNCTION as a loss, which is called like `grpo_loss` and checks what it returns.

    The function gets only the keywords that it takes. Raises UsageError if it cannot be imported. The loss
    raises UsageError if the function raises an error or returns anything but a finite loss of these tokens.
    """
    function = find_loss(name)
    where = f"--loss-function {name}"
    wanted = loss_settings_of(function)

    def loss_of(logprobs: Tensor, columns: LossColumns, **settings: float) -> Loss:
        chosen = {name: settings[name] for name in wanted}
        without = ", called without columns.reference (--kl-coef 0)," if columns.reference is None else ""
        with user_code(where + without):
            loss = function(logprobs, columns, **chosen)
        problem = problem_of(loss, logprobs)
        if problem:
            raise UsageError(f"{where} returned {problem}")
        return Loss(loss.total, loss.kl.detach(), loss.clip_frac.detach(), loss.token_kl.detach())

    return loss_of


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


def try_loss(config: TrainConfig) -> None:
    """Call the user's loss with three made-up games, before a game is played or paid for.

    Raises UsageError if the loss is not right, has no finite gradient, or does not add up: the loss of an
    optimiser step is the sum over its micro-batches, so it must not depend on which games are together.
    """
    where = f"--loss-function {config.loss_function}, tried with three made-up games:"
    loss_of = loss_of_run(config, importance_cap=IMPORTANCE_CAP)
    logprobs, columns = made_up_games(with_reference=config.kl_coef > 0)
    together = loss_of(logprobs, columns).total
    together.backward()
    if logprobs.grad is None or not logprobs.grad.isfinite().all():
        raise UsageError(f"{where} its total has no finite gradient with respect to logprobs")

    one_by_one = 0.0
    # No game has the number 3. It stands for a rank without games, whose loss of no tokens must be 0.
    for number in (0, 1, 2, 3):
        own_logprobs = logprobs[columns.game == number]
        one_by_one += loss_of(own_logprobs, columns_of_game(columns, number)).total.item()
    if not math.isclose(one_by_one, together.item(), rel_tol=1e-3, abs_tol=1e-5):
        raise UsageError(
            f"{where} their losses one by one add up to {one_by_one:.4g}, but together it is "
            f"{together.item():.4g}; a step is the sum of its micro-batches, so sum by columns.weights"
        )


def made_up_games(*, with_reference: bool) -> tuple[Tensor, LossColumns]:
    """Log π_θ of the nine tokens of three games, and their columns; the same in each call."""
    game = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    noise = torch.randn(4, len(game), generator=torch.Generator().manual_seed(0))
    logprobs = (noise[0].abs() + 0.1).neg().requires_grad_()
    old, reference, engine = logprobs.detach() + 0.2 * noise[1:]
    columns = LossColumns(
        old=old,
        reference=reference if with_reference else None,
        engine=engine,
        advantages=torch.tensor([1.0, -1.5, 0.5])[game],
        weights=1 / (3 * game.bincount()[game]),
        game=game,
    )
    return logprobs, columns


def columns_of_game(columns: LossColumns, number: int) -> LossColumns:
    """The columns of one game, as a micro-batch of its own."""
    is_own = columns.game == number
    own = {name: column[is_own] for name, column in vars(columns).items() if column is not None}
    own["game"] = torch.zeros_like(own["game"])  # the number of the only game
    return replace(columns, **own)
