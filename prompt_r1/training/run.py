"""A training run on this rank: its parts, and what it does around the steps of train.py."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from prompt_r1.data.sampler import digest_of
from prompt_r1.engine.model_check import check_model
from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.environments.specs import open_account, open_environment
from prompt_r1.errors import FatalEnvError, Interrupted, Resumable, UsageError
from prompt_r1.model.distributed import Interrupt, Ranks, errors_as_rank_lost, start_ranks, stop_ranks
from prompt_r1.model.forked_ranks import forked_ranks
from prompt_r1.model.loading import load_policy
from prompt_r1.model.lora import ADAPTER_ALPHA, adapters_removed, add_lora
from prompt_r1.model.packing import Packed
from prompt_r1.model.policy import Policy
from prompt_r1.pair.agent import Agent, load_agent
from prompt_r1.pair.names import find_agent
from prompt_r1.settings.fields import write_yaml
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.alarms import Alarms
from prompt_r1.training.batches import Batch, make_batch, make_mini_batches
from prompt_r1.training.checkpoint import (
    State,
    begin_states,
    digest_of_start,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from prompt_r1.training.export import export_agent
from prompt_r1.training.log import Log, read_metrics, trim_run
from prompt_r1.training.metrics import RUN_TOTALS, Row, metrics_of_game, spending, step_metrics
from prompt_r1.training.questions import RunQuestions, repetition_note, with_steps
from prompt_r1.training.run_folder import LOCK, claim, open_run
from prompt_r1.training.summary import summary
from prompt_r1.training.update import StepStats, limit_of
from prompt_r1.training.validation import (
    TEST_FILE,
    ask_directly,
    play_greedily,
    table_by_dataset,
    table_of_methods,
    validation_metrics,
)
from prompt_r1.types import Completion, Question, ScoredGame, Trajectory

T = TypeVar("T")

IDLE_STEPS = 3  # The run ends after this many consecutive steps without an optimiser step.


@contextmanager
def start_run(config: TrainConfig) -> Iterator["Run"]:
    """Start a run on every rank, in its locked folder, or resume it from its newest checkpoint.

    Raises UsageError, FatalEnvError or Resumable. An error that is raised inside `with` ends the ranks.
    """
    ranks_of_cpu = forked_ranks(config.ranks, device=config.device, questions=config.questions)
    with ranks_of_cpu, Interrupt() as interrupt:
        ranks = start_ranks(config.device, config.layout)
        with errors_as_rank_lost(ranks):
            folder = ranks.on_first_rank(lambda: open_run(config.out, config.resume))
            with (folder / LOCK).open("a+") as lock, asyncio.Runner() as runner:
                ranks.on_first_rank(lambda: claim(lock, folder))
                run = Run(config, folder, ranks, runner, interrupt)
                try:
                    with closing(run.log):
                        run.resume()
                        yield run
                finally:
                    runner.run(run.environment.close())
        # A rank that raised an error does not come here. It must not wait for the others: torchrun ends them.
        stop_ranks(ranks)


class Run:
    """A training run on this rank. Every method is called by every rank or by none."""

    def __init__(
        self, config: TrainConfig, folder: Path, ranks: Ranks, runner: asyncio.Runner, interrupt: Interrupt
    ) -> None:
        """Open, load and build everything. Raises UsageError, FatalEnvError or Resumable."""
        self.config = config
        self.folder = folder
        self.ranks = ranks
        self.interrupt = interrupt
        self._runner = runner
        # A missing key, or an endpoint that does not answer, is reported before a large model is loaded.
        self.environment = open_environment(
            config.env,
            config,
            typed=config.typed_environments,
            account=open_account(config, folder, rank=ranks.rank, ranks=ranks.count),
            seed=config.seed,
            device=ranks.device,
        )
        self.wait_for(self.environment.check())
        # The run starts from this agent: the folder or hub id of its weights.
        self.start = ranks.on_first_rank(lambda: find_agent(config.agent, config.seed))
        # The agent plays. Each rank has a whole copy of its weights, in the compute dtype.
        self.agent = load_agent(self.start, config, ranks.device)
        # The policy learns. It is the agent with adapters beside its frozen weights, or a model with float32
        # weights, perhaps sharded.
        if config.adapter_rank:
            self.policy = self.agent.policy
            add_lora(self.policy.model, rank=config.adapter_rank, alpha=ADAPTER_ALPHA, seed=config.seed)
            check_model(self.policy)  # Again, because some models read their layers' weights themselves.
        else:
            self.policy = load_learner(self.start, self.agent.policy, ranks, offload=config.offload)
        if config.checkpointing:
            self.policy.checkpoint_activations()
        # The reference is the frozen start, for the KL. If the policy has adapters, it is the policy without
        # them.
        self.reference: Policy | None = None
        if config.kl_coef and config.adapter_rank:
            self.reference = self.policy
        elif config.kl_coef:
            self.reference = load_reference(self.start, self.agent.policy, ranks, offload=config.offload)
        self.questions = RunQuestions.load(config, self.agent.codec)
        # Now the number of questions is known, so --epochs becomes a number of steps.
        self.config = config = with_steps(config, len(self.questions.training))
        self.optimizer = torch.optim.AdamW(
            self.policy.trained_parameters(),
            lr=config.lr,
            betas=(0.9, config.beta2),
            weight_decay=config.weight_decay,
            fused=ranks.device.type == "cuda",  # It needs no temporary tensors as large as the weights.
        )
        # Adam's states take their memory before the engine measures how much is free for its KV cache.
        begin_states(self.optimizer)
        # The progress bar counts this rank's games. Every step has the same number of them.
        self.games_per_step = len(self.questions.of_rank(1, ranks)) * config.group_size
        self.log = Log(
            folder,
            first=ranks.first,
            games=config.steps * self.games_per_step,
            priced=any(config.env_price),
            wandb=config.wandb,
        )
        self.gap_limit = limit_of(self.policy)
        self.alarms = Alarms(config.agent, self.gap_limit)
        # A new run begins with step 0, which validates the agent before training. Nothing is logged yet.
        self.state = State(
            unlogged_metrics={"step": 0},
            questions=digest_of(self.questions.training),
            start=ranks.on_first_rank(lambda: digest_of_start(self.start)),
        )
        self.saved: State | None = None  # what the newest checkpoint holds
        self.idle_steps = 0  # consecutive steps without an optimiser step

    # Before the first step

    def resume(self) -> None:
        """Go on from the newest valid checkpoint of the run folder, or begin with step 0."""
        config, ranks = self.config, self.ranks
        where = f"{ranks.count} × {ranks.device.type}"
        self.log.say(f"{self.folder}: agent {config.agent}, environment {config.env}, {where}")
        if ranks.device.type == "cuda":
            self.warm_up(game_tokens=config.max_tokens, tokens=config.tokens_per_batch)
        found = ranks.on_first_rank(lambda: newest_checkpoint(self.folder, say=self.log.say))
        if found is None:
            note = repetition_note(config, len(self.questions.training))
            if note:
                self.log.say(note)
        else:
            saved = load_checkpoint(found, self.policy, self.optimizer, config, ranks)
            if saved.questions != self.state.questions:
                raise UsageError(
                    f"{found} was made with other questions: give the data that the run began with, or "
                    "start a new run with another --out"
                )
            if saved.start != self.state.start:
                raise UsageError(
                    f"{found} was made with another agent than there is now in {self.start}: put the agent "
                    "back that the run began with, or start a new run with another --out"
                )
            self.state = saved
            self.saved = copy(saved)  # Later changes of `state` must not change it.
            self.log.say(f"Resuming after step {saved.trained_step} of {config.steps}, from {found}")
            self.refresh()
        state = self.state
        self.log.progress.initial = self.log.progress.n = state.trained_step * self.games_per_step
        ranks.on_first_rank(
            lambda: trim_run(self.folder, trained=state.trained_step, logged=state.logged_step)
        )
        ranks.on_first_rank(lambda: write_yaml(config, self.folder / "config.yaml"))
        for line in read_metrics(self.folder):
            self.alarms.read(line)
        self.interrupt.training_began = True  # A signal now saves the run before it ends it.

    def warm_up(self, *, game_tokens: int, tokens: int) -> None:
        """Compute one full micro-batch of made-up games, before the KV cache takes its memory.

        On GPUs the cache takes a share of the memory that this process's peak leaves free
        (`engine.kv_cache`), so an update must reach its peak once before. Adam has its states by now. No
        weight changes: the games have the weight 0, and the gradients are dropped.
        """
        game = Trajectory(Question("warm-up", "", "", ()))
        game.add_context([0])
        game.add_sampled(Completion([0] * (game_tokens - 1), [0.0] * (game_tokens - 1), finished=True))
        games = [ScoredGame(game, None, 0.0)] * max(1, tokens // game_tokens)
        batch = make_batch(games, lambda trajectory: 0.0, self.policy.device)
        if self.reference is not None:
            self.reference_logprobs(batch.packed)
        (batch.weights * self.policy(batch.packed).logprobs).sum().backward()
        self.optimizer.zero_grad(set_to_none=True)

    # During a step

    def remaining_steps(self) -> range:
        """The numbers of the steps that are not trained yet."""
        return range(self.state.trained_step + 1, self.config.steps + 1)

    def wait_for(self, work: Coroutine[None, None, T]) -> T:
        """Run this rank's share of some asynchronous work, and return its result.

        A signal cancels the work. An error on one rank is raised on all of them. Raises Resumable,
        FatalEnvError or UsageError.
        """
        return self.ranks.on_every_rank(lambda: self._runner.run(self.interrupt.guard(work)))

    def mini_batches(self, games_PG: Sequence[Sequence[ScoredGame]]) -> list[list[Batch]]:
        """Make this rank's micro-batches of each optimiser step of a training step."""
        return make_mini_batches(
            games_PG,
            self.ranks,
            mini_batch=self.config.mini_batch,
            tokens_per_batch=self.config.tokens_per_batch,
            token_mean=self.config.loss == "token-mean",
            mask_truncated=self.config.mask_truncated,
            skip_no_spread=self.config.skip_no_spread,
        )

    @torch.no_grad()
    def reference_logprobs(self, packed: Packed) -> Tensor:
        """The log-probabilities (N,) of the agent's tokens under the frozen reference."""
        assert self.reference is not None, "without a KL there is no reference"
        # With adapters, the reference is the policy without them.
        is_policy = self.reference is self.policy
        with adapters_removed(self.policy.model) if is_policy else nullcontext():
            return self.reference(packed).logprobs

    def refresh(self) -> None:
        """Play with the weights as they are now. Sharded weights are gathered from all ranks."""
        self.agent.policy.copy_weights_from(self.policy)
        self.agent.engine.begin_rollout()  # drops the KV cache, which belongs to the old weights

    # After a step

    def write_down(self, step: int, games_PG: list[list[ScoredGame]], stats: StepStats) -> None:
        """Record a step whose update is in the weights: games, metrics, best agent, checkpoint, alarms.

        Raises Resumable if a signal came, if nothing was learned for several steps, or if a file cannot be
        written.
        """
        name = f"step-{step:06d}-rank{self.ranks.rank}"
        self.ranks.on_every_rank(lambda: self.log.write_games(name, games_PG))
        measured = step_metrics(games_PG, self.ranks, rollout_seconds=self.log.seconds["rollout"])
        self.state.trained_step = step
        self.state.unlogged_metrics = {
            "step": step,
            **stats.metrics(self.ranks),
            **measured,
            **spending(self.environment, self.ranks),
        }
        self.finish_step()
        self.stop_if_idle(stats, environment_failed=measured["groups/dropped"] == 1)

    def finish_unlogged_step(self) -> None:
        """Finish step 0, or a step whose update is in the checkpoint but whose metrics are not logged."""
        if self.state.logged_step < self.state.trained_step:
            self.finish_step()

    def finish_step(self) -> None:
        """Validate, log, export the best agent, save and report alarms. Raises Resumable if a signal came.

        If a run is interrupted in here, it finishes the step when it is resumed.
        """
        state, config = self.state, self.config
        step = state.trained_step
        is_due = step == config.steps or step % config.save_every == 0
        metrics = dict(state.unlogged_metrics)
        if is_due and config.val_data:
            metrics |= self.validate()
        for name, value in spending(self.environment, self.ranks).items():
            if name in RUN_TOTALS:
                metrics[name] = value
            else:  # The step's games have made calls before the validation.
                metrics[name] = metrics.get(name, 0.0) + value
        metrics = self.ranks.on_every_rank(lambda: self.log.write_metrics(metrics))
        is_best = self.is_best(metrics)
        is_save_step = is_due and step > 0
        # Without validation, the newest agent counts as the best one.
        if is_best or (is_save_step and not config.val_data):
            self.export(metrics)
        state.logged_step = step
        state.unlogged_metrics = {}
        if is_best or is_save_step:
            self.save()
            self.update_report()
        self.log.progress.n = step * self.games_per_step
        for alarm in self.alarms.read(metrics):
            self.log.say(f"Alarm at step {step}: {alarm} (docs/running.md says what to do)")
        self.stop_if_asked()

    def validate(self) -> dict[str, float]:
        """Play greedy games of the validation questions, and return the metrics val/*."""
        with self.log.phase("validation"):
            name = f"validation-{self.state.trained_step:06d}"
            return validation_metrics(self.play_share(self.agent, self.questions.validation, name=name))

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Whether the agent of this step is the best so far, by validation.

        EM decides, and between agents of equal EM the reward. A user's own reward decides before EM, because
        EM may know only one of several right answers. Of equal agents the first stays the best: a later
        agent may have collapsed.
        """
        if "val/em" not in metrics:
            return False
        state = self.state
        em = metrics["val/em"]
        reward = metrics.get("val/reward", 0.0)
        if self.config.reward:
            is_better = (reward, em) > (state.best_reward, state.best_em)
        else:
            is_better = (em, reward) > (state.best_em, state.best_reward)
        return is_better or state.best_step < 0

    def export(self, metrics: dict[str, float]) -> None:
        """Write the agent of this step to agent/, and remember it as the best one."""
        with self.log.phase("save"):
            export_agent(
                self.policy,
                str(self.start),
                self.config,
                self.folder / "agent",
                metrics=metrics,
                ranks=self.ranks,
            )
        self.state.best_step = self.state.trained_step
        self.state.best_em = metrics.get("val/em", -1.0)
        self.state.best_reward = metrics.get("val/reward", 0.0)

    def save(self) -> None:
        """Write a checkpoint, unless the newest has this state. Raises Resumable if it cannot be written."""
        if self.state != self.saved:
            with self.log.phase("save"):
                save_checkpoint(self.folder, self.state, self.policy, self.optimizer, self.config, self.ranks)
            self.saved = copy(self.state)  # Later changes of `state` must not change it.

    def update_report(self) -> None:
        """Write report.html. A failure does not stop the run, because the report can be made later."""
        if not self.ranks.first:
            return
        from prompt_r1.training.report import write_report  # It imports jinja2, which is slow.

        try:
            write_report(self.folder)
        except OSError as error:
            self.log.say(f"report.html could not be written: {error.strerror}")
        except UsageError as error:
            self.log.say(f"report.html could not be written: {error}")

    def stop_if_asked(self) -> None:
        """Raise Resumable on every rank if any rank has received a signal."""
        for stop in self.ranks.gather(self.interrupt.stop):
            if stop is not None:
                raise stop

    def stop_if_idle(self, stats: StepStats, *, environment_failed: bool) -> None:
        """Raise Resumable after IDLE_STEPS consecutive steps in which nothing was learned."""
        self.idle_steps = 0 if stats.taken else self.idle_steps + 1
        if self.idle_steps < IDLE_STEPS:
            return
        if stats.skipped:
            reason = f"the loss or its gradient was not finite in {IDLE_STEPS} steps in a row"
            raise Resumable(f"{reason}: try a smaller --lr")
        if environment_failed:
            raise Resumable(f"the environment broke every group of {IDLE_STEPS} steps in a row")
        raise Resumable(
            f"every game of {IDLE_STEPS} steps in a row was cut off, and --mask-truncated leaves such games "
            "out: start a new run with larger --max-new and --max-tokens"
        )

    # After the last step

    def test(self) -> None:
        """Compare environment, untrained and trained agent on the test questions, if there are any.

        The rows by dataset are written to test.md in the run folder. Then prints where all results are.
        """
        if self.questions.test:
            self.log.say("\n" + self.compare_on_test(self.questions.test))
        self.update_report()  # It shows the games of the test.
        self.log.say("\n" + summary(self.folder, self.state.best_step, self.config))

    def compare_on_test(self, questions: Sequence[Question]) -> str:
        """Play the test, write test.md, and return the table for a terminal."""
        rows: dict[str, list[Row]] = {}
        if self.config.env != "none":
            own = self.ranks.share(questions)
            alone = self.wait_for(ask_directly(own, self.environment, self.config.env))
            rows["environment alone"] = self.ranks.gather_lists(alone)
        for name, path in [("untrained", self.start), ("trained", self.folder / "agent")]:
            agent = load_agent(path, self.config, self.ranks.device)
            rows[f"{name} agent"] = self.play_share(agent, questions, name=f"test-{name}")
            del agent  # Its memory is free before the next agent is loaded.
        by_dataset = table_by_dataset(rows, [question.dataset for question in questions]) + "\n"
        self.ranks.on_first_rank(lambda: (self.folder / TEST_FILE).write_text(by_dataset, "utf-8"))
        return table_of_methods(rows)

    def play_share(self, agent: Agent, questions: Sequence[Question], *, name: str) -> list[Row]:
        """Play a greedy game of each question: each rank plays its share.

        Returns on every rank the metrics of all games, in the order of the questions. Each rank writes its
        games to trajectories/NAME-rankN.jsonl.
        """
        own = self.ranks.share(questions)
        games = self.wait_for(play_greedily(agent, self.environment, own, self.config.reward_rule))
        agent.engine.begin_rollout()
        file = f"{name}-rank{self.ranks.rank}"
        self.ranks.on_every_rank(lambda: self.log.write_games(file, [[game] for game in games]))
        return self.ranks.gather_lists([metrics_of_game(game) for game in games])

    def save_and_stop(self, error: Resumable | FatalEnvError) -> Resumable | FatalEnvError:
        """Save after an error that ended the run on every rank, and return the error to raise.

        This is the same error with the advice to repeat the command. A fatal error before the first step has
        been trained is returned as it is, and nothing is saved. (A lost rank never comes here: `start_run`
        raises its error.)
        """
        if isinstance(error, FatalEnvError) and self.state.trained_step == 0:
            return error
        self.save()
        stop_ranks(self.ranks)  # all ranks have agreed on this stop
        kind = Interrupted if isinstance(error, Interrupted) else Resumable
        sentence = f"{error}; stopped after step {self.state.trained_step}"
        if not isinstance(error, OutOfBudget):  # Its own sentence says that a larger limit is needed.
            sentence += ", the same command resumes the run"
        return kind(sentence)


def load_learner(start: Path | str, played: Policy, ranks: Ranks, *, offload: bool) -> Policy:
    """Load the policy with the float32 weights that learn.

    If the agent itself has such weights, and they are not sharded, the agent's policy is returned.
    """
    if ranks.mesh is None and played.compute_dtype == torch.float32:
        return played
    return load_share(start, played, ranks, weights=torch.float32, offload=offload)


def load_reference(start: Path | str, played: Policy, ranks: Ranks, *, offload: bool) -> Policy:
    """Load the frozen start, from which the KL is measured."""
    # Sharded weights are gathered in the compute dtype, so a start that is stored in it is the same model.
    weights = torch.float32 if ranks.mesh is None else played.compute_dtype
    return load_share(start, played, ranks, weights=weights, offload=offload).requires_grad_(False)


def load_share(
    start: Path | str, played: Policy, ranks: Ranks, *, weights: torch.dtype, offload: bool
) -> Policy:
    """Load a whole model on this rank's device or, if weights are sharded, this rank's share of it.

    A model that will be sharded is loaded on the CPU, so that a GPU never holds all of it. It is the model of
    the agent, which has been checked, so it is not checked again.
    """
    device = ranks.device if ranks.mesh is None else torch.device("cpu")
    policy = load_policy(
        start,
        device=device,
        compute_dtype=played.compute_dtype,
        weights=weights,
        temperature=played.temperature,
        vocabulary=played.vocabulary,
    )
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=offload)
    return policy
