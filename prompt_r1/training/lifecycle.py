"""What a run would be sorry to lose: its state, its best agent, and the moment to stop or to go back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch.optim import Optimizer

from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.config.yaml_files import write_yaml
from prompt_r1.data import QuestionSampler
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.distributed.signals import Interrupt
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.report import write_report
from prompt_r1.storage import atomic_folder
from prompt_r1.storage.checkpoint import Checkpoints, State
from prompt_r1.storage.export import export_agent, exported_step
from prompt_r1.storage.run_folder import trim_metrics
from prompt_r1.storage.run_log import Clock, Log, read_metrics
from prompt_r1.training.collapse import Watchdog
from prompt_r1.training.console import Console

IDLE_STEPS = 3  # so many steps in a row without a game to train on end the run
MAX_ROLLBACKS = 3


@dataclass
class Keeper:
    """Every method is called by every rank or by none."""

    config: TrainConfig
    ranks: Ranks
    log: Log
    console: Console
    clock: Clock
    interrupt: Interrupt
    policy: Policy
    optimizer: Optimizer
    sampler: QuestionSampler
    base: Path | str  # the untrained agent
    refresh: Callable[[], None]  # the copy that plays: called when the weights have changed
    watchdog: Watchdog = field(default_factory=Watchdog)
    idle_steps: int = 0

    def begin(self) -> State:
        """The state to go on from: the newest whole checkpoint of the run folder, or one before step 0."""
        self.checkpoints = Checkpoints(
            self.log.folder, self.policy, self.optimizer, self.config, self.ranks, say=self.log.say,
            background=self.ranks.device.type == "cuda",
        )  # fmt: skip
        if self.ranks.first:
            atomic_folder.sweep(self.log.folder)
        found, state = self.checkpoints.newest(), State(step=-1)
        if found is not None:
            state = self.checkpoints.load(found)
            self._mend_export(state)
            self.refresh()
            self.log.say(f"Going on after step {state.step} of {self.config.steps}, from {found}")
            self.sampler.restore(state.sampler)
        if self.ranks.first:
            trim_metrics(self.log.folder, state.step + (not state.line))
            write_yaml(self.config, self.log.folder / "config.yaml")
        self._remember()
        self._heed_earlier_alarms(state)
        self.interrupt.deferred = True  # from here on there is something to save
        return state

    def complete(self, state: State, line: dict[str, float]) -> State:
        """A step and its validation have ended: write its line, save what is due; then stop, or go back to an
        earlier state, where that is due. Returns the state to go on from.
        """
        config, step = self.config, state.step
        line = self.log.metrics(line)
        self.console.row(line)
        state.line = {}
        due = step > 0 and (step % config.save_every == 0 or step == config.steps)
        score = (line.get("val/em", -1.0), line.get("val/reward", 0.0))  # free text has no EM: then by reward
        # Of equals the first one: an agent that has collapsed must not become the best by being no worse.
        better = "val/em" in line and score > (state.best_em, state.best_reward)
        if better or (due and not config.val_data):  # what is not validated is kept because it is the newest
            with self.clock.phase("save"):
                failed = self._export(step)
            self._told(failed)
            if not failed:
                state.best_step, state.best_em, state.best_reward = step, *score
        if due or better:
            self.save(state)
            self._report()
        return self._heed(state, line)

    def save(self, state: State, *, wait: bool = False) -> None:
        """Write a checkpoint; on a GPU beside the next steps, unless it is to be waited for."""
        with self.clock.phase("save"):
            self._told(self.checkpoints.save(state))
            if wait:
                self._told(self.checkpoints.finish(wait=True))
        if wait and self.checkpoints.failures:
            raise Resumable(f"step {state.step} is not saved: make room, and the same command goes on from "
                            "the checkpoint before it")  # fmt: skip

    def _report(self) -> None:
        """Show the run so far in one file. It can be made again from the others: no reason to stop."""
        if self.ranks.first:
            try:
                write_report(self.log.folder)
            except OSError as error:
                self.log.say(f"report.html could not be written: {error.strerror}")

    def _heed(self, state: State, line: dict[str, float]) -> State:
        """Signals, an environment that is down, curves that collapse. The ranks agree on each."""
        self._told(self.checkpoints.finish(wait=False))
        for reason in filter(None, self.ranks.gather(self.interrupt.reason)):
            raise Resumable(reason)
        self.idle_steps = self.idle_steps + 1 if line.get("groups/dropped") == 1 else 0
        if self.idle_steps == IDLE_STEPS:
            raise Resumable(f"the environment broke every group of {IDLE_STEPS} steps in a row")
        alarms = self.ranks.from_first(lambda: self.watchdog.see(line))
        for alarm in alarms:
            self.log.say(f"Collapse at step {state.step}: {alarm}")
        if alarms and self.config.on_collapse == "stop":
            raise Resumable(f"the curves have collapsed: {alarms[0]}; --on-collapse warn goes on")
        if alarms and self.config.on_collapse == "rollback":
            return self._roll_back(state)
        return state

    def _heed_earlier_alarms(self, state: State) -> None:
        """What stopped the run would not stop it again: a queue that starts it anew must not go past it."""
        collapsed = self.ranks.from_first(lambda: sorted(self.watchdog.barking))
        if collapsed and self.config.on_collapse == "stop":
            raise UsageError(
                f"{self.log.folder}: the curves had collapsed at step {state.step} ({', '.join(collapsed)}); "
                "to go on all the same, give --on-collapse warn"
            )

    def _roll_back(self, state: State) -> State:
        """Back to the agent that validated best, with half the learning rate; the later steps are undone."""
        number = state.rollbacks + 1
        if state.best_step < 0 or number > MAX_ROLLBACKS:
            raise Resumable(f"the curves have collapsed, after {state.rollbacks} rollbacks")
        self.checkpoints.drop_after(state.best_step)
        found = self.checkpoints.newest()
        if found is None:
            raise Resumable("the curves have collapsed, and the best checkpoint could not be written")
        state = self.checkpoints.load(found, rollbacks=number)
        self.log.say(f"Back to step {state.step}; the learning rate is halved, for the {number}. time")
        self.sampler.restore(state.sampler)
        self.refresh()
        if self.ranks.first:
            trim_metrics(self.log.folder, state.step + 1, aside=f"metrics-before-rollback-{number}.jsonl")
        self._remember()
        return state

    def _remember(self) -> None:
        """What the watchdog knows follows from the lines so far."""
        self.watchdog = Watchdog()
        for line in read_metrics(self.log.folder) if self.ranks.first else []:
            self.watchdog.see(line)

    def _export(self, step: int) -> str:
        lines = [line for line in read_metrics(self.log.folder) if line["step"] <= step]
        folder = self.log.folder / "agent"
        return export_agent(self.policy, self.base, self.config, folder, lines=lines, ranks=self.ranks)

    def _mend_export(self, state: State) -> None:
        """A kill may have come between the export of a better agent and its checkpoint."""
        there = self.ranks.from_first(lambda: exported_step(self.log.folder / "agent"))
        best = self.checkpoints.folder / f"step-{state.best_step:06d}"
        if state.best_step not in (-1, there) and not self.checkpoints.fault(best):
            now = self.checkpoints.folder / f"step-{state.step:06d}"
            self.checkpoints.load(best)
            self._told(self._export(state.best_step))
            self.checkpoints.load(now)

    def _told(self, failed: str) -> None:
        """Writing may fail once (a full disk that somebody clears); the older checkpoint stays."""
        if failed:
            self.log.say(f"{failed}. The older one stays; the next save tries again")
        if self.checkpoints.failures >= 2:
            raise Resumable(f"{failed}, for the second time in a row")
