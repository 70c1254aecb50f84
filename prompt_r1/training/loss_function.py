"""The loss of a run: eq. 17 or the user's own (--loss-function).

The user's loss is tried before the first game, and each of its results is checked.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from prompt_r1.errors import UsageError
from prompt_r1.grpo import Loss, LossColumns, grpo_loss
from prompt_r1.settings.functions import OwnLoss, user_code
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.batches import made_up_game, make_batch
from prompt_r1.training.update import IMPORTANCE_CAP
from prompt_r1.types import ScoredGame, Trajectory

# The games of the trial of a user's loss.
TRIAL = (
    made_up_game([-0.5, -1.2, -0.1, -2.0], advantage=1.0),
    made_up_game([-0.7, -0.3], advantage=-1.5),
    made_up_game([-1.0, -0.2, -1.6], advantage=0.5),
)

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
    logprobs, columns = batch_of_trial(TRIAL, has_reference=has_reference)
    together = loss_of(logprobs, columns).total
    together.backward()
    if logprobs.grad is None or not logprobs.grad.isfinite().all():
        raise UsageError(f"{where} its total has no finite gradient with respect to logprobs")

    one_by_one = 0.0
    for games in ([TRIAL[0]], [TRIAL[1]], [TRIAL[2]], []):  # A rank may have no game, and its loss must be 0.
        one_by_one += loss_of(*batch_of_trial(games, has_reference=has_reference)).total.item()
    if not math.isclose(one_by_one, together.item(), rel_tol=1e-3, abs_tol=1e-5):
        raise UsageError(
            f"{where} their losses one by one add up to {one_by_one:.4g}, but together it is "
            f"{together.item():.4g}; a step is the sum of its micro-batches, so sum by columns.weights"
        )


def batch_of_trial(games: Sequence[ScoredGame], *, has_reference: bool) -> tuple[Tensor, LossColumns]:
    """A micro-batch of some games of the trial: log π_θ and the columns of their agent tokens.

    Some tokens are likelier under π_θ than under π_old and π_ref, others less likely.
    """

    def token_weight(trajectory: Trajectory) -> float:
        return 1 / (len(TRIAL) * sum(trajectory.sampled))

    batch = make_batch(games, token_weight, torch.device("cpu"))
    logprobs = (1.2 * batch.engine).requires_grad_()
    columns = LossColumns(
        old=-1.1 * batch.engine.square(),
        reference=-0.9 * batch.engine.square() if has_reference else None,
        engine=batch.engine,
        advantages=batch.advantages,
        weights=batch.weights,
        game=batch.game,
    )
    return logprobs, columns
