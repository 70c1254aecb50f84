"""The parts of a run: environment, models, questions, loss, optimiser."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from prompt_r1.agent.agent import Agent, check_question_lengths, load_agent
from prompt_r1.agent.loading import load_policy
from prompt_r1.agent.lora import ADAPTER_ALPHA, adapters_off
from prompt_r1.agent.model_check import add_checked_lora
from prompt_r1.agent.names import find_agent
from prompt_r1.agent.packing import Packed
from prompt_r1.agent.policy import Policy
from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.data.sampler import assign_questions, digest_of, questions_of_step
from prompt_r1.distributed import Ranks
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import Environments
from prompt_r1.errors import UsageError
from prompt_r1.protocol import Codec
from prompt_r1.training.run import Run
from prompt_r1.training.update import Update
from prompt_r1.types import Question


@dataclass(frozen=True)
class RunQuestions:
    """Questions to train on, to validate and to test with."""

    training: Sequence[Question]
    validation: Sequence[Question]
    test: Sequence[Question]
    per_step: int
    seed: int
    digest: str  # of the training questions

    @classmethod
    def load(cls, run: Run, codec: Codec) -> "RunQuestions":
        """Read the questions. Raises UsageError, also for one that leaves the agent no room to write."""
        config = run.config
        training, validation = training_and_validation(
            config.data, config.val_data, seed=config.seed, limit=config.val_limit
        )
        test = find_questions(config.test_data, "test", config.seed)
        check_question_lengths([*training, *validation, *test], codec, config.game)
        return cls(training, validation, test, config.questions, config.seed, digest_of(training))

    def epoch(self, step: int) -> int:
        """The epoch, from 0, in which a step begins."""
        return (step - 1) * self.per_step // len(self.training)

    def of_rank(self, step: int, ranks: Ranks) -> dict[int, Question]:
        """This rank's questions of a step, by their numbers among the questions of all ranks."""
        questions = questions_of_step(self.training, step, count=self.per_step, seed=self.seed)
        mine = assign_questions([len(question.text) for question in questions], ranks.count)[ranks.rank]
        return {number: questions[number] for number in mine}


@dataclass(frozen=True)
class Models:
    """The copies of the agent's weights that a training needs."""

    start: str | Path  # the untrained agent
    agent: Agent  # plays: a whole copy on each rank, in the compute dtype
    policy: Policy  # learns: float32, perhaps sharded; the agent's own weights where those will do
    reference: Policy | None  # the frozen start, for the KL: `policy` itself, where it has adapters

    def refresh(self) -> None:
        """Play with the weights as they are now. Called by every rank: sharded weights are gathered."""
        self.agent.policy.copy_weights_from(self.policy)
        self.agent.engine.clear_cache()  # it was computed with the old weights

    @torch.no_grad()
    def reference_logprobs(self, packed: Packed) -> Tensor | None:
        """The frozen reference's log-probabilities (N,) of the agent's tokens; None without a KL."""
        if self.reference is None:
            return None
        with adapters_off(self.reference.model):
            return self.reference(packed).logprobs


def load_models(run: Run) -> Models:
    """The models of a training. Called by every rank. Raises UsageError without models."""
    config, ranks = run.config, run.ranks
    start = ranks.from_first(lambda: find_agent(config.agent, config.seed))
    agent = load_agent(start, config, ranks.device)
    policy = load_learner(
        start, agent, ranks, adapter_rank=config.adapter_rank, seed=config.seed, offload=config.offload
    )
    if config.checkpointing:
        policy.checkpoint_activations()
    reference = None
    if config.kl_coef:
        adapted = config.adapter_rank > 0
        reference = policy if adapted else load_reference(start, agent, ranks, offload=config.offload)
    return Models(start, agent, policy, reference)


def load_learner(
    start: Path | str, agent: Agent, ranks: Ranks, *, adapter_rank: int, seed: int, offload: bool
) -> Policy:
    """The policy that learns: float32 weights, or adapters beside the frozen weights of the agent.

    The weights are the agent's own where those are float32 and nothing is sharded. Raises UsageError for
    `--offload` without sharding, and for a model that adapters do not fit.
    """
    if adapter_rank:
        add_checked_lora(agent.policy, rank=adapter_rank, alpha=ADAPTER_ALPHA, seed=seed)
        return agent.policy
    if ranks.mesh is None and offload:
        raise UsageError("--offload is for sharded weights: give --parallel fsdp")
    if ranks.mesh is None and agent.policy.compute == torch.float32:
        return agent.policy
    return _load_share(start, agent, ranks, weights=torch.float32, offload=offload)


def load_reference(start: Path | str, agent: Agent, ranks: Ranks, *, offload: bool) -> Policy:
    """The frozen start model of the KL, at the temperature of sampling."""
    # Sharded weights are gathered in the compute dtype, so the learner's before its first step are these.
    weights = torch.float32 if ranks.mesh is None else agent.policy.compute
    reference = _load_share(start, agent, ranks, weights=weights, offload=offload)
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
    )
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=offload)
    return policy


@dataclass(frozen=True)
class Parts:
    """The parts of a training run on this rank."""

    environment: Environment
    models: Models
    questions: RunQuestions
    optimizer: Optimizer
    update: Update


def load_parts(run: Run) -> Parts:
    """Open, load and build the parts. Called by every rank. Raises UsageError, FatalEnvError or Resumable."""
    config, ranks = run.config, run.ranks
    environment = Environments(
        config, seed=config.seed, device=ranks.device, folder=run.folder, rank=ranks.rank, ranks=ranks.count
    ).open(config.env)
    run.wait_for(environment.check())
    models = load_models(run)
    policy = models.policy
    questions = RunQuestions.load(run, models.agent.codec)
    optimizer = torch.optim.AdamW(
        policy.trained_parameters(),
        lr=config.lr,
        betas=(0.9, config.beta2),
        weight_decay=config.weight_decay,
        fused=ranks.device.type == "cuda",  # one kernel, no temporary tensors as large as the weights
    )
    update = Update(
        policy,
        optimizer,
        ranks,
        grad_clip=config.grad_clip,
        token_mean=config.loss == "token-mean",
        tokens_per_batch=config.tokens_per_batch,
        # In float32 the engine samples from the policy itself.
        importance_cap=config.importance_cap if policy.compute.itemsize < 4 else 0.0,
        least_games=config.mini_batch if config.drop_even_groups else 0,
    )
    return Parts(environment, models, questions, optimizer, update)
