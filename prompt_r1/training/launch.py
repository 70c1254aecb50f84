"""Start a training: settings, ranks, run folder and lock."""

import asyncio
from collections.abc import Callable

from prompt_r1.config.train import train_config, warnings_of
from prompt_r1.distributed import Interrupt, lost_ranks_resumable, start_ranks, stop_ranks
from prompt_r1.storage.run_folder import lock_run, open_run
from prompt_r1.terminal import printable
from prompt_r1.training.run import Run


def launch(arguments: list[str], train: Callable[[Run], None]) -> None:
    """Run `train` in a locked run folder, on every rank; --dry-run only prints an estimate."""
    config, name = train_config(arguments)
    note = "\n".join(f"Note: {warning}" for warning in warnings_of(config))
    if config.dry_run:
        from prompt_r1.training.dry_run import estimate  # only here: a training needs no estimate

        print("\n".join(filter(None, [note, estimate(config)])))
        return
    with Interrupt() as interrupt:
        ranks = start_ranks(config.device, config.layout)
        with lost_ranks_resumable(ranks):
            folder = ranks.from_first(
                lambda: open_run(config.out, config.resume, f"{name}-seed{config.seed}")
            )
        if note and ranks.first:
            print(printable(note))
        with lost_ranks_resumable(ranks), lock_run(folder, ranks), asyncio.Runner() as runner:
            train(Run(config, folder, ranks, runner, interrupt))
        stop_ranks(ranks)  # a rank that raised may not wait for the others here: torchrun ends them
