"""Start a training run: its ranks, its locked folder, its environment and its models."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch.optim import AdamW, Optimizer

from prompt_r1.engine.model_check import check_model
from prompt_r1.environments.check import check_servers
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import open_account, open_environment
from prompt_r1.model.distributed import Ranks, errors_as_rank_lost, start_ranks, stop_ranks
from prompt_r1.model.forked_ranks import forked_ranks
from prompt_r1.model.loading import load_policy
from prompt_r1.model.lora import ADAPTER_ALPHA, add_lora
from prompt_r1.model.policy import Policy
from prompt_r1.pair.agent import load_agent
from prompt_r1.pair.named_agent import find_agent
from prompt_r1.programs.launcher import launcher_number
from prompt_r1.settings.functions import import_advantages, import_reward
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.checkpoint import begin_states
from prompt_r1.training.log import Log
from prompt_r1.training.loss_function import make_loss
from prompt_r1.training.run import Run, RunQuestions, with_steps
from prompt_r1.training.run_folder import LOCK, claim, open_run
from prompt_r1.training.signals import Interrupt, signals_forwarded
from prompt_r1.training.update import importance_cap


@contextmanager
def start_run(config: TrainConfig) -> Iterator[Run]:
    """Start a run on every rank, in its locked folder.

    Opens signals, ranks, the lock, the event loop, the environment and the log, and closes them in the
    reverse order. Raises UsageError, FatalEnvError or Resumable. An error inside `with` ends the ranks.
    """
    ranks_of_cpu = forked_ranks(config.ranks, device=config.device, questions=config.questions)
    with ranks_of_cpu as forks, signals_forwarded(forks), Interrupt() as interrupt:
        layout = layout_of(config, world_size=launcher_number("WORLD_SIZE", default=1))
        ranks = start_ranks(config.device, layout)
        # A collective may fail because another rank has died. Then this is reported as RankLost.
        with errors_as_rank_lost(ranks):
            folder = ranks.on_first_rank(lambda: open_run(config.out))
            with (folder / LOCK).open("a+") as lock, asyncio.Runner() as runner:
                ranks.on_first_rank(lambda: claim(lock, folder))
                run = open_parts(config, folder, ranks, runner, interrupt)
                try:
                    with closing(run.log):
                        yield run
                finally:
                    runner.run(run.environment.close())
            # A rank that raised an error does not come here. It must not wait for the others: torchrun ends
            # them.
            stop_ranks(ranks)


def layout_of(config: TrainConfig, *, world_size: int) -> str:
    """The layout of weights over the ranks, as `start_ranks` takes it: --parallel, or ddp for some `auto`.

    With adapters, and in float32 on a single rank, the learner shares the agent's weights (see `Run.policy`).
    Shared weights are whole on every rank, so `auto` becomes ddp. Otherwise `start_ranks` resolves `auto`.
    """
    shares_weights = config.adapter_rank > 0 or (config.dtype == "float32" and world_size == 1)
    if config.parallel == "auto" and shares_weights:
        return "ddp"
    return config.parallel


def open_parts(
    config: TrainConfig, folder: Path, ranks: Ranks, runner: asyncio.Runner, interrupt: Interrupt
) -> Run:
    """Open the environment, and load the models and questions.

    Raises UsageError, FatalEnvError or Resumable.
    """
    # A missing key, or an endpoint that does not answer, is reported before a large model is loaded.
    environment = open_environment(
        config.env,
        config,
        typed=config.typed_environments,
        # The journal, and this rank's share of the budget.
        account=open_account(config, folder, rank=ranks.rank, ranks=ranks.count),
        seed=config.seed,
        device=ranks.device,
    )
    check_on_first_rank(environment, ranks, runner, interrupt)

    start = ranks.on_first_rank(lambda: find_agent(config.agent, config.seed))
    agent = load_agent(start, config, ranks.device)
    policy = load_learner(
        start,
        agent.policy,
        ranks,
        adapter_rank=config.adapter_rank,
        adapter_alpha=ADAPTER_ALPHA,
        seed=config.seed,
        offload=config.offload,
    )
    reference = load_reference(start, agent.policy, ranks, config) if config.kl_coef else None
    if config.checkpointing:
        policy.checkpoint_activations()

    questions = RunQuestions.load(config, agent.codec)
    # Now the number of questions is known, so --epochs becomes a number of steps.
    config = with_steps(config, len(questions.training))
    # This rank plays the same number of games in every step. The progress bar counts them.
    games_per_step = len(questions.of_rank(1, ranks)) * config.group_size
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
        games_per_step=games_per_step,
        rule=config.base_rule,
        own_reward=import_reward(config.reward) if config.reward else None,
        own_advantages=import_advantages(config.advantage_function) if config.advantage_function else None,
        loss_function=make_loss(config, importance_cap=importance_cap(policy)),
        optimizer=make_optimizer(policy, config, ranks.device),
        log=open_log(config, folder, ranks, games=config.steps * games_per_step),
    )
    where = f"{ranks.count} × {ranks.device.type}"
    if ranks.device.type == "cpu":
        where += f", threads: {torch.get_num_threads()}"
    run.log.say(f"{folder}: agent {config.agent}, environment {config.env}, {where}")
    if ranks.device.type == "cuda":
        run.warm_up()
    return run


def open_log(config: TrainConfig, folder: Path, ranks: Ranks, *, games: int) -> Log:
    """Open the log of a run with this many games on this rank.

    Every rank raises UsageError if the first rank has no account for --wandb.
    """
    return ranks.on_every_rank(
        lambda: Log(
            folder, first=ranks.is_first, games=games, priced=any(config.env_price), wandb=config.wandb
        )
    )


def check_on_first_rank(
    environment: Environment, ranks: Ranks, runner: asyncio.Runner, interrupt: Interrupt
) -> None:
    """Check the environment on the first rank. If the check fails, every rank raises its error."""
    ranks.on_first_rank(lambda: runner.run(interrupt.guard(check_servers(environment))))


def load_learner(
    start: Path | str,
    agent_policy: Policy,
    ranks: Ranks,
    *,
    adapter_rank: int,
    adapter_alpha: float,
    seed: int,
    offload: bool,
) -> Policy:
    """The policy that learns. `Run.policy` explains which weights it shares with the agent."""
    if adapter_rank:
        add_lora(agent_policy.model, rank=adapter_rank, alpha=adapter_alpha, seed=seed)
        # Checked again, because a layer whose code reads its weight directly would ignore its adapter.
        check_model(agent_policy)
        return agent_policy
    if ranks.mesh is None and agent_policy.compute_dtype == torch.float32:
        return agent_policy
    return load_share(start, agent_policy, ranks, weights=torch.float32, offload=offload)


def load_reference(start: Path | str, agent_policy: Policy, ranks: Ranks, config: TrainConfig) -> Policy:
    """The frozen start, from which the KL is measured."""
    if config.adapter_rank:
        return agent_policy  # Without its adapters, it is the start.
    # Each forward gathers sharded weights in the compute dtype anyway, so they may be stored in it.
    weights = torch.float32 if ranks.mesh is None else agent_policy.compute_dtype
    reference = load_share(start, agent_policy, ranks, weights=weights, offload=config.offload)
    return reference.requires_grad_(False)


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


def make_optimizer(policy: Policy, config: TrainConfig, device: torch.device) -> Optimizer:
    """AdamW of the weights that learn, with its states. `device` is where the rank computes."""
    optimizer = AdamW(
        policy.trained_parameters(),
        lr=config.lr,
        betas=(0.9, config.beta2),
        weight_decay=config.weight_decay,
        # The fused AdamW needs no temporary tensors as large as the weights.
        fused=device.type == "cuda",
    )
    # The states take their memory before the engine measures how much is free for its KV cache.
    begin_states(optimizer)
    return optimizer
