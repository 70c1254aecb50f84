"""One group of games and one optimiser step on it, with all numbers that `--explain` prints."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from prompt_r1.agent.agent import Agent, load_agent
from prompt_r1.agent.names import find_agent, newest_mini_run, trained_config
from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.data.named import find_questions
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.environments.opening import Environments
from prompt_r1.errors import UsageError
from prompt_r1.grpo import Loss, group_advantages, grpo_loss
from prompt_r1.protocol import Codec
from prompt_r1.reward import score
from prompt_r1.rollout import play, play_groups
from prompt_r1.training.batch import Batch, collate, sequence_mean_weight
from prompt_r1.training.weights import load_learner, load_reference
from prompt_r1.types import Question, ScoredGame, Trajectory

QUESTIONS = 24  # played to find the one whose games differ most


@dataclass(frozen=True)
class Snapshot:
    """Log-probabilities and loss of each game of a group, for one state of the weights."""

    batches: list[Batch]  # one per game
    losses: list[Loss]
    logprobs: list[Tensor]  # (N,) of each game's agent tokens


@dataclass(frozen=True)
class OptimizerStep:
    """The games of a group before and after one optimiser step."""

    before: Snapshot
    after: Snapshot
    grad_norm: float


def take_step(
    policy: Policy, reference: Policy, games: list[ScoredGame], config: TrainConfig
) -> OptimizerStep:
    """Take one optimiser step on a group, with the settings of training."""
    weight = partial(sequence_mean_weight, games=len(games))
    batches = []
    for game in games:  # one batch per game: no split changes the sum of the gradients
        [batch] = collate([game], weight, tokens_per_batch=1, device=policy.device)
        with torch.no_grad():
            batches.append(replace(batch, old=batch.engine, ref=reference(batch.packed).logprobs))

    def snapshot() -> Snapshot:
        logprobs = [policy(batch.packed).logprobs for batch in batches]
        losses = [_loss(each, batch, config) for each, batch in zip(logprobs, batches, strict=True)]
        return Snapshot(batches, losses, logprobs)

    before = snapshot()
    torch.stack([loss.total for loss in before.losses]).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.grad_clip).item()
    torch.optim.AdamW(
        policy.trained_parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    ).step()
    with torch.no_grad():
        return OptimizerStep(before, snapshot(), norm)


def _loss(logprobs: Tensor, batch: Batch, config: TrainConfig) -> Loss:
    assert batch.old is not None and batch.ref is not None
    return grpo_loss(
        logprobs,
        batch.old,
        batch.ref,
        batch.advantages,
        batch.weights,
        clip=config.clip,
        kl_coef=config.kl_coef,
    )


@dataclass(frozen=True)
class Walkthrough:
    """One group, from its games to the optimiser step on it."""

    agent: str
    config: TrainConfig  # of the agent that played
    codec: Codec
    games: list[ScoredGame]
    step: OptimizerStep


def make_walkthrough(config: TrainConfig, ranks: Ranks) -> Walkthrough:
    """Play groups, choose one, score and compare its games, take one step.

    The result is the same for the same seed and agent.
    """
    start = find_agent(config.agent, config.seed)
    path, config = _choose_agent(start, config)
    agent = load_agent(path, config, ranks.device)
    reference = load_reference(start, config, agent, ranks)
    policy = load_learner(path, config, agent, ranks)
    games = choose_group(asyncio.run(_play(config, agent, ranks)), config)
    step = take_step(policy, reference, games, config)
    return Walkthrough(str(path), config, agent.codec, games, step)


def _choose_agent(start: str | Path, config: TrainConfig) -> tuple[str | Path, TrainConfig]:
    """The agent of the newest mini run of this seed and its settings; else the untrained agent."""
    if config.agent != "mini":
        return start, config
    try:
        path = newest_mini_run() / "agent"
    except UsageError:
        return start, config
    trained = trained_config(path)
    if trained is None or trained.seed != config.seed:
        return start, config
    # Only the command line names code to import.
    own = replace(trained, answer_metric=config.answer_metric, reward=config.reward)
    return path, replace(own, device=config.device)


async def _play(config: TrainConfig, agent: Agent, ranks: Ranks) -> list[list[Trajectory]]:
    """Play a group of games of each of the first training questions."""
    environment = Environments(config, seed=config.seed, folder=None, ranks=ranks).open(config.env)
    questions: Sequence[Question] = find_questions(config.data, "train", config.seed)[:QUESTIONS]

    async def play_one(question: Question, seed: str, sample: int) -> Trajectory:
        generate = partial(agent.generate, temperature=config.temperature)
        ask = partial(environment.ask, sample=sample, session=question.id)
        return await play(question, generate, ask, agent.codec, agent.game, seed=seed)

    seeds = [f"explain/{config.seed}/{number}" for number in range(len(questions))]
    try:
        return await play_groups(questions, config.group_size, play_one, seeds=seeds)
    finally:
        await environment.close()


def choose_group(groups_PG: list[list[Trajectory]], config: TrainConfig) -> list[ScoredGame]:
    """The first of the groups with the most different rewards, compared: equal rewards teach nothing.

    Raises UsageError if the games of every group earned the same.
    """
    best: list[ScoredGame] = []
    most = 1
    for group in groups_PG:
        if any(game.stop == "env_error" for game in group):
            continue
        rewards = [score(game, rule=config.reward_rule) for game in group]
        different = len({round(reward.total, 6) for reward in rewards})
        if different > most:
            [advantages] = group_advantages([[reward.total for reward in rewards]])
            best = [ScoredGame(*columns) for columns in zip(group, rewards, advantages, strict=True)]
            most = different
    if not best:
        raise UsageError("in no group did the games earn different rewards: try another --seed")
    return best
