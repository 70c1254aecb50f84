"""What a training run is made of: environment, models, questions, loss and optimiser."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from prompt_r1.agent.agent import check_question_lengths
from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.data.sampler import digest_of, questions_of_step
from prompt_r1.distributed.ranks import Ranks, assign_questions
from prompt_r1.environments.opening import Environments
from prompt_r1.environments.pool import Pool
from prompt_r1.grpo import Loss, grpo_loss, k3
from prompt_r1.options.objectives import RATIOS, importance_weights, weighted_loss
from prompt_r1.protocol import Codec
from prompt_r1.training.micro_batches import Batch
from prompt_r1.training.models import Models, load_models
from prompt_r1.training.run import Run
from prompt_r1.training.update import Update
from prompt_r1.types import Question

# Of a micro-batch; the tensors (N,) are log-probabilities: policy, old policy, reference.
Objective = Callable[[Tensor, Tensor, Tensor, Batch], Loss]


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


def make_objective(
    *,
    clip: float,
    clip_high: float,
    kl_coef: float,
    ratio: str,
    importance_cap: float,
    dual_clip: float = 0.0,
    reverse_kl: bool = False,
) -> Objective:
    """`clip_high` 0: that of `clip`. `ratio`: a key of RATIOS. `importance_cap` 0: no importance weights."""

    def papers(logprobs: Tensor, old: Tensor, ref: Tensor, batch: Batch) -> Loss:
        return grpo_loss(logprobs, old, ref, batch.advantages, batch.weights, clip=clip, kl_coef=kl_coef)

    def other(logprobs: Tensor, old: Tensor, ref: Tensor, batch: Batch) -> Loss:
        return weighted_loss(
            RATIOS[ratio](batch.games, logprobs - old),
            importance_weights(old, batch.engine, cap=importance_cap),
            k3(logprobs, ref),
            batch.advantages,
            batch.weights,
            clip=(clip, clip_high or clip),
            kl_coef=kl_coef,
            dual_clip=dual_clip,
            reverse_kl=reverse_kl,
        )

    changed = ratio != "token" or clip_high or importance_cap or dual_clip or reverse_kl
    return other if changed else papers


@dataclass(frozen=True)
class Parts:
    """The parts of a training run on this rank."""

    environment: Pool
    models: Models
    questions: RunQuestions
    optimizer: Optimizer
    objective: Objective  # eq. 17, or what the settings make of it
    update: Update


def load_parts(run: Run) -> Parts:
    """Open, load and build the parts. Called by every rank. Raises UsageError, FatalEnvError or Resumable."""
    config, ranks = run.config, run.ranks
    environment = Environments(config, seed=config.seed, folder=run.folder, ranks=ranks).open(config.env)
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
    # In float32 the engine samples from the policy itself.
    importance_cap = config.importance_cap if policy.compute.itemsize < 4 else 0.0
    objective = make_objective(
        clip=config.clip,
        clip_high=config.clip_high,
        kl_coef=config.kl_coef,
        ratio=config.ratio,
        importance_cap=importance_cap,
        dual_clip=config.dual_clip,
        reverse_kl=config.reverse_kl,
    )
    update = Update(
        policy,
        optimizer,
        ranks,
        grad_clip=config.grad_clip,
        token_mean=config.loss == "token-mean",
        tokens_per_batch=config.tokens_per_batch,
        importance_cap=importance_cap,
        least_games=config.mini_batch if config.drop_even_groups else 0,
    )
    return Parts(environment, models, questions, optimizer, objective, update)
