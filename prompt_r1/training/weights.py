"""Load the weights that are trained and the frozen reference."""

from pathlib import Path

import torch

from prompt_r1.agent.player import Player
from prompt_r1.agent.policy import Policy, load_policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.errors import UsageError


def load_learner(start: Path | str, config: TrainConfig, player: Player, ranks: Ranks) -> Policy:
    """The float32 weights that are trained: the player's own where those are float32 and nothing is sharded,
    else others, which the player follows. Raises UsageError for an `--offload` of what is not sharded.
    """
    if ranks.mesh is None and config.offload != "none":
        raise UsageError(f"--offload {config.offload} is for sharded weights: give --parallel fsdp or hsdp")
    if ranks.mesh is None and player.policy.compute == torch.float32:
        return player.policy
    return _load_share(start, player, ranks, weights=torch.float32, offload=config.offload == "all")


def load_reference(start: Path | str, config: TrainConfig, player: Player, ranks: Ranks) -> Policy:
    """The frozen start model of the KL, at the temperature of sampling."""
    # Sharded weights are gathered in the compute dtype: the learner's before its first step are these.
    weights = torch.float32 if ranks.mesh is None else player.policy.compute
    return _load_share(
        start, player, ranks, weights=weights, offload=config.offload != "none"
    ).requires_grad_(False)


def _load_share(
    start: Path | str, player: Player, ranks: Ranks, *, weights: torch.dtype, offload: bool
) -> Policy:
    """A model whole on this rank's device, or this rank's share of it: then a GPU never holds the whole."""
    device = ranks.device if ranks.mesh is None else torch.device("cpu")
    like = player.policy
    policy = load_policy(
        start, device=device, compute=like.compute, weights=weights, temperature=like.temperature
    )
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=offload)
    return policy
