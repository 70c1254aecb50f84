"""Start a training run: its ranks, its locked folder, and the parts of a `Run`."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch.optim import AdamW, Optimizer

from prompt_r1.environments.check import check_servers
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import open_account, open_environment
from prompt_r1.model.distributed import Ranks, errors_as_rank_lost, start_ranks, stop_ranks
from prompt_r1.model.machine import pick_device, use_threads
from prompt_r1.model.policy import Policy
from prompt_r1.pair.agent import check_question_lengths
from prompt_r1.programs.launcher import launcher_number
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.batches import made_up_game, make_batch
from prompt_r1.training.checkpoint import begin_states
from prompt_r1.training.forked_ranks import fork_ranks, rank_count
from prompt_r1.training.log import Log
from prompt_r1.training.loss_function import loss_of_run, try_loss
from prompt_r1.training.models import layout_of, load_models
from prompt_r1.training.preflight import ChosenTraining
from prompt_r1.training.run import Run, RunQuestions, repetition_note, with_steps
from prompt_r1.training.run_folder import LOCK, claim
from prompt_r1.training.signals import Interrupt
from prompt_r1.training.update import gap_limit_of, importance_cap_of


@contextmanager
def start_run(chosen: ChosenTraining) -> Iterator[Run]:
    """Start a run on every rank, in its locked folder.

    Opens signals, ranks, the lock, the event loop, the environment and the log, and closes them in the
    reverse order. Raises UsageError or Resumable. An error inside `with` ends the ranks.
    """
    config = chosen.config
    with Interrupt() as interrupt:
        count = rank_count(config.ranks, device=config.device, questions=config.questions)
        fork_ranks(count)  # From here on, this process is one of the ranks.
        use_threads(config.threads, ranks=count)
        device = pick_device(config.device)
        layout = layout_of(config, device, world_size=launcher_number("WORLD_SIZE", default=1))
        ranks = start_ranks(device, layout)
        # A collective may fail because another rank has died. Then this is reported as RankLost.
        with errors_as_rank_lost(ranks):
            if chosen.own_loss is not None:
                # It is tried in the ranks, and not before the fork: on a machine with a GPU, torch refuses
                # each backward in a fork whose parent has called one.
                with ranks.shared_errors():
                    try_loss(config, chosen.own_loss)
            folder = Path(config.out)  # `read_training` has made it.
            with (folder / LOCK).open("a+") as lock, asyncio.Runner() as runner:
                ranks.on_first_rank(lambda: claim(lock, folder))
                run = open_parts(chosen, folder, ranks, runner, interrupt)
                try:
                    with closing(run.log):
                        yield run
                finally:
                    runner.run(run.environment.close())
            # A rank that raised an error does not come here. It must not wait for the others: the parent of
            # the ranks (torchrun, or the process that forked them) ends them.
            stop_ranks(ranks)


def open_parts(
    chosen: ChosenTraining, folder: Path, ranks: Ranks, runner: asyncio.Runner, interrupt: Interrupt
) -> Run:
    """Open the environment, and load the models and questions.

    Raises UsageError or Resumable.
    """
    config = chosen.config
    assert chosen.environment is not None, "a dry run opens no environment"
    environment = open_environment(
        chosen.environment,
        # The journal, and this rank's share of the budget.
        account=open_account(config, folder, rank=ranks.rank, ranks=ranks.count),
        seed=config.seed,
        device=ranks.device,
    )
    # An endpoint that does not answer is reported before a large model is loaded.
    check_on_first_rank(environment, ranks, runner, interrupt)

    start = ranks.on_first_rank(lambda: chosen.agent.make(config.seed))
    models = load_models(start, config, ranks)

    questions = RunQuestions.read(config)
    check_question_lengths(questions.all, models.agent.codec, config.game)
    # Now the number of questions is known, so --epochs becomes a number of steps.
    config = with_steps(config, len(questions.training))
    games_of_rank = len(questions.of_rank(1, ranks)) * config.group_size  # games of this rank in each step
    run = Run(
        config=config,
        folder=folder,
        ranks=ranks,
        runner=runner,
        interrupt=interrupt,
        environment=environment,
        start=start,
        agent=models.agent,
        policy=models.policy,
        reference=models.reference,
        questions=questions,
        own_reward=chosen.own_reward,
        own_advantages=chosen.own_advantages,
        loss_function=loss_of_run(config, chosen.own_loss, importance_cap=importance_cap_of(models.policy)),
        optimizer=make_optimizer(models.policy, config, ranks.device),
        gap_limit=gap_limit_of(models.policy),
        log=open_log(config, folder, ranks, games=config.steps * games_of_rank),
    )
    say_start(run)
    if ranks.device.type == "cuda":
        warm_up(run)
    return run


def say_start(run: Run) -> None:
    """Print what starts, and where."""
    config, ranks = run.config, run.ranks
    where = f"{ranks.count} × {ranks.device.type}"
    if ranks.device.type == "cpu":
        where += f", threads: {torch.get_num_threads()}"
    run.log.say(f"{run.folder}: agent {config.agent}, environment {config.env}, {where}")
    if note := repetition_note(config, len(run.questions.training)):
        run.log.say(note)


def warm_up(run: Run) -> None:
    """Compute one full micro-batch of made-up games, so that `memory_left` keeps room for an update.

    The policy is not changed: the games count 0 in the loss, and the gradients are dropped.
    """
    game_tokens = run.config.max_tokens
    game = made_up_game([0.0] * (game_tokens - 1), advantage=0.0)
    games = [game] * max(1, run.config.tokens_per_batch // game_tokens)
    batch = make_batch(games, lambda trajectory: 0.0, run.policy.device)
    run.reference_logprobs(batch.packed)
    (batch.weights * run.policy(batch.packed).logprobs).sum().backward()
    run.optimizer.zero_grad(set_to_none=True)


def open_log(config: TrainConfig, folder: Path, ranks: Ranks, *, games: int) -> Log:
    """Open the log of a run with this many games on this rank.

    Every rank raises UsageError if the first rank has no account for --wandb.
    """
    with ranks.shared_errors():
        return Log(folder, rank=ranks.rank, games=games, priced=any(config.env_price), wandb=config.wandb)


def check_on_first_rank(
    environment: Environment, ranks: Ranks, runner: asyncio.Runner, interrupt: Interrupt
) -> None:
    """Check the environment on the first rank. If the check fails, every rank raises its error."""
    ranks.on_first_rank(lambda: runner.run(interrupt.guard(check_servers(environment))))


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
    # The states are made before the KV cache, which takes a share of the memory that is left (`memory_left`).
    begin_states(optimizer)
    return optimizer
