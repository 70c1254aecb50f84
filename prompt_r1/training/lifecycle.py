"""Checkpointing, best-agent export and alarms."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prompt_r1.agent.names import exported_step
from prompt_r1.config.yaml_files import write_yaml
from prompt_r1.distributed import RankLost, stop_ranks
from prompt_r1.errors import FatalEnvError, Resumable, UsageError
from prompt_r1.storage import atomic_folder
from prompt_r1.storage.checkpoint import Checkpoints, State
from prompt_r1.storage.export import export_agent
from prompt_r1.storage.run_folder import REPLACED, trim_run
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.training.alarms import Watchdog
from prompt_r1.training.console import nothing_to_learn, summary
from prompt_r1.training.metrics import spending, step_metrics
from prompt_r1.training.parts import Parts
from prompt_r1.training.run import Run
from prompt_r1.training.update import limit_of
from prompt_r1.training.validation import compare_on_test, validation_metrics
from prompt_r1.training.warm_up import warm_up
from prompt_r1.types import ScoredGame

IDLE_STEPS = 3  # this many steps in a row without a game to train on end the run
REPORT_PAUSE = 20  # between two reports: this many times as long as the last one took


@contextmanager
def lifecycle(run: Run, parts: Parts) -> Iterator["Lifecycle"]:
    """Train inside. When the environment, a signal or an alarm ends the training, save and say so.

    Raises Resumable for a run that was stopped and saved.
    """
    steps = None
    try:
        steps = Lifecycle(run, parts)
        yield steps
        steps.update_report()  # with the games of the test
        run.log.say("\n" + summary(run.folder, steps.state.best_step, run.config))
    except (FatalEnvError, Resumable) as error:
        # Before the first step there is nothing to save, and a fatal error needs the user.
        first = 1 if isinstance(error, FatalEnvError) else 0
        if steps is None or steps.state.step < first or isinstance(error, RankLost):
            raise
        steps.save(last=True)
        stop_ranks(run.ranks)  # all ranks have agreed on this stop
        raise run.interrupt.stops(
            f"{error}; stopped after step {steps.state.step}, the same command resumes the run"
        ) from None
    finally:
        run.log.close()


class Lifecycle:
    """Resumes a run, and decides after each step what to save, and whether to stop.

    Every method is called by every rank or by none.
    """

    def __init__(self, run: Run, parts: Parts) -> None:
        """Load the newest valid checkpoint of the run folder, if there is one."""
        self.run = run
        self.parts = parts
        self.state = State(step=-1)
        self.idle_steps = 0
        self.failed_exports = 0  # in a row
        self.next_report = -math.inf  # monotonic seconds: at a save before this, the report is not updated
        config, ranks, policy = run.config, run.ranks, parts.models.policy
        if ranks.device.type == "cuda":
            longest, tokens = config.max_tokens, config.tokens_per_batch
            warm_up(parts.models, parts.optimizer, game_tokens=longest, tokens=tokens)
        size = sum(parameter.numel() for parameter in policy.parameters())
        trained = sum(parameter.numel() for parameter in policy.trained_parameters())
        learning = f", {trained:,} of them adapters that learn" if trained < size else ""
        agent = f"agent {config.agent} ({size:,} parameters{learning})"
        where = f"{ranks.count} × {ranks.device.type}"
        run.log.say(f"{run.folder}: {agent}, environment {config.env}, {where}")
        self.checkpoints = Checkpoints(run.folder, policy, parts.optimizer, config, ranks, say=run.log.say)
        self._resume()
        self.watchdog = Watchdog(limit_of(policy.compute))
        for line in read_metrics(run.folder) if ranks.first else []:
            self.watchdog.see(line)
        self._check_earlier_alarms()
        run.interrupt.deferred = True  # from here on there is something to save

    def _resume(self) -> None:
        """Go on from the newest valid checkpoint, or before step 0."""
        run = self.run
        if run.ranks.first:
            atomic_folder.remove_leftovers(run.folder, REPLACED)
        found = self.checkpoints.newest()
        if found is not None:
            self.state = self.checkpoints.load(found)
            if self.state.questions != self.parts.questions.digest:
                raise UsageError(
                    f"{found} was made with other questions: give the data that the run began with, or "
                    "start a new run with another --out"
                )
            self._repair_export()
            run.log.say(f"Resuming after step {self.state.step} of {run.config.steps}, from {found}")
            self.parts.models.refresh()
        if run.ranks.first:
            logged = self.state.step - bool(self.state.line)  # a step with a line is validated again
            trim_run(run.folder, trained=self.state.step, logged=logged)
            write_yaml(run.config, run.folder / "config.yaml")

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to train. Step 0 only measures the start, and is not yielded."""
        if self.state.step < 0:
            self.state = State(step=0, line={"step": 0})
        with self.run.console.bar(self.state.step):
            if self.state.line:  # step 0, or a run that stopped between an update and its line
                self._complete()
            while self.state.step < self.run.config.steps:
                yield self.state.step + 1
        self.save(last=True)

    def finish_step(self, step: int, games_PG: list[list[ScoredGame]], metrics: dict[str, float]) -> None:
        """Record a step, whose update is in the weights; then validate, save and stop as is due."""
        run = self.run
        name = f"step-{step:06d}-rank{run.ranks.rank}"
        run.log.trajectories(name, games_PG, log_ratios=self.parts.update.log_ratios())
        metrics |= step_metrics(games_PG, run.ranks, rollout_seconds=run.clock.seconds["rollout"])
        if step == 1 and run.ranks.first and (alarm := nothing_to_learn(games_PG[0][0], metrics)):
            run.log.say(alarm)
        self.state.step, self.state.line = step, {"step": step, **metrics}
        self._complete()
        self.parts.update.check_finite()

    def test(self) -> None:
        """Play the test questions, if there are any, and print the table."""
        if self.parts.questions.test:
            self.run.log.say("\n" + compare_on_test(self.run, self.parts))

    def _complete(self) -> None:
        """Validate, log and save the step, and check whether the run must stop."""
        run, state, config = self.run, self.state, self.run.config
        line, last = dict(state.line), state.step == config.steps
        if config.val_data and (last or state.step % config.val_every == 0):
            with run.clock.phase("validation"):
                line |= validation_metrics(run, self.parts, step=state.step)
        line |= run.clock.take() | spending(self.parts.environment, run.ranks)
        line = run.log.metrics(line)
        run.console.row(line)
        due = last or (state.step > 0 and state.step % config.save_every == 0)
        score = (line.get("val/em", -1.0), line.get("val/reward", 0.0))  # the reward decides where EM is 0
        # Of equal agents the first stays the best: one that has collapsed must not replace it.
        # A reward of the user's comes first: EM may know only one of several right answers.
        order = -1 if config.reward else 1
        best = (state.best_em, state.best_reward)
        better = "val/em" in line and (state.best_step < 0 or score[::order] > best[::order])
        export = better or (due and not config.val_data)  # without validation, the newest agent counts
        if export:
            self._export_or_stop(state.step)
            state.best_step, state.best_em, state.best_reward = state.step, *score
        state.line = {}  # a run that stops before this line validates the step again when it resumes
        if due or better:
            self.save()
            # In a long run the report takes longer: at most a twentieth of the time.
            if last or time.monotonic() >= self.next_report:
                self.update_report()
        self._check_stop_conditions(line)
        run.console.at(state.step)

    def _export_or_stop(self, step: int) -> None:
        """Export the agent of a step. If it cannot be written, the older one stays until the next save.

        Raises Resumable at the second failure in a row, and at one in the last step.
        """
        run, config, models = self.run, self.run.config, self.parts.models
        lines = [line for line in read_metrics(run.folder) if line["step"] <= step]
        with run.clock.phase("save"):
            failed = export_agent(
                models.policy,
                models.start,
                config,
                run.folder / "agent",
                metrics=lines[-1] if lines else {},  # only the first rank may see the file
                ranks=run.ranks,
            )
        self._report_write_failure(failed)
        self.failed_exports = self.failed_exports + 1 if failed else 0
        if self.failed_exports >= 2 or (failed and self.state.step == config.steps):
            again = ", for the second time in a row" if self.failed_exports >= 2 else ""
            raise Resumable(f"{failed}{again}: make room, and the same command exports it")

    def save(self, *, last: bool = False) -> None:
        """Write a checkpoint. Raises Resumable if the `last` one of this process cannot be written."""
        self.state.questions = self.parts.questions.digest
        with self.run.clock.phase("save"):
            self._report_write_failure(self.checkpoints.save(self.state))
        if last and self.checkpoints.failures:
            raise Resumable(
                f"step {self.state.step} is not saved: make room, and the same command resumes from the "
                "checkpoint before it"
            )
        if not last and self.failed_exports and self.state.best_step < self.state.step:
            self._repair_export()

    def update_report(self) -> None:
        """Write report.html. A failure does not stop the run: the report can be made again."""
        if self.run.ranks.first:
            from prompt_r1.report.page import write_report  # not part of a step

            begin = time.monotonic()
            try:
                write_report(self.run.folder)
            except (OSError, UsageError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                self.run.log.say(f"report.html could not be written: {reason}")
            now = time.monotonic()
            self.next_report = now + REPORT_PAUSE * (now - begin)

    def _check_stop_conditions(self, line: dict[str, float]) -> None:
        """Signals, an environment that is down, collapsing metrics. The ranks agree on each."""
        ranks, on_collapse = self.run.ranks, self.run.config.on_collapse
        for reason in filter(None, ranks.gather(self.run.interrupt.reason)):
            raise self.run.interrupt.stops(reason)
        self.idle_steps = self.idle_steps + 1 if line.get("groups/dropped") == 1 else 0
        if self.idle_steps == IDLE_STEPS:
            raise Resumable(f"the environment broke every group of {IDLE_STEPS} steps in a row")
        alarms = ranks.from_first(lambda: self.watchdog.see(line))
        for alarm in alarms:
            self.run.log.say(f"Alarm at step {self.state.step}: {alarm} (docs/running.md says what to do)")
        if alarms and on_collapse == "stop":
            raise Resumable(
                f"training has collapsed: {alarms[0]}; to go on all the same, give --on-collapse warn"
            )

    def _check_earlier_alarms(self) -> None:
        """Refuse to resume past an alarm that stopped the run: a job queue may restart it unattended."""
        collapsed = self.run.ranks.from_first(lambda: sorted(self.watchdog.alarming))
        if collapsed and self.run.config.on_collapse == "stop":
            raise UsageError(
                f"{self.run.folder}: training had collapsed at step {self.state.step} "
                f"({', '.join(collapsed)}); to go on all the same, give --on-collapse warn"
            )

    def _repair_export(self) -> None:
        """Export the best agent from its checkpoint, if the export failed or a kill came before it."""
        state, folder = self.state, self.checkpoints.folder
        exported = self.run.ranks.from_first(lambda: exported_step(self.run.folder / "agent"))
        best, newest = (folder / f"step-{step:06d}" for step in (state.best_step, state.step))
        if state.best_step in (-1, exported) or any(map(self.checkpoints.find_damage, (best, newest))):
            return
        self.checkpoints.load(best)
        try:
            self._export_or_stop(state.best_step)
        finally:
            self.checkpoints.load(newest)

    def _report_write_failure(self, failed: str) -> None:
        """Report a failed write ("": none). A full disk may be cleared in time; the second in a row stops."""
        if failed:
            self.run.log.say(f"{failed}. The older one stays; the next save tries again")
        if self.checkpoints.failures >= 2:
            raise Resumable(f"{failed}, for the second time in a row")
