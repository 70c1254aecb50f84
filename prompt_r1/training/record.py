"""What a training run writes down, step by step: metrics, validation, the best agent, checkpoints, alarms."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.model.distributed import stop_ranks
from prompt_r1.pair.named_agent import exported_step
from prompt_r1.training.alarms import Alarms
from prompt_r1.training.best import candidate_of
from prompt_r1.training.checkpoint import State, save_checkpoint
from prompt_r1.training.export import export_agent
from prompt_r1.training.metrics import add_spending, step_metrics, total_charged
from prompt_r1.training.report import write_report
from prompt_r1.training.run import Run
from prompt_r1.training.summary import summary
from prompt_r1.training.update import UpdateStats
from prompt_r1.training.validation import validation_metrics
from prompt_r1.types import ScoredGame

IDLE_STEPS = 3  # The run ends after this many consecutive steps without an optimiser step.


@dataclass
class Record:
    """The record of a run on this rank. Every method is called by every rank or by none."""

    run: Run
    state: State
    alarms: Alarms
    saved: State | None = None  # what the newest checkpoint holds
    idle_steps: int = 0  # how many steps have passed since the last optimiser step

    def remaining_steps(self) -> range:
        """The numbers of the steps that are not trained yet."""
        return range(self.state.trained_step + 1, self.run.config.steps + 1)

    def write_down(self, step: int, games_PG: list[list[ScoredGame]], stats: UpdateStats) -> None:
        """Record a step whose update is in the weights: games, metrics, checkpoint, best agent, alarms.

        Raises Resumable if a signal came, if nothing was learned for several steps, or if a file cannot be
        written.
        """
        run, ranks, log = self.run, self.run.ranks, self.run.log
        with ranks.shared_errors():
            log.write_games(f"step-{step:06d}", games_PG)
        measured = step_metrics(games_PG, ranks, rollout_seconds=log.seconds["rollout"])
        metrics = {"step": step, **stats.metrics(ranks), **measured}
        add_spending(metrics, run.environment, ranks)
        self.state = replace(self.state, metrics=metrics)
        self.finish_step()
        self.stop_if_idle(stats, environment_failed=measured["groups/dropped"] == 1)

    def finish_step(self) -> None:
        """Validate, log, save, export the best agent and report alarms. Raises Resumable if a signal came.

        A new run begins with this for step 0, which has only a validation. A resumed run begins with it for
        the step of its checkpoint: the step is logged again, and what is missing is done.
        """
        run, config, log = self.run, self.run.config, self.run.log
        step = self.state.trained_step
        # If a stopped run is resumed with fewer steps, `step` may be above --steps.
        is_due = step >= config.steps or step % config.save_every == 0
        metrics = dict(self.state.metrics)
        if is_due and config.val_data and not self.state.is_validated:
            metrics |= self.validate()
            add_spending(metrics, run.environment, run.ranks)
        with run.ranks.shared_errors():
            metrics = log.write_metrics(metrics)
        self.state = replace(self.state, metrics=metrics)
        if is_due:
            self.save_and_export()
        for alarm in self.alarms.read(metrics):
            log.say(f"Alarm at step {step}: {alarm} (docs/running.md says what to do)")
        self.stop_if_asked()

    def save_and_export(self) -> None:
        """Write a checkpoint of the newest agent, export the agent if it is the best so far, and report.

        The agent is saved before it is exported, so RUN/agent is always an agent of a checkpoint. If the run
        stops in between, the resumed run exports it.
        """
        metrics = self.state.metrics
        agent = candidate_of(metrics)
        # A user's own reward decides before EM, because EM may know only one of several right answers.
        is_best = agent.is_better_than(self.state.best, reward_first=bool(self.run.config.reward))
        if is_best:
            self.state = replace(self.state, best=agent)
        if self.state.best is None:
            return  # This is step 0 without a validation, and the start needs no copy.
        self.save()
        if is_best:
            self.export(metrics)
        self.update_report()

    def validate(self) -> dict[str, float]:
        """Play greedy games of the validation questions, and return the metrics val/*."""
        with self.run.log.phase("validation"), self.checkpoint_on_user_error():
            return validation_metrics(self.run, step=self.state.trained_step)

    def save(self) -> None:
        """Write a checkpoint, unless the newest has this state. Raises Resumable if it cannot be written."""
        if self.state == self.saved:
            return
        run = self.run
        with run.log.phase("save"):
            save_checkpoint(run.folder, self.state, run.policy, run.optimizer, run.config, run.ranks)
        self.saved = self.state

    def export(self, metrics: dict[str, float]) -> None:
        """Export the policy to RUN/agent. `metrics` is the line of its step."""
        run = self.run
        with run.log.phase("save"):
            folder = run.folder / "agent"
            export_agent(run.policy, str(run.start), run.config, folder, metrics=metrics, ranks=run.ranks)

    def update_report(self) -> None:
        """Write report.html. A failure does not stop the run, because the report can be made later."""
        run = self.run
        if not run.ranks.is_first:
            return
        try:
            write_report(run.folder)
        except (OSError, UsageError) as error:
            run.log.say(f"report.html could not be written: {error}")

    def stop_if_asked(self) -> None:
        """Raise Resumable on every rank if any rank has received a signal."""
        for stop in self.run.ranks.gather(self.run.interrupt.stop):
            if stop is not None:
                raise stop

    def stop_if_idle(self, stats: UpdateStats, *, environment_failed: bool) -> None:
        """Raise Resumable after IDLE_STEPS consecutive steps in which nothing was learned."""
        if stats.taken:
            self.idle_steps = 0
            return
        self.idle_steps += 1
        if self.idle_steps < IDLE_STEPS:
            return
        if stats.skipped:
            reason = "the loss or its gradient was not finite (try a smaller --lr)"
        elif environment_failed:
            reason = "the environment broke every group"
        else:
            reason = (
                "every game was cut off, and --mask-truncated leaves such games out (start a new run with "
                "larger --max-new and --max-tokens)"
            )
        raise Resumable(f"nothing was learned in {IDLE_STEPS} steps in a row; in the last one, {reason}")

    def free_for_test(self) -> None:
        """Let go of the optimiser, the reference and the KV cache, so that the test can load its agents.

        `load_policy` collects the garbage before it loads an agent.
        """
        assert self.state == self.saved, "after the last step, a checkpoint is saved"
        run = self.run
        run.optimizer.state.clear()
        run.reference = None
        run.agent.close()
        run.log.end_bar()  # The test has a bar of its own.

    def say_results(self) -> None:
        """Print where all results are, and what the run cost."""
        run = self.run
        self.update_report()  # It shows the table of the test.
        charged = total_charged(run.environment, run.ranks)
        if charged.usd:
            run.log.say(f"\nThe run cost {charged}: training, validation and test")
        run.log.say("\n" + summary(run.folder, exported_step(run.folder / "agent"), run.config))

    @contextmanager
    def checkpoint_on_user_error(self) -> Iterator[None]:
        """A context for code of the user between two updates: if it fails, the run is saved first.

        Its UsageError must be raised on every rank (`Ranks.shared_errors`). The context is not for the user's
        loss: in an update, the weights may be between two steps.
        """
        try:
            yield
        except UsageError as error:
            raise self.save_and_explain(error) from None

    def save_and_explain(self, error: Resumable | UsageError) -> Resumable | UsageError:
        """Save after an error that ended the run on every rank, and return the error to raise.

        It has the same type, which has the exit code, and the advice to repeat the command. Before the first
        step has been trained, a UsageError is returned as it is, and nothing is saved. (A lost rank never
        comes here: `start_run` raises its error.)
        """
        if not isinstance(error, Resumable) and self.state.trained_step == 0:
            return error
        self.save()
        stop_ranks(self.run.ranks)  # all ranks have agreed on this stop
        sentence = f"{error}; stopped after step {self.state.trained_step}"
        if not isinstance(error, OutOfBudget):  # Its own sentence says that a larger limit is needed.
            sentence += ", the same command resumes the run"
        return type(error)(sentence)
