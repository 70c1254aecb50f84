"""Start a training from its command line: settings, ranks, run folder and lock."""

import asyncio
from collections.abc import Callable

import torch

from prompt_r1.cli.command_line import train_config
from prompt_r1.cli.crash_report import crash_report_in
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import lost_ranks_named, start_ranks, stop_ranks
from prompt_r1.distributed.signals import Interrupt
from prompt_r1.storage.run_folder import lock_run, open_run
from prompt_r1.terminal import printable
from prompt_r1.training.cost_estimate import estimate
from prompt_r1.training.event_loop import SlicedLoop
from prompt_r1.training.explain import explain
from prompt_r1.training.finished import finished_summary
from prompt_r1.training.run import Run


def launch(arguments: list[str], train: Callable[[Run], None]) -> None:
    """Run `train` in a locked run folder, on every rank; --dry-run and --explain only show what it does."""
    config, name = train_config(arguments)
    start(config, name, train)


def start(config: TrainConfig, name: str, train: Callable[[Run], None]) -> None:
    """The same with settings that were read before; `name` is that of their preset or file."""
    if config.dry_run:
        print(estimate(config))
        return
    if config.threads:
        torch.set_num_threads(config.threads)  # more threads hardly help a tiny model, and hurt on a busy CPU
    if config.explain:
        explain(config, print)
        return
    with Interrupt() as interrupt:
        ranks = start_ranks(config.device, config.layout, timeout=config.rank_timeout)
        with lost_ranks_named(ranks):
            folder = ranks.from_first(lambda: open_run(config, name))
        with crash_report_in(folder), lost_ranks_named(ranks), lock_run(folder, ranks):
            if done := ranks.from_first(lambda: finished_summary(folder, config)):
                if ranks.first:
                    print(printable(done))
            else:
                with asyncio.Runner(loop_factory=SlicedLoop if config.ahead else None) as runner:
                    train(Run(config, folder, ranks, runner, interrupt))
        stop_ranks(ranks)  # a rank that raised may not wait for the others here: torchrun ends them
