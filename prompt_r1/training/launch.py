"""Start a training: settings, ranks, run folder and lock."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prompt_r1.agent.names import exported_step
from prompt_r1.config.train import TrainConfig, warnings_of
from prompt_r1.config.train_settings import train_config
from prompt_r1.config.yaml_files import read_yaml
from prompt_r1.distributed import Interrupt, lost_ranks_resumable, start_ranks, stop_ranks
from prompt_r1.errors import UsageError
from prompt_r1.storage.checkpoint import checkpoints_of
from prompt_r1.storage.run_folder import lock_run, open_run
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.terminal import printable
from prompt_r1.training.run import Run
from prompt_r1.training.summary import summary
from prompt_r1.training.validation import TEST_FILE


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
        with lost_ranks_resumable(ranks), lock_run(folder, ranks):
            if done := ranks.from_first(lambda: _finished_summary(folder, config)):
                if ranks.first:
                    print(printable(done))
            else:
                with asyncio.Runner() as runner:
                    train(Run(config, folder, ranks, runner, interrupt))
        stop_ranks(ranks)  # a rank that raised may not wait for the others here: torchrun ends them


def _finished_summary(folder: Path, config: TrainConfig) -> str:
    """The summary of a run that these settings have completed; "" if something is left to do.

    Any other setting, such as more steps, is left to the resumed run.
    """
    try:
        stored = TrainConfig(**read_yaml(folder / "config.yaml", TrainConfig))
        lines = read_metrics(folder)
    except (UsageError, OSError, ValueError):
        return ""  # the resumed run reports what is wrong
    checkpoints, best = checkpoints_of(folder), exported_step(folder / "agent")
    saved = bool(checkpoints) and checkpoints[-1].name == f"step-{config.steps:06d}"
    logged = bool(lines) and lines[-1]["step"] == config.steps
    tested = not config.test_data or (folder / TEST_FILE).exists()
    same = stored == replace(config, out=stored.out, resume=stored.resume)
    if not (same and saved and logged and tested and best >= 0):
        return ""
    done = f"{folder} is finished: step {config.steps} of {config.steps}"
    more = "a larger --steps trains on, and --resume never begins a new run"
    return f"{done}; {more}\n\n{summary(folder, best, config)}"
