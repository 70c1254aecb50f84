"""Compute one full micro-batch before the first game, so that the size of the KV cache leaves room for it.

On GPUs the cache takes a share of what is free beside this process's own peak so far (`agent.kv_cache`).
"""

from prompt_r1.training.batches import make_batch
from prompt_r1.training.run import Run
from prompt_r1.types import Completion, Question, ScoredGame, Trajectory


def warm_up(run: Run, *, game_tokens: int, tokens: int) -> None:
    """Take an optimiser step that changes nothing, on games of `game_tokens` with `tokens` in all.

    The weights of the loss are 0, and so are the gradients and the learning rate. Called by every rank,
    before a checkpoint is loaded: it leaves no state.
    """
    game = Trajectory(Question("warm-up", "", "", ()))
    game.add_context([0])
    game.add_sampled(Completion([0] * (game_tokens - 1), [0.0] * (game_tokens - 1), finished=True))
    games = [ScoredGame(game, None, 0.0)] * max(1, tokens // game_tokens)
    batch, optimizer = make_batch(games, lambda trajectory: 0.0, run.policy.device), run.optimizer
    run.reference_logprobs(batch.packed)
    (batch.weights * run.policy(batch.packed).logprobs).sum().backward()
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
