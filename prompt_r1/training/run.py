"""One training run: its steps, from the newest checkpoint to the last, and how it ends."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from prompt_r1.agent.agent import Agent
from prompt_r1.config.train import TrainConfig
from prompt_r1.data.sampler import QuestionSampler
from prompt_r1.distributed.ranks import RankLost, Ranks, run_on_all_ranks, stop_ranks
from prompt_r1.distributed.signals import Interrupt
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import FatalEnvError, Resumable
from prompt_r1.options.advantages import ADVANTAGES
from prompt_r1.options.cost import charge_costs
from prompt_r1.options.credit import CREDITS
from prompt_r1.storage.checkpoint import State
from prompt_r1.storage.run_log import Clock, Log
from prompt_r1.training.ahead import Ahead, PlayOne, PlayStep, Rollout
from prompt_r1.training.console import Console, nothing_to_learn, summary
from prompt_r1.training.lifecycle import Lifecycle
from prompt_r1.training.memory_estimate import leave_room
from prompt_r1.training.step_metrics import spending, step_metrics
from prompt_r1.training.update import Update
from prompt_r1.training.weights import Models
from prompt_r1.types import ScoredGame

T = TypeVar("T")


class Run:
    """Steps, log, clock and console of a training run. Every method is called by every rank or by none."""

    def __init__(
        self, config: TrainConfig, folder: Path, ranks: Ranks, runner: asyncio.Runner, interrupt: Interrupt
    ) -> None:
        self.config = config
        self.folder = folder
        self.ranks = ranks
        self.interrupt = interrupt
        self.log = Log(folder, quiet=not ranks.first, track=config.track)
        self.console = Console(self.log, steps=config.steps, priced=bool(config.env_price))
        self.clock = Clock(self.console.phase)
        self.state = State(step=-1)
        self._runner = runner
        self._ahead: Ahead | None = None

    def wait_for(self, work: Coroutine[None, None, T]) -> T:
        """Run this rank's share of some asynchronous work.

        A signal cancels it, and an error on one rank stops all of them. Raises Resumable, FatalEnvError or
        UsageError.
        """
        return run_on_all_ranks(self.interrupt.guard(work), self._runner, self.ranks)

    def begin(
        self,
        models: Models,
        update: Update,
        sampler: QuestionSampler,
        environment: Pool,
        play_step: PlayStep,
        validate: Callable[[Agent], dict[str, float]],
    ) -> None:
        """Load the newest checkpoint of the run folder, if there is one.

        `play_step` plays this rank's games of a step with an agent; `validate` computes its validation
        metrics, without the prefix `val/`.
        """
        self._sampler = sampler
        self._environment = environment
        self._validate = validate
        self._update = update
        self._play_step = play_step
        self._models = models
        if self.ranks.device.type == "cuda":
            leave_room(models, update.optimizer, self.config, self.ranks)
        if self.config.ahead:
            self._ahead = Ahead(
                self.config,
                models,
                sampler,
                self.ranks,
                self._runner,
                play_step=play_step,
                wait_for=self.wait_for,
            )
            update.between = self._ahead.go_on
        self._lifecycle = Lifecycle(
            self.config,
            self.ranks,
            self.log,
            self.console,
            self.clock,
            self.interrupt,
            models.policy,
            update.optimizer,
            sampler,
            models.start,
            refresh=self._ahead.resume if self._ahead else models.refresh,
            next_games=self._ahead,
        )
        size = sum(parameter.numel() for parameter in models.policy.parameters())
        trained = sum(parameter.numel() for parameter in models.policy.trained_parameters())
        learning = f", {trained:,} of them adapters that learn" if trained < size else ""
        agent = f"agent {self.config.agent} ({size:,} parameters{learning})"
        where = f"{self.ranks.count} × {self.ranks.device.type}"
        self.log.say(f"{self.folder}: {agent}, environment {self.config.env}, {where}")
        self.state = self._lifecycle.begin()

    @contextmanager
    def saved_on_stop(self) -> Iterator[None]:
        """Train inside. When the environment, a signal or an alarm ends the training, save and say so.

        Raises Resumable for a run that was stopped and saved.
        """
        try:
            yield
            self._lifecycle.update_report()  # with the games of the test
            self.log.say("\n" + summary(self.folder, self.state.best_step, self.config))
        except (FatalEnvError, Resumable) as error:
            # Before the first step there is nothing to save, and a fatal error needs the user.
            first = 1 if isinstance(error, FatalEnvError) else 0
            if self.state.step < first or isinstance(error, RankLost):
                raise
            self._lifecycle.save(self.state, wait=True)
            stop_ranks(self.ranks)  # all ranks have agreed on this stop
            raise Resumable(
                f"{error}; stopped after step {self.state.step}{self.interrupt.age}, the same command "
                "resumes the run"
            ) from None
        finally:
            self.log.close()
            if self._ahead is not None:
                self._ahead.cancel()
            self._runner.run(self._environment.close())

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to train, each after the one before is logged, validated and saved.

        A rollback goes back to an earlier number. Step 0 only measures the start, and is not yielded.
        """
        if self.state.step < 0:
            self.state = State(step=0, sampler=self._sampler.state(), line={"step": 0})
        with self.console.bar(self.state.step):
            if self.state.line:  # step 0, or a run that stopped between an update and its line
                self._play_ahead()
                self._complete()
            while self.state.step < self.config.steps:
                yield self.state.step + 1
                self._play_ahead()
                self._complete()
        self._lifecycle.save(self.state, wait=True)

    def games_of(self, step: int) -> Rollout:
        """This rank's games of a step, played now or, with `--ahead 1`, since the last update but one."""
        with self.clock.phase("rollout"):
            if self._ahead is None:
                return self.wait_for(self._play_step(step, self._models.agent))
            rollout = self._ahead.take(step)
        self._update.stale_gap = self._ahead.trained.gap
        return rollout

    def counted(self, play_one: PlayOne, games: int) -> PlayOne:
        """`play_one`, with the progress line counting how many of the `games` games have ended."""
        counted = self.console.counted(play_one, games)
        return self._ahead.keeping(counted) if self._ahead else counted

    def assign_credit(self, games_PG: list[list[ScoredGame]]) -> list[list[ScoredGame]]:
        """The games with the advantages of --advantages, --cost-weight and --credit.

        By default they have them already.
        """
        games_PG = ADVANTAGES[self.config.advantages](games_PG, self.ranks.sum)
        games_PG = charge_costs(games_PG, weight=self.config.cost_weight, unit=self.config.cost_of)
        return CREDITS[self.config.credit](games_PG, self.config.reward_rule)

    def finish_step(self, step: int, games_PG: list[list[ScoredGame]], metrics: dict[str, float]) -> None:
        """Write the games of a step, and record its metrics: the weights are now those after `step`."""
        self.log.trajectories(f"step-{step:06d}-rank{self.ranks.rank}", games_PG)
        seconds = self.clock.seconds["rollout"]
        if self._ahead is not None:
            seconds = self._ahead.trained.seconds
            metrics["ahead/hidden"] = self._ahead.hidden
        metrics |= step_metrics(games_PG, self.ranks, rollout_seconds=seconds)
        if step == 1 and self.ranks.first and (alarm := nothing_to_learn(games_PG[0][0], metrics)):
            self.log.say(alarm)
        self.state.step, self.state.sampler = step, (self._ahead or self._sampler).state()
        self.state.line = {"step": step, **metrics}

    def _play_ahead(self) -> None:
        """With `--ahead 1`, begin games with the new weights, and wait for those of the next step."""
        if self._ahead is not None and self.state.step > 0:
            with self.clock.phase("rollout"):
                self._ahead.play(self.state.step + 1)

    def _complete(self) -> None:
        """Validate, log and save the step, and check whether the run must stop or go back."""
        line = dict(self.state.line)
        last = self.state.step == self.config.steps
        if self.config.val_data and (self.state.step % self.config.val_every == 0 or last):
            with self.clock.phase("validation"):
                line |= {f"val/{name}": value for name, value in self._validate(self._models.agent).items()}
        line |= self.clock.take() | spending(self._environment, self.ranks)
        self.state = self._lifecycle.complete(self.state, line)
        self._update.check_finite()
        self.console.at(self.state.step)
