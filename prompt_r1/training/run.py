"""What every part of a training run shares: settings, folder, ranks, log, console and event loop."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import Ranks, run_on_all_ranks
from prompt_r1.distributed.signals import Interrupt
from prompt_r1.storage.run_log import Clock, Log, OnMetrics
from prompt_r1.training.console import Console

T = TypeVar("T")


class Run:
    """A training run on this rank. Every method is called by every rank or by none."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        ranks: Ranks,
        runner: asyncio.Runner,
        interrupt: Interrupt,
        on_metrics: OnMetrics | None = None,
    ) -> None:
        """`on_metrics` gets each line of metrics.jsonl, on the first rank."""
        self.config = config
        self.folder = folder
        self.ranks = ranks
        self.runner = runner
        self.interrupt = interrupt
        self.log = Log(folder, quiet=not ranks.first, track=config.track, on_metrics=on_metrics)
        self.console = Console(self.log, steps=config.steps, priced=bool(config.env_price))
        self.clock = Clock(self.console.phase)

    def wait_for(self, work: Coroutine[None, None, T]) -> T:
        """Run this rank's share of some asynchronous work.

        A signal cancels it, and an error on one rank stops all of them. Raises Resumable, FatalEnvError or
        UsageError.
        """
        return run_on_all_ranks(self.interrupt.guard(work), self.runner, self.ranks)
