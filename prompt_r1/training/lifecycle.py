"""Checkpointing, best-agent export, alarms and rollback."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch.optim import Optimizer

from prompt_r1.agent.attention_choice import check_attention
from prompt_r1.agent.frame_file import kept_frame
from prompt_r1.agent.names import exported_step
from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.config.yaml_files import write_yaml
from prompt_r1.data import QuestionSampler
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.distributed.signals import Interrupt
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.report import write_report
from prompt_r1.storage import atomic_folder
from prompt_r1.storage.checkpoint import Checkpoints, NextGames, State, writes_in_background
from prompt_r1.storage.export import export_agent
from prompt_r1.storage.run_folder import REPLACED, trim_metrics
from prompt_r1.storage.run_log import Clock, Log, read_metrics
from prompt_r1.training.collapse import NOT_THE_AGENT, SIGNS, Watchdog
from prompt_r1.training.console import Console
from prompt_r1.training.gap import limit_of

IDLE_STEPS = 3  # this many steps in a row without a game to train on end the run
MAX_ROLLBACKS = 3
REPORT_PAUSE = 20  # between two reports: this many times as long as the last one took


@dataclass
class Lifecycle:
    """Decides after each step what to save, and whether to stop or go back.

    Every method is called by every rank or by none.
    """

    config: TrainConfig
    ranks: Ranks
    log: Log
    console: Console
    clock: Clock
    interrupt: Interrupt
    policy: Policy
    optimizer: Optimizer
    sampler: QuestionSampler
    start: Path | str  # the untrained agent
    refresh: Callable[[], None]  # copies the weights to the engine; called after a checkpoint was loaded
    next_games: NextGames | None = None  # with --ahead
    watchdog: Watchdog = field(default_factory=Watchdog)
    idle_steps: int = 0
    failed_exports: int = 0  # in a row
    next_report: float = -math.inf  # monotonic seconds: at a save before this, the report is not updated

    def begin(self) -> State:
        """The state to go on from: the newest valid checkpoint of the run folder, or one before step 0."""
        if self.ranks.device.type == "cuda":
            self.log.say(check_attention(self.policy, allow_slow=self.config.slow_attention))
        self.checkpoints = Checkpoints(
            self.log.folder,
            self.policy,
            self.optimizer,
            self.config,
            self.ranks,
            say=self.log.say,
            background=writes_in_background(self.ranks.device, self.config.offload),
            next_games=self.next_games,
        )
        if self.ranks.first:
            atomic_folder.remove_leftovers(self.log.folder, REPLACED)
        found, state = self.checkpoints.newest(), State(step=-1)
        if found is not None:
            state = self.checkpoints.load(found)
            if state.questions not in ("", self.sampler.digest):
                raise UsageError(
                    f"{found} was made with other questions: give the data that the run began with, or "
                    "start a new run with another --out"
                )
            self._repair_export(state)
            self.log.say(f"Resuming after step {state.step} of {self.config.steps}, from {found}")
            self.sampler.restore(state.sampler)
            self.refresh()
        if self.ranks.first:
            trim_metrics(self.log.folder, state.step + (not state.line))
            write_yaml(self.config, self.log.folder / "config.yaml")
        self._replay_watchdog()
        self._check_earlier_alarms(state)
        self.interrupt.deferred = True  # from here on there is something to save
        return state

    def complete(self, state: State, line: dict[str, float]) -> State:
        """After a step and its validation: write its line, save what is due, then stop or roll back.

        Returns the state to go on from.
        """
        config, step = self.config, state.step
        line = self.log.metrics(line)
        self.console.row(line)
        due = step > 0 and (step % config.save_every == 0 or step == config.steps)
        score = (line.get("val/em", -1.0), line.get("val/reward", 0.0))  # the reward decides where EM is 0
        # Of equal agents the first stays the best: one that has collapsed must not replace it.
        better = "val/em" in line and score > (state.best_em, state.best_reward)
        export = better or (due and not config.val_data)  # without validation, the newest agent counts
        if export and self._export_or_stop(step):
            state.best_step, state.best_em, state.best_reward = step, *score
        state.line = {}  # a run that stops before this line validates the step again when it resumes
        if due or better:
            self.save(state)
            # In a long run the report takes longer: at most a twentieth of the time.
            if step == config.steps or time.monotonic() >= self.next_report:
                self.update_report()
        return self._check_stop_conditions(state, line)

    def _export_or_stop(self, step: int) -> bool:
        """Export the agent of this step; False: it could not be written, and the older one stays.

        Raises Resumable at the second failure in a row, and at one in the last step.
        """
        with self.clock.phase("save"):
            failed = self._export(step)
        self._report_write_failure(failed)
        self.failed_exports = self.failed_exports + 1 if failed else 0
        if self.failed_exports >= 2 or (failed and step == self.config.steps):
            again = ", for the second time in a row" if self.failed_exports >= 2 else ""
            raise Resumable(f"{failed}{again}: make room, and the same command exports it")
        return not failed

    def save(self, state: State, *, wait: bool = False) -> None:
        """Write a checkpoint; from a GPU in the background, unless `wait`."""
        state.questions = self.sampler.digest
        with self.clock.phase("save"):
            self._report_write_failure(self.checkpoints.save(state))
            if wait:
                self._report_write_failure(self.checkpoints.finish(wait=True))
        if wait and self.checkpoints.failures:
            raise Resumable(
                f"step {state.step} is not saved: make room, and the same command resumes from the "
                "checkpoint before it"
            )

    def update_report(self) -> None:
        """Write report.html. A failure does not stop the run: the report can be made again."""
        if self.ranks.first:
            begin = time.monotonic()
            try:
                write_report(self.log.folder)
            except (OSError, UsageError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                self.log.say(f"report.html could not be written: {reason}")
            now = time.monotonic()
            self.next_report = now + REPORT_PAUSE * (now - begin)

    def _check_stop_conditions(self, state: State, line: dict[str, float]) -> State:
        """Signals, an environment that is down, collapsing metrics. The ranks agree on each."""
        self._report_write_failure(self.checkpoints.finish(wait=False))
        for reason in filter(None, self.ranks.gather(self.interrupt.reason)):
            raise Resumable(reason)
        self.idle_steps = self.idle_steps + 1 if line.get("groups/dropped") == 1 else 0
        if self.idle_steps == IDLE_STEPS:
            raise Resumable(f"the environment broke every group of {IDLE_STEPS} steps in a row")
        alarms = self.ranks.from_first(lambda: self.watchdog.see(line))
        for alarm in alarms:
            kind = "Alarm" if alarm.startswith((*NOT_THE_AGENT, *SIGNS)) else "Collapse"
            self.log.say(f"{kind} at step {state.step}: {alarm} (docs/failures.md says what to do)")
        if alarms and self.config.on_collapse == "stop":
            raise Resumable(
                f"training has collapsed: {alarms[0]}; to go on all the same, give --on-collapse warn"
            )
        collapsed = [alarm for alarm in alarms if not alarm.startswith(NOT_THE_AGENT)]
        if collapsed and self.config.on_collapse == "rollback":
            return self._roll_back(state)
        return state

    def _check_earlier_alarms(self, state: State) -> None:
        """Refuse to resume past an alarm that stopped the run: a job queue may restart it unattended."""
        collapsed = self.ranks.from_first(lambda: sorted(self.watchdog.alarming))
        if collapsed and self.config.on_collapse == "stop":
            raise UsageError(
                f"{self.log.folder}: training had collapsed at step {state.step} ({', '.join(collapsed)}); "
                "to go on all the same, give --on-collapse warn"
            )

    def _roll_back(self, state: State) -> State:
        """Go back to the agent that validated best, with half the learning rate; later steps are undone."""
        number = state.rollbacks + 1
        if state.best_step < 0 or number > MAX_ROLLBACKS:
            raise Resumable(f"training has collapsed, after {state.rollbacks} rollbacks")
        self.checkpoints.drop_after(state.best_step)
        found = self.checkpoints.newest()
        if found is None:
            raise Resumable("training has collapsed, and the best checkpoint could not be written")
        state = self.checkpoints.load(found, rollbacks=number)
        self.log.say(
            f"Back to step {state.step} with half the learning rate (rollback {number} of {MAX_ROLLBACKS})"
        )
        self.sampler.restore(state.sampler)
        self.refresh()
        if self.ranks.first:
            trim_metrics(self.log.folder, state.step + 1, aside=f"metrics-before-rollback-{number}.jsonl")
        self._replay_watchdog()
        return state

    def _replay_watchdog(self) -> None:
        """Give the watchdog the state that follows from the metric lines so far."""
        self.watchdog = Watchdog(limit_of(self.policy.compute))
        for line in read_metrics(self.log.folder) if self.ranks.first else []:
            self.watchdog.see(line)

    def _export(self, step: int) -> str:
        lines = [line for line in read_metrics(self.log.folder) if line["step"] <= step]
        folder = self.log.folder / "agent"
        return export_agent(
            self.policy,
            self.start,
            self.config,
            folder,
            lines=lines,
            ranks=self.ranks,
            frame=kept_frame(self.log.folder),
        )

    def _repair_export(self, state: State) -> None:
        """Export the best agent again if a kill came between an export and its checkpoint."""
        exported = self.ranks.from_first(lambda: exported_step(self.log.folder / "agent"))
        best = self.checkpoints.folder / f"step-{state.best_step:06d}"
        if state.best_step not in (-1, exported) and not self.checkpoints.find_damage(best):
            now = self.checkpoints.folder / f"step-{state.step:06d}"
            self.checkpoints.load(best)
            self._report_write_failure(self._export(state.best_step))
            self.checkpoints.load(now)

    def _report_write_failure(self, failed: str) -> None:
        """Report a failed write ("": none). A full disk may be cleared in time; the second in a row stops."""
        if failed:
            self.log.say(f"{failed}. The older one stays; the next save tries again")
        if self.checkpoints.failures >= 2:
            raise Resumable(f"{failed}, for the second time in a row")
