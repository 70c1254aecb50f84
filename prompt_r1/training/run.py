"""What the parts of a training share: settings, folder, ranks, log, console, event loop."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed import Interrupt, Ranks
from prompt_r1.storage.run_log import Clock, Log
from prompt_r1.training.console import Console

T = TypeVar("T")


@dataclass
class Run:
    """A training run on this rank. Every method is called by every rank or by none."""

    config: TrainConfig
    folder: Path
    ranks: Ranks
    runner: asyncio.Runner
    interrupt: Interrupt

    def __post_init__(self) -> None:
        quiet, priced = not self.ranks.first, bool(self.config.env_price)
        self.log = Log(self.folder, quiet=quiet, wandb=self.config.wandb)
        self.console = Console(self.log, steps=self.config.steps, priced=priced)
        self.clock = Clock(self.console.phase)

    def wait_for(self, work: Coroutine[None, None, T]) -> T:
        """Run this rank's share of some asynchronous work.

        A signal cancels it, and an error on one rank stops all of them. Raises Resumable, FatalEnvError or
        UsageError.
        """
        return self.ranks.run(self.interrupt.guard(work), self.runner)
