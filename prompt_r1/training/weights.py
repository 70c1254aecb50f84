"""Load the weights that learn, and the frozen weights from which the KL is measured."""

from pathlib import Path

import torch

from prompt_r1.model.distributed import Ranks
from prompt_r1.model.loading import load_policy
from prompt_r1.model.policy import Policy


def load_learner(start: Path | str, agent_policy: Policy, ranks: Ranks, *, offload: bool) -> Policy:
    """The policy with the float32 weights that learn, which may be sharded.

    If the agent itself has float32 weights, and they are not sharded, this is the agent's own policy.
    """
    if ranks.mesh is None and agent_policy.compute_dtype == torch.float32:
        return agent_policy
    return load_share(start, agent_policy, ranks, weights=torch.float32, offload=offload)


def load_reference(start: Path | str, agent_policy: Policy, ranks: Ranks, *, offload: bool) -> Policy:
    """Load the frozen start, from which the KL is measured."""
    # Each forward gathers sharded weights in the compute dtype anyway, so they may be stored in it.
    weights = torch.float32 if ranks.mesh is None else agent_policy.compute_dtype
    return load_share(start, agent_policy, ranks, weights=weights, offload=offload).requires_grad_(False)


def load_share(
    start: Path | str, agent_policy: Policy, ranks: Ranks, *, weights: torch.dtype, offload: bool
) -> Policy:
    """Load a whole model on this rank's device or, if weights are sharded, this rank's share of it.

    A model that will be sharded is loaded on the CPU, so that a GPU never holds all of it. It is the model of
    the agent, which has been checked, so it is not checked again.
    """
    device = ranks.device if ranks.mesh is None else torch.device("cpu")
    policy = load_policy(
        start,
        device=device,
        compute_dtype=agent_policy.compute_dtype,
        weights=weights,
        temperature=agent_policy.temperature,
        vocabulary=agent_policy.vocabulary,
    )
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=offload)
    return policy
