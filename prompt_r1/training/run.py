"""The parts of a training run on this rank, its questions, and what the loop of train.py asks of them."""

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.data.sampler import questions_of_step
from prompt_r1.environments.environment import Environment
from prompt_r1.grpo import OwnAdvantages
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.lora import adapters_removed
from prompt_r1.model.packing import Packed
from prompt_r1.model.policy import Policy
from prompt_r1.pair.agent import Agent
from prompt_r1.reward import OwnReward
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.batches import Batch, games_to_learn_from, micro_batches_of, mini_batches_of
from prompt_r1.training.log import Log
from prompt_r1.training.loss_function import LossFunction
from prompt_r1.training.signals import Interrupt
from prompt_r1.training.update import GapLimit
from prompt_r1.types import Question, ScoredGame

T = TypeVar("T")


@dataclass(frozen=True)
class RunQuestions:
    """Questions to train on, to validate and to test with."""

    training: Sequence[Question]
    validation: Sequence[Question]
    test: Sequence[Question]
    per_step: int
    seed: int

    @classmethod
    def read(cls, config: TrainConfig) -> "RunQuestions":
        """Read the questions of a run."""
        training, validation = training_and_validation(
            config.data, config.val_data, seed=config.seed, limit=config.val_limit
        )
        test = find_questions(config.test_data, "test", config.seed)
        return cls(training, validation, test, per_step=config.questions, seed=config.seed)

    @property
    def all(self) -> list[Question]:
        """The questions of all three kinds."""
        return [*self.training, *self.validation, *self.test]

    def epoch(self, step: int, number: int) -> int:
        """How often the run has drawn question `number` of this step before."""
        return ((step - 1) * self.per_step + number) // len(self.training)

    def of_rank(self, step: int, ranks: Ranks) -> dict[int, Question]:
        """This rank's questions of a step, by their numbers in the step."""
        questions = questions_of_step(self.training, step, count=self.per_step, seed=self.seed)
        return dict(ranks.share(list(enumerate(questions))))


@dataclass(kw_only=True)
class Run:
    """A training run on this rank. Every method is called by every rank or by none."""

    config: TrainConfig
    folder: Path
    ranks: Ranks
    runner: asyncio.Runner
    interrupt: Interrupt
    environment: Environment
    start: Path | str  # the agent that the run starts from: the folder or hub id of its weights
    agent: Agent  # It plays. models.py says which weights it shares with the next two.
    policy: Policy  # It learns.
    reference: Policy | None  # The frozen start, for the KL; None: no KL.
    questions: RunQuestions
    # The user may replace the reward and the loss, and change the advantages.
    own_reward: OwnReward | None  # None: eq. 15 alone
    own_advantages: OwnAdvantages | None  # None: eq. 16 alone
    loss_function: LossFunction  # eq. 17
    optimizer: Optimizer
    gap_limit: GapLimit  # how far the log-probabilities of engine and policy may differ
    log: Log

    def wait_for(self, work: Coroutine[None, None, T]) -> T:
        """Run this rank's share of some asynchronous work, and return its result.

        A signal cancels the work. An error on one rank is raised on all of them. Raises Resumable or
        UsageError.
        """
        own_share = self.interrupt.guard(work)
        with self.ranks.shared_errors():
            return self.runner.run(own_share)

    def mini_batches(self, games_PG: Sequence[Sequence[ScoredGame]]) -> list[list[Batch]]:
        """Make this rank's micro-batches of each optimiser step, from the games that this rank played."""
        config, ranks = self.config, self.ranks
        used_PG = games_to_learn_from(
            games_PG, ranks, mask_truncated=config.mask_truncated, skip_no_spread=config.skip_no_spread
        )
        token_mean = config.loss == "token-mean"
        return [
            micro_batches_of(games, ranks, tokens_per_batch=config.tokens_per_batch, token_mean=token_mean)
            for games in mini_batches_of(used_PG, ranks, mini_batch=config.mini_batch)
        ]

    @torch.no_grad()
    def reference_logprobs(self, packed: Packed) -> Tensor | None:
        """The log-probabilities (N,) of the agent's tokens under the reference; None if there is none."""
        if self.reference is None:
            return None
        # With LoRA, the reference is the policy without its adapters. Otherwise there is nothing to remove.
        with adapters_removed(self.reference.model):
            return self.reference(packed).logprobs

    def refresh(self) -> None:
        """Play with the weights as they are now. Sharded weights are gathered from all ranks."""
        self.agent.policy.copy_weights_from(self.policy)
        self.agent.engine.drop_cache()  # It belongs to the old weights.


def with_steps(config: TrainConfig, count: int) -> TrainConfig:
    """Replace --epochs by the number of steps that it means for `count` training questions, rounded up."""
    if not config.epochs:
        return config
    steps = math.ceil(config.epochs * count / config.questions)
    return replace(config, steps=steps, epochs=0)


def repetition_note(config: TrainConfig, count: int) -> str:
    """A sentence on how often a run repeats its `count` training questions; "" if it does not."""
    drawn = config.steps * config.questions
    if drawn <= count:
        return ""
    return (
        f"Note: training repeats its questions: {config.steps:,} steps of {config.questions:,} draw each of "
        f"the {count:,} questions {drawn / count:,.1f} times on average (--epochs sets this number)"
    )
