"""How a training starts, and what it has: folder, log, environment, models, questions, optimiser."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.data.sampler import questions_of_step
from prompt_r1.engine.model_check import check_model
from prompt_r1.environments.specs import open_account, open_environment
from prompt_r1.model.distributed import Interrupt, Ranks, lost_ranks_resumable, start_ranks, stop_ranks
from prompt_r1.model.loading import load_policy
from prompt_r1.model.lora import ADAPTER_ALPHA, adapters_removed, add_lora
from prompt_r1.model.packing import Packed
from prompt_r1.model.policy import Policy
from prompt_r1.pair.agent import check_question_lengths, load_agent
from prompt_r1.pair.names import find_agent
from prompt_r1.programs.launcher import launched
from prompt_r1.programs.terminal import printable
from prompt_r1.protocol import Codec
from prompt_r1.settings.train import TrainConfig, warnings_of
from prompt_r1.training.checkpoint import begin_states
from prompt_r1.training.dry_run import estimate
from prompt_r1.training.log import Log
from prompt_r1.training.run_folder import LOCK, claim, open_run
from prompt_r1.types import Question

T = TypeVar("T")


def launch(config: TrainConfig, train: Callable[["Run"], None]) -> None:
    """Run `train` in a locked run folder, on every rank; --dry-run only prints an estimate."""
    if launched("RANK", 0) == 0:
        for warning in warnings_of(config):
            print(printable(f"Note: {warning}"))
    if config.dry_run:
        print(estimate(config))
        return
    with Interrupt() as interrupt:
        ranks = start_ranks(config.device, config.layout)
        with lost_ranks_resumable(ranks):
            folder = ranks.from_first(lambda: open_run(config.out, config.resume))
            with (folder / LOCK).open("a+") as lock, asyncio.Runner() as runner:
                ranks.from_first(lambda: claim(lock, folder))
                train(Run(config, folder, ranks, runner, interrupt))
        stop_ranks(ranks)  # a rank that raised may not wait for the others here: torchrun ends them


class Run:
    """A training run on this rank. Every method is called by every rank or by none."""

    def __init__(
        self, config: TrainConfig, folder: Path, ranks: Ranks, runner: asyncio.Runner, interrupt: Interrupt
    ) -> None:
        """Open, load and build everything. Raises UsageError, FatalEnvError or Resumable."""
        self.config = config
        self.folder = folder
        self.ranks = ranks
        self.interrupt = interrupt
        self._runner = runner
        # Before a large model is loaded: a missing key, or an endpoint that does not answer.
        self.environment = open_environment(
            config.env,
            config,
            typed=config.typed_environments,
            account=open_account(config, folder, rank=ranks.rank, ranks=ranks.count),
            seed=config.seed,
            device=ranks.device,
        )
        self.wait_for(self.environment.check())
        # The untrained agent.
        self.start = ranks.from_first(lambda: find_agent(config.agent, config.seed))
        # Plays: a whole copy of the weights on each rank, in the compute dtype.
        self.agent = load_agent(self.start, config, ranks.device)
        # Learns: adapters beside the agent's frozen weights, or float32 weights, perhaps sharded.
        if config.adapter_rank:
            self.policy = self.agent.policy
            add_lora(self.policy.model, rank=config.adapter_rank, alpha=ADAPTER_ALPHA, seed=config.seed)
            check_model(self.policy)  # again: some models read the weights of their layers themselves
        else:
            self.policy = load_learner(self.start, self.agent.policy, ranks, offload=config.offload)
        if config.checkpointing:
            self.policy.checkpoint_activations()
        # The frozen start, for the KL: `policy` itself where it has adapters.
        self.reference: Policy | None = None
        if config.kl_coef and config.adapter_rank:
            self.reference = self.policy
        elif config.kl_coef:
            played = self.agent.policy
            # Sharded weights are gathered in the compute dtype: a start stored in it is the same model.
            weights = torch.float32 if ranks.mesh is None else played.compute
            reference = load_share(self.start, played, ranks, weights=weights, offload=config.offload)
            self.reference = reference.requires_grad_(False)
        self.questions = RunQuestions.load(config, self.agent.codec)
        self.optimizer = torch.optim.AdamW(
            self.policy.trained_parameters(),
            lr=config.lr,
            betas=(0.9, config.beta2),
            weight_decay=config.weight_decay,
            fused=ranks.device.type == "cuda",  # one kernel, no temporary tensors as large as the weights
        )
        begin_states(self.optimizer)  # before the memory for the KV cache is measured
        self.log = Log(
            folder, first=ranks.first, steps=config.steps, priced=bool(config.env_price), wandb=config.wandb
        )

    def wait_for(self, work: Coroutine[None, None, T]) -> T:
        """Run this rank's share of some asynchronous work.

        A signal cancels it, and an error on one rank stops all of them. Raises Resumable, FatalEnvError or
        UsageError.
        """
        return self.ranks.run(lambda: self._runner.run(self.interrupt.guard(work)))

    def refresh(self) -> None:
        """Play with the weights as they are now. Called by every rank: sharded weights are gathered."""
        self.agent.engine.policy.copy_weights_from(self.policy)
        self.agent.engine.clear_cache()  # it was computed with the old weights

    @torch.no_grad()
    def reference_logprobs(self, packed: Packed) -> Tensor | None:
        """The frozen reference's log-probabilities (N,) of the agent's tokens; None without a KL."""
        if self.reference is None:
            return None
        is_policy = self.reference is self.policy  # which adapters have changed
        with adapters_removed(self.policy.model) if is_policy else nullcontext():
            return self.reference(packed).logprobs


@dataclass(frozen=True)
class RunQuestions:
    """Questions to train on, to validate and to test with."""

    training: Sequence[Question]
    validation: Sequence[Question]
    test: Sequence[Question]
    per_step: int
    seed: int

    @classmethod
    def load(cls, config: TrainConfig, codec: Codec) -> "RunQuestions":
        """Read the questions. Raises UsageError, also for one that leaves the agent no room to write."""
        training, validation = training_and_validation(
            config.data, config.val_data, seed=config.seed, limit=config.val_limit
        )
        test = find_questions(config.test_data, "test", config.seed)
        check_question_lengths([*training, *validation, *test], codec, config.game)
        return cls(training, validation, test, config.questions, config.seed)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, in which a step begins."""
        return (step - 1) * self.per_step // len(self.training)

    def of_rank(self, step: int, ranks: Ranks) -> dict[int, Question]:
        """This rank's questions of a step, by their numbers among the questions of all ranks."""
        questions = questions_of_step(self.training, step, count=self.per_step, seed=self.seed)
        return {number: questions[number] for number in range(ranks.rank, len(questions), ranks.count)}


def load_learner(start: Path | str, played: Policy, ranks: Ranks, *, offload: bool) -> Policy:
    """The float32 weights that learn: the agent's own where those will do."""
    if ranks.mesh is None and played.compute == torch.float32:
        return played
    return load_share(start, played, ranks, weights=torch.float32, offload=offload)


def load_share(
    start: Path | str, played: Policy, ranks: Ranks, *, weights: torch.dtype, offload: bool
) -> Policy:
    """A whole model on this rank's device or, sharded, this rank's share of it.

    A model that will be sharded is loaded on the CPU, so that a GPU never holds all of it. The agent has been
    checked: this is the same model, so it is not checked again.
    """
    device = ranks.device if ranks.mesh is None else torch.device("cpu")
    compute, temperature = played.compute, played.temperature
    policy = load_policy(start, device=device, compute=compute, weights=weights, temperature=temperature)
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=offload)
    return policy
