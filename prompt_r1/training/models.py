"""Load the models of a training: the agent that plays, the policy that learns, the frozen reference."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prompt_r1.agent.adapters import ADAPTER_ALPHA, adapters_removed
from prompt_r1.agent.agent import Agent, load_agent, load_codec
from prompt_r1.agent.frame_file import keep_frame, kept_frame
from prompt_r1.agent.loading import load_policy
from prompt_r1.agent.model_check import add_checked_lora
from prompt_r1.agent.names import find_agent
from prompt_r1.agent.packing import Packed
from prompt_r1.agent.policy import Policy
from prompt_r1.chat_template import Frame
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.errors import UsageError
from prompt_r1.training.run import Run


@dataclass(frozen=True)
class Models:
    """The copies of the agent's weights that a training needs."""

    start: str | Path  # the untrained agent
    agent: Agent  # plays: a whole copy on each rank, in the compute dtype
    policy: Policy  # learns: float32, perhaps sharded; the agent's own weights where those will do
    reference: (
        Policy | None
    )  # the frozen start, for the KL; None: there is none, or `policy` without adapters
    reference_is_policy: bool = False  # beside adapters the frozen weights are the reference

    def refresh(self) -> None:
        """Play with the weights as they are now. Called by every rank: sharded weights are gathered."""
        self.agent.policy.copy_weights_from(self.policy)
        self.agent.clear_cache()  # it was computed with the old weights

    @torch.no_grad()
    def reference_logprobs(self, packed: Packed) -> Tensor | None:
        """The frozen reference's log-probabilities (N,) of the agent's tokens; None without a KL."""
        if self.reference_is_policy:
            with adapters_removed(self.policy.model):
                return self.policy(packed).logprobs
        return None if self.reference is None else self.reference(packed).logprobs


def load_models(run: Run) -> Models:
    """The models of a training. Called by every rank. Raises UsageError without models."""
    config, ranks = run.config, run.ranks
    start = ranks.from_first(lambda: find_agent(config.agent, config.seed))
    frame = ranks.from_first(lambda: _frame_of_run(run, start))
    agent = load_agent(start, config, ranks.device, frame=frame)
    policy = load_learner(
        start, agent, ranks, adapter_rank=config.adapter_rank, seed=config.seed, offload=config.offload
    )
    if config.checkpointing:
        policy.checkpoint_activations()
    reference = None
    if config.kl_coef and not config.adapter_rank:
        reference = load_reference(start, agent, ranks, offload=config.offload)
    return Models(start, agent, policy, reference, bool(config.kl_coef and config.adapter_rank))


def _frame_of_run(run: Run, start: Path | str) -> Frame:
    """The frame that the run folder keeps; a new run keeps the one of its agent's chat template."""
    frame = kept_frame(run.folder)
    if frame is None:
        frame = load_codec(start, run.config).frame
        keep_frame(frame, run.folder)
    return frame


def load_learner(
    start: Path | str, agent: Agent, ranks: Ranks, *, adapter_rank: int, seed: int, offload: str
) -> Policy:
    """The policy that learns: float32 weights, or adapters beside the frozen weights of the agent.

    The weights are the agent's own where those are float32 and nothing is sharded. Raises UsageError for
    `--offload` without sharding, and for a model that adapters do not fit.
    """
    if adapter_rank:
        add_checked_lora(agent.policy, rank=adapter_rank, alpha=ADAPTER_ALPHA, seed=seed)
        return agent.policy
    if ranks.mesh is None and offload != "none":
        raise UsageError(f"--offload {offload} is for sharded weights: give --parallel fsdp or hsdp")
    if ranks.mesh is None and agent.policy.compute == torch.float32:
        return agent.policy
    return _load_share(start, agent, ranks, weights=torch.float32, offload=offload == "all")


def load_reference(start: Path | str, agent: Agent, ranks: Ranks, *, offload: str) -> Policy:
    """The frozen start model of the KL, at the temperature of sampling."""
    # Sharded weights are gathered in the compute dtype, so the learner's before its first step are these.
    weights = torch.float32 if ranks.mesh is None else agent.policy.compute
    reference = _load_share(start, agent, ranks, weights=weights, offload=offload != "none")
    return reference.requires_grad_(False)


def _load_share(
    start: Path | str, agent: Agent, ranks: Ranks, *, weights: torch.dtype, offload: bool
) -> Policy:
    """A whole model on this rank's device or, sharded, this rank's share of it.

    A model that will be sharded is loaded on the CPU, so that a GPU never holds all of it.
    """
    device = ranks.device if ranks.mesh is None else torch.device("cpu")
    # The agent has been checked: the same model, whole, on the device of the computation.
    policy = load_policy(
        start,
        device=device,
        compute=agent.policy.compute,
        weights=weights,
        temperature=agent.policy.temperature,
        check=False,
        fuse_on=ranks.device if agent.policy.fused else None,
    )
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=offload)
    return policy
