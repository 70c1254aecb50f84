"""What happens after a step: validation, log, checkpoint, export of the best agent, alarms, stop, summary."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from prompt_r1.data.sampler import digest_of
from prompt_r1.errors import FatalEnvError, Interrupted, Resumable, UsageError
from prompt_r1.model.distributed import RankLost, stop_ranks
from prompt_r1.programs.command_line import command
from prompt_r1.settings.agent import HELD_OUT, AgentConfig
from prompt_r1.settings.fields import write_yaml
from prompt_r1.settings.functions import OBJECT_PREFIX
from prompt_r1.training.batches import make_batch
from prompt_r1.training.checkpoint import State, load_checkpoint, newest_checkpoint, save_checkpoint
from prompt_r1.training.export import export_agent
from prompt_r1.training.log import read_metrics, trim_run
from prompt_r1.training.metrics import Watchdog, spending, step_metrics
from prompt_r1.training.run import Run
from prompt_r1.training.update import Update, limit_of
from prompt_r1.training.validation import TEST_FILE, compare_on_test, validation_metrics
from prompt_r1.types import Completion, Question, ScoredGame, Trajectory

IDLE_STEPS = 3  # this many steps in a row without an optimiser step end the run


@contextmanager
def lifecycle(run: Run) -> Iterator["Lifecycle"]:
    """Train inside; then test. When the environment or a signal ends the training, save and say so.

    Raises Resumable for a run that was stopped and saved.
    """
    with closing(run.log):
        steps = Lifecycle(run)
        try:
            yield steps
            if run.questions.test:
                run.log.say("\n" + compare_on_test(run))
            steps.update_report()  # with the games of the test
            run.log.say("\n" + summary(run.folder, steps.state.best_step, run.config))
        except (FatalEnvError, Resumable) as error:
            # Before the first step there is nothing to save, and a fatal error needs the user.
            if isinstance(error, RankLost) or (isinstance(error, FatalEnvError) and steps.state.step == 0):
                raise
            steps.save()
            stop_ranks(run.ranks)  # all ranks have agreed on this stop
            sentence = f"{error}; stopped after step {steps.state.step}, the same command resumes the run"
            raise (Interrupted if isinstance(error, Interrupted) else Resumable)(sentence) from None


class Lifecycle:
    """Resumes a run, and decides after each step what to save, and whether to stop.

    Every method is called by every rank or by none.
    """

    def __init__(self, run: Run) -> None:
        """Load the newest valid checkpoint of the run folder, if there is one."""
        config, ranks = run.config, run.ranks
        self.run = run
        self.saved: State | None = None  # of the checkpoint that was written or loaded last
        self.idle_steps = 0  # in a row
        where = f"{ranks.count} × {ranks.device.type}"
        run.log.say(f"{run.folder}: agent {config.agent}, environment {config.env}, {where}")
        if ranks.device.type == "cuda":
            warm_up(run, game_tokens=config.max_tokens, tokens=config.tokens_per_batch)
        self.state = self._resumed()
        self.watchdog = Watchdog(config.agent, limit_of(run.policy))
        for line in read_metrics(run.folder):
            self.watchdog.see(line)
        run.interrupt.deferred = True  # from here on there is something to save

    def _resumed(self) -> State:
        """Go on from the newest valid checkpoint, or begin with step 0."""
        run, state = self.run, State(line={"step": 0}, questions=digest_of(self.run.questions.training))
        found = run.ranks.from_first(lambda: newest_checkpoint(run.folder, say=run.log.say))
        if found is not None:
            saved = load_checkpoint(found, run.policy, run.optimizer, run.config, run.ranks)
            if saved.questions != state.questions:
                raise UsageError(
                    f"{found} was made with other questions: give the data that the run began with, or "
                    "start a new run with another --out"
                )
            state, self.saved = saved, replace(saved)
            run.log.say(f"Resuming after step {state.step} of {run.config.steps}, from {found}")
            run.refresh()
        run.log.progress.initial = run.log.progress.n = state.step
        logged = state.step - bool(state.line)  # a step with a line is validated again
        run.ranks.from_first(lambda: trim_run(run.folder, trained=state.step, logged=logged))
        run.ranks.from_first(lambda: write_yaml(run.config, run.folder / "config.yaml"))
        return state

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to train. Step 0 only measures the start, and is not yielded."""
        if self.state.line:  # step 0, or a run that stopped between an update and its line
            self.complete()
        while self.state.step < self.run.config.steps:
            yield self.state.step + 1

    def finish_step(self, step: int, games_PG: list[list[ScoredGame]], update: Update) -> None:
        """Record a step, whose update is in the weights; then validate, save and stop as is due."""
        run, ranks = self.run, self.run.ranks
        ranks.run(lambda: run.log.trajectories(f"step-{step:06d}-rank{ranks.rank}", games_PG))
        measured = step_metrics(games_PG, ranks, rollout_seconds=run.log.seconds["rollout"])
        self.state.step, self.state.line = step, {"step": step, **update.metrics(), **measured}
        self.complete()
        self.stop_if_idle(update)

    def stop_if_idle(self, update: Update) -> None:
        """Raise Resumable after IDLE_STEPS steps in a row in which nothing was learned."""
        self.idle_steps = 0 if update.taken else self.idle_steps + 1
        if self.idle_steps == IDLE_STEPS:
            raise Resumable(
                f"the loss or its gradient was not finite in {IDLE_STEPS} steps in a row: try a smaller --lr"
                if update.skipped
                else f"the environment broke every group of {IDLE_STEPS} steps in a row"
            )

    def complete(self) -> None:
        """Validate, log and save the step, and print the alarms of its metrics.

        Raises Resumable if the agent or a checkpoint cannot be written, or if any rank has received a signal.
        """
        run, state, config = self.run, self.state, self.run.config
        due = state.step >= config.steps or state.step % config.save_every == 0
        line = state.line
        if config.val_data and due:
            with run.log.phase("validation"):
                line = line | validation_metrics(run, step=state.step)
        spent = spending(run.environment, run.ranks)
        line = run.ranks.run(lambda: run.log.metrics(line | spent))
        score = (line.get("val/em", -1.0), line.get("val/reward", 0.0))  # the reward decides where EM is 0
        # Of equal agents the first stays the best: one that has collapsed must not replace it.
        # A reward of the user's comes first: EM may know only one of several right answers.
        order = -1 if config.reward else 1
        best = (state.best_em, state.best_reward)
        better = "val/em" in line and (state.best_step < 0 or score[::order] > best[::order])
        newest = due and state.step > 0 and not config.val_data  # without validation, the newest counts
        if better or newest:
            with run.log.phase("save"):
                export_agent(
                    run.policy, str(run.start), config, run.folder / "agent", metrics=line, ranks=run.ranks
                )
            state.best_step, state.best_em, state.best_reward = state.step, *score
        state.line = {}  # a run that stops before this line validates the step again when it resumes
        if better or (due and state.step > 0):
            self.save()
            self.update_report()
        run.log.progress.n = state.step
        for alarm in self.watchdog.see(line):
            run.log.say(f"Alarm at step {state.step}: {alarm} (docs/running.md says what to do)")
        for stop in filter(None, run.ranks.gather(run.interrupt.stop)):
            raise stop

    def save(self) -> None:
        """Write a checkpoint, unless this state is saved. Raises Resumable if it cannot be written."""
        run = self.run
        if self.state != self.saved:
            with run.log.phase("save"):
                save_checkpoint(run.folder, self.state, run.policy, run.optimizer, run.config, run.ranks)
            self.saved = replace(self.state)

    def update_report(self) -> None:
        """Write report.html. A failure does not stop the run: the report can be made again."""
        if self.run.ranks.first:
            from prompt_r1.training.report import write_report  # not part of a step

            try:
                write_report(self.run.folder)
            except (OSError, UsageError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                self.run.log.say(f"report.html could not be written: {reason}")


def warm_up(run: Run, *, game_tokens: int, tokens: int) -> None:
    """Compute one full micro-batch, of games of `game_tokens`, so that the KV cache leaves room for it.

    On GPUs the cache takes a share of what is free beside this process's own peak so far (`agent.kv_cache`).
    Adam has its states by now. The gradients are 0 and dropped. Called by every rank.
    """
    game = Trajectory(Question("warm-up", "", "", ()))
    game.add_context([0])
    game.add_sampled(Completion([0] * (game_tokens - 1), [0.0] * (game_tokens - 1), finished=True))
    games = [ScoredGame(game, None, 0.0)] * max(1, tokens // game_tokens)
    batch = make_batch(games, lambda trajectory: 0.0, run.policy.device)
    run.reference_logprobs(batch.packed)
    (batch.weights * run.policy(batch.packed).logprobs).sum().backward()
    run.optimizer.zero_grad(set_to_none=True)


def summary(folder: Path, best_step: int, config: AgentConfig) -> str:
    """Where the results are, and the next commands."""
    mini = config.env == "mini" and set(config.data) <= {"mini"}
    validated = tuple(name for name in config.val_data if name != HELD_OUT)
    other = ("mini:ood",) if mini else config.test_data or validated or config.data
    # A folder names no code to import, so the user's own objects must be named again.
    own = ["--env", config.env] if OBJECT_PREFIX in config.env else []
    text = [
        "Where it is",
        f"  {folder}/report.html: counts, curves and games, to open in a browser",
        f"  {folder}/agent: the agent of step {best_step}, a Hugging Face folder",
        f"  {folder}/metrics.jsonl: the curves; trajectories/: every game",
        *([f"  {folder}/{TEST_FILE}: the test by dataset"] if config.test_data else []),
        "What to type next",
        f"  {command('ask', '--agent', folder, *own)}",
        f"  {command('evaluate', '--agent', folder, *own, '--data', *other)}",
    ]
    return "\n".join(text)
