"""What a training run writes down: metrics, validation, the best agent, checkpoints, alarms."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from prompt_r1.data.sampler import digest_of
from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.errors import Interrupted, Resumable, UsageError
from prompt_r1.model.distributed import Ranks, stop_ranks
from prompt_r1.pair.named_agent import exported_step
from prompt_r1.programs.sealed_folders import find_damage
from prompt_r1.settings.fields import write_yaml
from prompt_r1.training.alarms import Alarms
from prompt_r1.training.best import Candidate, em_of_validation
from prompt_r1.training.checkpoint import (
    State,
    digest_of_start,
    load_tensors,
    newest_checkpoint,
    read_state,
    save_checkpoint,
)
from prompt_r1.training.export import export_agent
from prompt_r1.training.log import read_metrics, trim_run
from prompt_r1.training.metrics import add_spending, step_metrics, total_spent
from prompt_r1.training.report import write_report
from prompt_r1.training.run import Run, repetition_note
from prompt_r1.training.run_folder import checkpoint_of
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
    # Why consecutive steps had no optimiser step; [] if the last step had one.
    idle_reasons: list[str] = field(default_factory=list)

    @classmethod
    def resume(cls, run: Run) -> "Record":
        """The record of a run that goes on from its newest valid checkpoint, or begins with step 0.

        Raises UsageError if the checkpoint belongs to another run, or if the ranks have different questions.
        """
        config, ranks = run.config, run.ranks
        # A new run begins with step 0, which validates the agent before training.
        state = State(
            open_line={"step": 0},
            questions=digest_of(run.questions.training),
            validation=digest_of(run.questions.validation),
            start=ranks.on_first_rank(lambda: digest_of_start(run.start)),
        )
        check_same_on_all_ranks([state.questions, state.validation, digest_of(run.questions.test)], ranks)
        alarms = Alarms(agent=config.agent, gap=run.gap_limit, own_reward=bool(config.reward))
        record = cls(run, state, alarms)
        found = ranks.on_first_rank(lambda: newest_checkpoint(run.folder, say=run.log.say))
        if found is None:
            note = repetition_note(config, len(run.questions.training))
            if note:
                run.log.say(note)
        else:
            record.load(found)
        trained, final = record.state.trained_step, record.state.final_step
        run.log.begin_after(trained, steps=config.steps)
        ranks.on_first_rank(lambda: trim_run(run.folder, trained=trained, final=final))
        ranks.on_first_rank(lambda: write_yaml(config, run.folder / "config.yaml"))
        for line in read_metrics(run.folder):
            record.alarms.read(line)
        return record

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint. Raises UsageError if it belongs to another run."""
        run = self.run
        saved = read_state(checkpoint, run.config)
        check_same_origin(checkpoint, saved, self.state, run.start)
        run.log.say(f"Resuming after step {saved.trained_step} of {run.config.steps}, from {checkpoint}")
        self.state = saved
        self.export_if_missing()
        self.saved = copy(saved)  # Later changes of `state` must not change it.
        load_tensors(checkpoint, run.policy, run.optimizer, run.ranks)
        run.refresh()

    def export_if_missing(self) -> None:
        """Export the best agent if RUN/agent is not this agent. Leaves its weights in the policy.

        There are three cases:

        - The run stopped between checkpoint and export.
        - Newer checkpoints are damaged, and RUN/agent is of one of their steps.
        - The same, and the agent that was the best at the resumed step has no checkpoint any more: it was
          removed when an agent with a checkpoint that is now damaged became the best. Then the agent of the
          resumed step counts as the best, until a validation judges an agent.
        """
        run, best = self.run, self.state.best
        exported = run.ranks.on_first_rank(lambda: exported_step(run.folder / "agent"))
        if best is None or best.step == exported:
            return
        checkpoint = checkpoint_of(run.folder, best.step)
        if run.ranks.on_first_rank(lambda: find_damage(checkpoint)):
            step = self.state.trained_step
            run.log.say(
                f"The checkpoint of the best agent, of step {best.step}, is gone or damaged: the one "
                f"of step {step} counts as the best until the next validation"
            )
            best = self.state.best = Candidate(step, em=None, reward=0.0)
            checkpoint = checkpoint_of(run.folder, step)
        load_tensors(checkpoint, run.policy, run.optimizer, run.ranks)
        lines = {line["step"]: line for line in read_metrics(run.folder)}
        self.export(lines.get(best.step, {"step": best.step}))

    def remaining_steps(self) -> range:
        """The numbers of the steps that are not trained yet."""
        return range(self.state.trained_step + 1, self.run.config.steps + 1)

    def write_down(self, step: int, games_PG: list[list[ScoredGame]], stats: UpdateStats) -> None:
        """Record a step whose update is in the weights: games, metrics, checkpoint, best agent, alarms.

        Raises Resumable if a signal came, if nothing was learned for several steps, or if a file cannot be
        written.
        """
        run, ranks, log = self.run, self.run.ranks, self.run.log
        ranks.on_every_rank(lambda: log.write_games(f"step-{step:06d}", games_PG))
        measured = step_metrics(games_PG, ranks, rollout_seconds=log.seconds["rollout"])
        self.state.trained_step = step
        self.state.open_line = {"step": step, **stats.metrics(ranks), **measured}
        # The calls of the games are added now, because a signal may stop the validation, and the run is then
        # saved. `finish_step` adds the calls of the validation.
        add_spending(self.state.open_line, run.environment, ranks)
        self.finish_step()
        self.stop_if_idle(stats, environment_failed=measured["groups/dropped"] == 1)

    def finish_open_step(self) -> None:
        """Finish the newest trained step if its line in metrics.jsonl may still change.

        In a new run this is step 0. In a resumed run it is the step that was trained last before the run
        stopped. If --steps makes it the last step of the run, it is now validated and exported.
        """
        if self.state.open_line:
            self.finish_step()

    def finish_step(self) -> None:
        """Validate, log, save, export the best agent and report alarms. Raises Resumable if a signal came.

        The order makes it safe to stop anywhere in here:

        - Logged before saved: a checkpoint never names a line that is not there. A resumed run removes a line
          that its checkpoint does not name, and writes it again.
        - Saved before exported: RUN/agent never has an agent that no checkpoint names. A resumed run exports
          the agent that its checkpoint names, if it is not there.
        - Saved before a signal stops the run: the resumed run does not repeat the step.
        """
        run, state = self.run, self.state
        config, ranks, log = run.config, run.ranks, run.log
        step = state.trained_step
        # If a stopped run is resumed with fewer steps, `step` may be above --steps.
        is_due = step >= config.steps or step % config.save_every == 0
        is_save_step = is_due and step > 0  # Step 0 is saved only if its validation makes it the best.

        # Validate and log.
        metrics = dict(state.open_line)
        if is_due and config.val_data:
            metrics |= self.validate()
        add_spending(metrics, run.environment, ranks)
        metrics = ranks.on_every_rank(lambda: log.write_metrics(metrics))

        # Save and export, if there is something to keep.
        is_best = self.note_if_best(metrics, is_save_step=is_save_step)
        if is_best or is_save_step:
            state.open_line = {}
            self.save()
            if is_best:
                self.export(metrics)
            self.update_report()
        else:
            # The line may still change: if the run stops before it trains another step, the resumed run
            # finishes this step again, perhaps with a validation.
            state.open_line = metrics

        # Report alarms, and stop if a signal came.
        for alarm in self.alarms.read(metrics):
            log.say(f"Alarm at step {step}: {alarm} (docs/running.md says what to do)")
        self.stop_if_asked()

    def validate(self) -> dict[str, float]:
        """Play greedy games of the validation questions, and return the metrics val/*."""
        with self.run.log.phase("validation"), self.checkpoint_on_user_error():
            return validation_metrics(self.run, name=f"validation-{self.state.trained_step:06d}")

    def note_if_best(self, metrics: Mapping[str, float], *, is_save_step: bool) -> bool:
        """Return whether the agent of this step is the best so far. If so, the state names it."""
        config, state = self.run.config, self.state
        agent = Candidate(
            state.trained_step, em=em_of_validation(metrics), reward=metrics.get("val/reward", 0.0)
        )
        if agent.em is None and not is_save_step:
            return False  # Without a validation, only an agent that is saved can be the best.
        # A user's own reward decides before EM, because EM may know only one of several right answers.
        if not agent.is_better_than(state.best, reward_first=bool(config.reward)):
            return False
        if agent.em is None and config.val_data and state.best is None:
            self.run.log.say(
                "The environment broke every validation game: the newest agent counts as the best one"
            )
        state.best = agent
        return True

    def save(self) -> None:
        """Write a checkpoint, unless the newest has this state. Raises Resumable if it cannot be written."""
        if self.state == self.saved:
            return
        run = self.run
        with run.log.phase("save"):
            save_checkpoint(run.folder, self.state, run.policy, run.optimizer, run.config, run.ranks)
        self.saved = copy(self.state)  # Later changes of `state` must not change it.

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
            self.idle_reasons.clear()
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
        self.idle_reasons.append(reason)
        if len(self.idle_reasons) == IDLE_STEPS:
            reasons = " or ".join(dict.fromkeys(self.idle_reasons))
            raise Resumable(f"nothing was learned in {IDLE_STEPS} steps in a row: {reasons}")

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
        best = self.state.best
        assert best is not None, "after the last step, an agent is saved"
        spent = total_spent(run.environment, run.ranks)
        if spent.usd:
            run.log.say(f"\nThe run cost {spent}: training, validation and test")
        run.log.say("\n" + summary(run.folder, best.step, run.config))

    @contextmanager
    def checkpoint_on_user_error(self) -> Iterator[None]:
        """A context for code of the user between two updates: if it fails, the run is saved first.

        Its UsageError must be raised on every rank (`Ranks.shared_errors`). The context is not for the user's
        loss: in an update, the weights may be between two steps.
        """
        try:
            yield
        except UsageError as error:
            raise self.save_and_stop(error) from None

    def save_and_stop(self, error: Resumable | UsageError) -> Exception:
        """Save after an error that ended the run on every rank, and return the error to raise.

        This is the same error with the advice to repeat the command. Before the first step has been trained,
        a UsageError is returned as it is, and nothing is saved. (A lost rank never comes here: `start_run`
        raises its error.)
        """
        if not isinstance(error, Resumable) and self.state.trained_step == 0:
            return error
        self.save()
        stop_ranks(self.run.ranks)  # all ranks have agreed on this stop
        kind = type(error) if isinstance(error, (Interrupted, UsageError)) else Resumable
        sentence = f"{error}; stopped after step {self.state.trained_step}"
        if not isinstance(error, OutOfBudget):  # Its own sentence says that a larger limit is needed.
            sentence += ", the same command resumes the run"
        return kind(sentence)


def check_same_on_all_ranks(digests: Sequence[str], ranks: Ranks) -> None:
    """Raise UsageError on every rank if the ranks have other digests of their questions.

    Each rank takes its share of the questions by their numbers. So with other questions, or in another order,
    some would be played twice and others never.
    """
    if any(other != digests for other in ranks.gather(digests)):
        raise UsageError(
            "the ranks have different questions, or the same ones in another order: a function of --data "
            "must return the same list in each process (a set of texts has another order in each)"
        )


def check_same_origin(checkpoint: Path, saved: State, now: State, start: Path | str) -> None:
    """Raise UsageError if a checkpoint was made with other questions, or from another agent, than now."""
    if saved.questions != now.questions:
        origin = "other questions"
        repair = "give the data and the --val-limit that the run began with"
    elif saved.validation != now.validation:  # EM of other questions cannot be compared.
        origin = "other validation questions"
        repair = "give the --val-data and the --val-limit that the run began with"
    elif saved.start != now.start:
        origin = f"another agent than there is now in {start}"
        repair = "put the agent back that the run began with"
    else:
        return
    raise UsageError(f"{checkpoint} was made with {origin}: {repair}, or start a new run with another --out")
