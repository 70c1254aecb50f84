"""Train an agent to question an environment: `python train.py`, or `torchrun --nproc-per-node N train.py …`.

One step of Prompt-R1 (paper, section 3), in `Trainer.step`:

    play      G games of each question: the agent asks, the environment replies     rollout.play_groups
    score     each game: first its format, then its answer                          reward.score
    compare   each game with its siblings                                           grpo.group_advantages
    update    the agent towards what its better games did                           update.Updater
"""

import asyncio
import gc
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from prompt_r1.agent.names import find_agent
from prompt_r1.agent.player import Player, check_fit, load_player
from prompt_r1.agent.policy import Policy
from prompt_r1.cli.command_line import run, train_config
from prompt_r1.config.train import TrainConfig
from prompt_r1.data import QuestionSampler
from prompt_r1.data.named import find_questions
from prompt_r1.distributed.ranks import RankLost, Ranks, deal, start_ranks, stop_ranks, together
from prompt_r1.distributed.signals import Interrupt
from prompt_r1.environments.opening import environment_opener
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import FatalEnvError, Resumable
from prompt_r1.grpo import group_advantages, survivors
from prompt_r1.reward import RULES, score
from prompt_r1.rollout import play_groups
from prompt_r1.storage.run_folder import lock_run, open_run
from prompt_r1.storage.run_log import Clock, Log
from prompt_r1.training.batch import Sample
from prompt_r1.training.console import Console, summary
from prompt_r1.training.cost_estimate import estimate
from prompt_r1.training.explain import explain
from prompt_r1.training.lifecycle import Keeper
from prompt_r1.training.step_metrics import spending, step_metrics
from prompt_r1.training.update import Updater, split
from prompt_r1.training.validation import Result, ask_directly, means, play_all, table
from prompt_r1.training.weights import load_learner, load_reference
from prompt_r1.types import Question, Trajectory


def main(arguments: list[str]) -> None:
    """Train from a command line, or only estimate or explain."""
    config, name = train_config(arguments)
    if config.dry_run:
        print(estimate(config))
        return
    if config.threads:
        torch.set_num_threads(config.threads)  # more help a tiny model little, and hurt it on a busy machine
    if config.explain:
        explain(config, print)
        return
    with Interrupt() as interrupt:
        ranks = start_ranks(config.device, config.parallel, patience=config.rank_timeout)
        folder = ranks.from_first(lambda: open_run(config, name))
        with lock_run(folder, ranks), asyncio.Runner() as runner:
            train(config, folder, ranks, runner, interrupt)
        stop_ranks(ranks)  # a rank that raised may not wait for the others here: torchrun ends them


def train(
    config: TrainConfig, folder: Path, ranks: Ranks, runner: asyncio.Runner, interrupt: Interrupt
) -> None:
    """The run from its start, or from its newest checkpoint, to its last step and the table at the end."""
    log = Log(folder, quiet=not ranks.first, track=config.track)
    console = Console(log, steps=config.steps, priced=bool(config.env_price))
    environment = environment_opener(config, seed=config.seed, folder=folder, ranks=ranks)(config.env)
    together(environment.check(), runner, ranks)
    start = ranks.from_first(lambda: find_agent(config.agent, config.seed))
    player = load_player(start, config, ranks.device)
    learner = load_learner(start, config, player, ranks)
    reference = load_reference(start, config, player, ranks) if config.kl_coef else None
    updater = make_updater(config, learner, reference, ranks)
    sampler = QuestionSampler(find_questions(config.data, "train", config.seed), seed=config.seed)
    validation = find_questions(config.val_data, "validation", config.seed)[: config.val_limit]
    test = find_questions(config.test_data, "test", config.seed)
    check_fit([*sampler.questions, *validation, *test], player.codec, config.max_tokens)
    clock = Clock(console.phase)
    trainer = Trainer(config, ranks, runner, interrupt, log, console, clock, player, updater, environment)
    keeper = Keeper(config, ranks, log, console, clock, interrupt, learner, updater.optimizer, sampler,
                    start, refresh=trainer.refresh)  # fmt: skip
    size = sum(parameter.numel() for parameter in learner.parameters())
    where = f"{ranks.count} × {ranks.device.type}"
    log.say(f"{folder}: agent {config.agent} ({size:,} parameters), environment {config.env}, {where}")
    state = keeper.begin()

    try:
        with console.bar(state.step):
            while state.line or state.step < config.steps:
                if not state.line:  # else the run had stopped after the update, before the line was written
                    step = state.step + 1
                    line: dict[str, float] = {"step": step}
                    if step > 0:  # step 0 only measures the start
                        line |= trainer.step(step, sampler.take(config.questions))
                    state.step, state.sampler, state.line = step, sampler.state(), line
                line = dict(state.line)
                if validation and (state.step % config.val_every == 0 or state.step == config.steps):
                    line |= trainer.validate(validation)
                line |= clock.take() | spending(environment, ranks)
                state = keeper.complete(state, line)
                updater.stop_if_broken()
                console.at(state.step)
        keeper.save(state, wait=True)
        if test:
            log.say("\n" + table(trainer.compare_on(test, start)))
        log.say("\n" + summary(folder, state.best_step, config))
    except (FatalEnvError, Resumable) as error:
        # Before the first step: nothing to save, and a fatal error is the user's to mend.
        if state.step < (1 if isinstance(error, FatalEnvError) else 0) or isinstance(error, RankLost):
            raise
        keeper.save(state, wait=True)
        stop_ranks(ranks)  # they have agreed on this stop
        raise Resumable(f"{error}; stopped after step {state.step}, the same command goes on") from None
    finally:
        log.close()
        runner.run(environment.close())


@dataclass
class Trainer:
    """What a step needs, on each rank; `step` is the algorithm."""

    config: TrainConfig
    ranks: Ranks
    runner: asyncio.Runner
    interrupt: Interrupt
    log: Log
    console: Console
    clock: Clock
    player: Player
    updater: Updater
    environment: Pool

    def step(self, number: int, questions: list[Question]) -> dict[str, float]:
        """Play, score, compare, update. Each rank plays its share; groups never cross ranks."""
        config, ranks = self.config, self.ranks
        mine = deal([len(question.text) for question in questions], ranks.count)[ranks.rank]
        # A game's seed does not depend on the rank that plays it: any number of ranks plays the same games.
        seeds = [f"{config.seed}/{number}/{index}" for index in mine]
        play = partial(
            self.player.play, environment=self.environment, config=config, temperature=config.temperature
        )
        with self.clock.phase("rollout"):
            counted = self.console.counted(play, len(mine) * config.group_size)
            mine_P = [questions[index] for index in mine]
            rollout = play_groups(mine_P, config.group_size, counted, seeds=seeds)
            groups_PG = together(self.interrupt.guard(rollout), self.runner, ranks)
        samples_PG = compare(groups_PG, config)
        with self.clock.phase("update"):
            games, group_size = config.questions * config.group_size, config.group_size
            mini_batches = split(
                samples_PG,
                games=games,
                group_size=group_size,
                mini_batch=config.games_per_update,
                numbers=mine,
            )
            metrics = self.updater.update(mini_batches)
            self.refresh()
        self.log.trajectories(f"step-{number:06d}-rank{ranks.rank}", groups_PG, samples_PG)
        metrics |= step_metrics(
            groups_PG, samples_PG, RULES[config.rule], ranks, self.clock.seconds["rollout"]
        )
        return metrics

    def refresh(self) -> None:
        """Play with the weights as they are now. Called by every rank: sharded ones are gathered."""
        self.player.policy.follow(self.updater.policy)
        self.player.forget()  # what is cached was computed with the old weights

    def validate(self, questions: list[Question]) -> dict[str, float]:
        """Greedy games of held-out questions: val/em, val/f1, val/reward, val/format, val/turns."""
        with self.clock.phase("validation"):
            averages = means(self.results(self.player, questions))
        return {f"val/{name}": value for name, value in averages.items()}

    def results(self, player: Player, questions: list[Question]) -> list[Result]:
        """Greedy games of an agent, each rank its share; the results are on every rank."""
        play = partial(player.play, environment=self.environment, config=self.config, temperature=0.0)
        mine = questions[self.ranks.rank :: self.ranks.count]
        counted = self.console.counted(play, len(mine))
        results = self.gather(play_all(mine, counted, rule=RULES[self.config.rule]))
        player.forget()
        return results

    def gather(self, share: Coroutine[None, None, list[Result]]) -> list[Result]:
        """Run this rank's share; the results of all ranks."""
        shares = self.ranks.gather(together(self.interrupt.guard(share), self.runner, self.ranks))
        return [result for results in shares for result in results]

    def compare_on(self, test: list[Question], start: Path | str) -> dict[str, list[Result]]:
        """Questions that nothing was chosen by: the environment alone, the agent before and after."""
        rows: dict[str, list[Result]] = {}
        if self.config.env != "none":
            alone = ask_directly(test[self.ranks.rank :: self.ranks.count], self.environment.ask)
            rows["environment alone"] = self.gather(alone)
        for name, path in [("untrained agent", start), ("trained agent", self.log.folder / "agent")]:
            rows[name] = self.results(load_player(path, self.config, self.ranks.device), test)
            gc.collect()  # an engine is part of a cycle, and two more agents may be one too many
        return rows


def compare(groups_PG: list[list[Trajectory]], config: TrainConfig) -> list[list[Sample]]:
    """Score the games that the environment did not break, and compare each with its siblings."""
    alive_PG = [survivors(group) for group in groups_PG]
    rewards_PG = [[score(game, rule=RULES[config.rule]) for game in group] for group in alive_PG]
    advantages_PG = group_advantages([[reward.total for reward in rewards] for rewards in rewards_PG])
    return [list(map(Sample, *columns)) for columns in zip(alive_PG, rewards_PG, advantages_PG, strict=True)]


def make_updater(config: TrainConfig, policy: Policy, reference: Policy | None, ranks: Ranks) -> Updater:
    """The update with the settings of eq. 17 and AdamW; every rank makes one."""
    if config.checkpointing:
        policy.checkpoint_activations()
    # Fused: one kernel, without temporary tensors as large as the weights.
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=ranks.device.type == "cuda",
    )
    return Updater(
        policy=policy,
        reference=reference,
        optimizer=optimizer,
        ranks=ranks,
        clip=config.clip,
        kl_coef=config.kl_coef,
        grad_clip=config.grad_clip,
        token_mean=config.loss == "token-mean",
        tokens_per_batch=config.tokens_per_batch,
    )


if __name__ == "__main__":
    run(main)
