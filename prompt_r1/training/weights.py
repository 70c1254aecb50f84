"""Load the models of a training: the agent that plays, the policy that learns, the frozen reference."""

from dataclasses import dataclass
from pathlib import Path

import torch

from prompt_r1.agent.agent import Agent, load_agent, load_codec
from prompt_r1.agent.frame_file import keep_frame, kept_frame
from prompt_r1.agent.loading import load_policy
from prompt_r1.agent.names import find_agent
from prompt_r1.agent.policy import Policy
from prompt_r1.chat_template import Frame
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.errors import UsageError


@dataclass(frozen=True)
class Models:
    """The copies of the agent's weights that a training needs."""

    start: str | Path  # the untrained agent
    agent: Agent  # plays: a whole copy on each rank, in the compute dtype
    policy: Policy  # learns: float32, perhaps sharded; the agent's own weights where those will do
    reference: Policy | None  # the frozen start, for the KL

    def refresh(self) -> None:
        """Play with the weights as they are now. Called by every rank: sharded weights are gathered."""
        self.agent.policy.copy_weights_from(self.policy)
        self.agent.clear_cache()  # it was computed with the old weights


def load_models(config: TrainConfig, ranks: Ranks, folder: Path) -> Models:
    """The models of a training in this run folder. Called by every rank. Raises UsageError without models."""
    start = ranks.from_first(lambda: find_agent(config.agent, config.seed))
    frame = ranks.from_first(lambda: _frame_of_run(folder, start, config))
    agent = load_agent(start, config, ranks.device, frame=frame)
    policy = load_learner(start, config, agent, ranks)
    if config.checkpointing:
        policy.checkpoint_activations()
    reference = load_reference(start, config, agent, ranks) if config.kl_coef else None
    return Models(start, agent, policy, reference)


def _frame_of_run(folder: Path, start: Path | str, config: TrainConfig) -> Frame:
    """The frame that the run folder keeps; a new run keeps the one of its agent's chat template."""
    frame = kept_frame(folder)
    if frame is None:
        frame = load_codec(start, config).frame
        keep_frame(frame, folder)
    return frame


def load_learner(start: Path | str, config: TrainConfig, agent: Agent, ranks: Ranks) -> Policy:
    """The float32 weights that are trained.

    They are the agent's own where those are float32 and nothing is sharded. Raises UsageError for `--offload`
    without sharding.
    """
    if ranks.mesh is None and config.offload != "none":
        raise UsageError(f"--offload {config.offload} is for sharded weights: give --parallel fsdp or hsdp")
    if ranks.mesh is None and agent.policy.compute == torch.float32:
        return agent.policy
    return _load_share(start, agent, ranks, weights=torch.float32, offload=config.offload == "all")


def load_reference(start: Path | str, config: TrainConfig, agent: Agent, ranks: Ranks) -> Policy:
    """The frozen start model of the KL, at the temperature of sampling."""
    # Sharded weights are gathered in the compute dtype, so the learner's before its first step are these.
    weights = torch.float32 if ranks.mesh is None else agent.policy.compute
    reference = _load_share(start, agent, ranks, weights=weights, offload=config.offload != "none")
    return reference.requires_grad_(False)


def _load_share(
    start: Path | str, agent: Agent, ranks: Ranks, *, weights: torch.dtype, offload: bool
) -> Policy:
    """A whole model on this rank's device or, sharded, this rank's share of it.

    A model that will be sharded is loaded on the CPU, so that a GPU never holds all of it.
    """
    device = ranks.device if ranks.mesh is None else torch.device("cpu")
    compute, temperature = agent.policy.compute, agent.policy.temperature
    # The agent has been checked: the same model, whole, on the device of the computation.
    policy = load_policy(
        start,
        device=device,
        compute=compute,
        weights=weights,
        temperature=temperature,
        check=False,
        fuse_on=ranks.device if agent.policy.fused else None,
    )
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=offload)
    return policy
