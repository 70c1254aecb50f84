"""Start a training run: its ranks, its locked folder, its environment and its models."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from prompt_r1.engine.model_check import check_model
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import open_account, open_environment
from prompt_r1.model.distributed import Ranks, errors_as_rank_lost, start_ranks, stop_ranks
from prompt_r1.model.forked_ranks import forked_ranks
from prompt_r1.model.lora import ADAPTER_ALPHA, add_lora
from prompt_r1.model.policy import Policy
from prompt_r1.model.signals import Interrupt
from prompt_r1.pair.agent import load_agent
from prompt_r1.pair.named_agent import find_agent
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.checkpoint import begin_states
from prompt_r1.training.log import Log
from prompt_r1.training.questions import RunQuestions, with_steps
from prompt_r1.training.run import Run
from prompt_r1.training.run_folder import LOCK, claim, open_run
from prompt_r1.training.weights import load_learner, load_reference


@contextmanager
def start_run(config: TrainConfig) -> Iterator[Run]:
    """Start a run on every rank, in its locked folder.

    Opens signals, ranks, the lock, the event loop, the environment and the log, and closes them in the
    reverse order. Raises UsageError, FatalEnvError or Resumable. An error inside `with` ends the ranks.
    """
    ranks_of_cpu = forked_ranks(config.ranks, device=config.device, questions=config.questions)
    with ranks_of_cpu, Interrupt() as interrupt:
        ranks = start_ranks(config.device, config.layout)
        # A collective may fail because another rank has died. Then this is reported as RankLost.
        with errors_as_rank_lost(ranks):
            folder = ranks.on_first_rank(lambda: open_run(config.out, config.resume))
            with (folder / LOCK).open("a+") as lock, asyncio.Runner() as runner:
                ranks.on_first_rank(lambda: claim(lock, folder))
                run = open_parts(config, folder, ranks, runner, interrupt)
                try:
                    with closing(run.log):
                        yield run
                finally:
                    runner.run(run.environment.close())
        # A rank that raised an error does not come here. It must not wait for the others: torchrun ends them.
        stop_ranks(ranks)


def open_parts(
    config: TrainConfig, folder: Path, ranks: Ranks, runner: asyncio.Runner, interrupt: Interrupt
) -> Run:
    """Open the environment, and load the models and questions. Called by every rank.

    Raises UsageError, FatalEnvError or Resumable.
    """
    # A missing key, or an endpoint that does not answer, is reported before a large model is loaded.
    environment = open_environment(
        config.env,
        config,
        typed=config.typed_environments,
        account=open_account(config, folder, rank=ranks.rank, ranks=ranks.count),
        seed=config.seed,
        device=ranks.device,
    )
    check_on_first_rank(environment, ranks, runner, interrupt)
    start = ranks.on_first_rank(lambda: find_agent(config.agent, config.seed))
    agent = load_agent(start, config, ranks.device)
    reference: Policy | None = None
    if config.adapter_rank:
        # The adapters stand beside the agent's frozen weights. Without them, the policy is the reference.
        policy = agent.policy
        add_lora(policy.model, rank=config.adapter_rank, alpha=ADAPTER_ALPHA, seed=config.seed)
        check_model(policy)  # Again, because a layer that uses its own weight directly ignores the adapters.
        if config.kl_coef:
            reference = policy
    else:
        policy = load_learner(start, agent.policy, ranks, offload=config.offload)
        if config.kl_coef:
            reference = load_reference(start, agent.policy, ranks, offload=config.offload)
    if config.checkpointing:
        policy.checkpoint_activations()
    questions = RunQuestions.load(config, agent.codec)
    # Now the number of questions is known, so --epochs becomes a number of steps.
    config = with_steps(config, len(questions.training))
    optimizer = torch.optim.AdamW(
        policy.trained_parameters(),
        lr=config.lr,
        betas=(0.9, config.beta2),
        weight_decay=config.weight_decay,
        fused=ranks.device.type == "cuda",  # It needs no temporary tensors as large as the weights.
    )
    # Adam's states take their memory before the engine measures how much is free for its KV cache.
    begin_states(optimizer)
    # Every step has the same number of games of this rank, which the progress bar counts.
    games_per_step = len(questions.of_rank(1, ranks)) * config.group_size
    log = Log(
        folder,
        first=ranks.is_first,
        games=config.steps * games_per_step,
        priced=any(config.env_price),
        wandb=config.wandb,
    )
    run = Run(
        config=config,
        folder=folder,
        ranks=ranks,
        runner=runner,
        interrupt=interrupt,
        environment=environment,
        start=start,
        agent=agent,
        policy=policy,
        reference=reference,
        questions=questions,
        optimizer=optimizer,
        games_per_step=games_per_step,
        log=log,
    )
    where = f"{ranks.count} × {ranks.device.type}"
    if ranks.device.type == "cpu":
        where += f", threads: {torch.get_num_threads()}"
    log.say(f"{folder}: agent {config.agent}, environment {config.env}, {where}")
    if ranks.device.type == "cuda":
        run.warm_up()
    return run


def check_on_first_rank(
    environment: Environment, ranks: Ranks, runner: asyncio.Runner, interrupt: Interrupt
) -> None:
    """Check the environment on the first rank. The other ranks learn the result without a request."""
    learned = ranks.on_first_rank(lambda: runner.run(interrupt.guard(environment.check())))
    environment.apply(learned)
