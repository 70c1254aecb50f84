"""The models of a training: the agent plays, the policy learns, and the reference is the frozen start.

Each rank has the whole agent, in the compute dtype. The settings decide what the other two are:

    --parallel, compute dtype   policy                                reference, for the KL
    ddp, with adapters          the agent's policy with adapters      the same policy without its adapters
    ddp, float32                the agent's policy itself             a frozen copy
    ddp, 16 bits                a copy with float32 weights           a frozen copy
    fsdp or hsdp                a sharded copy with float32 weights   a sharded, frozen copy
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from prompt_r1.engine.model_check import check_model
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.loading import load_policy
from prompt_r1.model.lora import ADAPTER_ALPHA, add_lora
from prompt_r1.model.policy import Policy
from prompt_r1.pair.agent import Agent, load_agent
from prompt_r1.settings.train import TrainConfig


def layout_of(config: TrainConfig, device: torch.device, *, world_size: int) -> str:
    """The layout of the weights over the ranks, by --parallel: ddp, fsdp or hsdp.

    `auto` is hsdp on GPUs and ddp on CPUs. But it is ddp on GPUs, too, if the policy can share the agent's
    weights, which are whole on every rank: with adapters, and in float32 on a single rank.
    """
    if config.parallel != "auto":
        return config.parallel
    shares_weights = config.adapter_rank > 0 or (config.dtype == "float32" and world_size == 1)
    return "ddp" if device.type == "cpu" or shares_weights else "hsdp"


@dataclass(frozen=True)
class Models:
    """The models of a run on this rank."""

    agent: Agent
    policy: Policy
    reference: Policy | None  # None: --kl-coef is 0


def load_models(start: Path | str, config: TrainConfig, ranks: Ranks) -> Models:
    """Load the models of a run. Raises UsageError."""
    agent = load_agent(start, config, ranks.device)
    if config.adapter_rank:
        policy = with_adapters(agent.policy, rank=config.adapter_rank, alpha=ADAPTER_ALPHA, seed=config.seed)
    else:
        policy = load_learner(start, agent.policy, ranks, offload=config.offload)
    reference = load_reference(start, agent.policy, ranks, config) if config.kl_coef else None
    if config.checkpointing:
        policy.checkpoint_activations()
    return Models(agent, policy, reference)


def with_adapters(agent_policy: Policy, *, rank: int, alpha: float, seed: int) -> Policy:
    """The policy that learns with adapters: the agent's own policy, in which only new adapters learn."""
    add_lora(agent_policy.model, rank=rank, alpha=alpha, seed=seed)
    # Checked again, because a layer whose code reads its weight directly would ignore its adapter.
    check_model(agent_policy)
    return agent_policy


def load_learner(start: Path | str, agent_policy: Policy, ranks: Ranks, *, offload: bool) -> Policy:
    """The policy that learns with all weights: the agent's own policy, or another copy of the start."""
    if ranks.mesh is None and agent_policy.compute_dtype == torch.float32:
        return agent_policy
    return load_copy(start, agent_policy, ranks, weights_dtype=torch.float32, offload=offload)


def load_reference(start: Path | str, agent_policy: Policy, ranks: Ranks, config: TrainConfig) -> Policy:
    """The frozen start, from which the KL is measured."""
    if config.adapter_rank:
        return agent_policy  # Without its adapters, it is the start.
    # Each forward gathers sharded weights in the compute dtype anyway, so they may be stored in it.
    weights_dtype = torch.float32 if ranks.mesh is None else agent_policy.compute_dtype
    reference = load_copy(start, agent_policy, ranks, weights_dtype=weights_dtype, offload=config.offload)
    return reference.requires_grad_(False)


def load_copy(
    start: Path | str, agent_policy: Policy, ranks: Ranks, *, weights_dtype: torch.dtype, offload: bool
) -> Policy:
    """Load the agent's model once more: this rank's share of it if weights are sharded, otherwise all of it.

    A model that will be sharded is loaded on the CPU, so that a GPU never holds all of it. The agent's model
    has been checked, so the copy is not checked again.
    """
    device = ranks.device if ranks.mesh is None else torch.device("cpu")
    policy = load_policy(
        start,
        device=device,
        compute_dtype=agent_policy.compute_dtype,
        weights_dtype=weights_dtype,
        temperature=agent_policy.temperature,
        vocabulary=agent_policy.vocabulary,
    )
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=offload)
    return policy
