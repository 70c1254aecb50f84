"""One group of games and one optimiser step on it, kept to be looked at: what `--explain` tells of."""

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
from prompt_r1.environments.opening import environment_opener
from prompt_r1.errors import UsageError
from prompt_r1.grpo import Loss, group_advantages, grpo_loss
from prompt_r1.protocol import Codec
from prompt_r1.reward import RULES, score
from prompt_r1.rollout import play, play_groups
from prompt_r1.training.batch import Batch, collate, sequence_mean_weight
from prompt_r1.training.weights import load_learner, load_reference
from prompt_r1.types import Question, ScoredGame, Trajectory

QUESTIONS = 24  # that are played to find one whose games differ most


@dataclass(frozen=True)
class Look:
    """What the policy says of each game of a group, at one moment."""

    batches: list[Batch]  # one a game
    losses: list[Loss]
    logprobs: list[Tensor]  # (N,) of each game's agent tokens


@dataclass(frozen=True)
class Step:
    """Before and after one optimiser step."""

    before: Look
    after: Look
    grad_norm: float


def take_step(policy: Policy, reference: Policy, samples: list[ScoredGame], config: TrainConfig) -> Step:
    """Look at the games, descend the loss once with the settings of training, and look again."""
    weight = partial(sequence_mean_weight, games=len(samples))
    batches = []
    for sample in samples:  # one batch a game: no split changes the sum of the gradients
        [batch] = collate([sample], weight, tokens_per_batch=1, device=policy.device)
        with torch.no_grad():
            batches.append(replace(batch, old=batch.engine, ref=reference(batch.packed).logprobs))

    def look() -> Look:
        logprobs = [policy(batch.packed).logprobs for batch in batches]
        losses = [_loss(each, batch, config) for each, batch in zip(logprobs, batches, strict=True)]
        return Look(batches, losses, logprobs)

    before = look()
    torch.stack([loss.total for loss in before.losses]).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.grad_clip).item()
    torch.optim.AdamW(
        policy.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    ).step()
    with torch.no_grad():
        return Step(before, look(), norm)


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
class Lesson:
    """A group from its games to the step that it causes."""

    agent: str
    config: TrainConfig  # the game that was played
    codec: Codec
    samples: list[ScoredGame]
    step: Step


def make_lesson(config: TrainConfig, ranks: Ranks) -> Lesson:
    """Play groups, score one, compare its games, take one step. The same for the same seed and agent."""
    path, start, config = _who_plays(config)
    player = load_agent(path, config, ranks.device)
    reference = load_reference(start, config, player, ranks)
    policy = load_learner(path, config, player, ranks)
    group = choose_group(asyncio.run(_play(config, player, ranks)), config)
    rewards = [score(game, rule=RULES[config.rule]) for game in group]
    [advantages] = group_advantages([[reward.total for reward in rewards]])
    samples = [ScoredGame(*columns) for columns in zip(group, rewards, advantages, strict=True)]
    return Lesson(str(path), config, player.codec, samples, take_step(policy, reference, samples, config))


def _who_plays(config: TrainConfig) -> tuple[str | Path, str | Path, TrainConfig]:
    """The newest mini run's agent and its game where it is of this seed, else the agent that training begins
    with; and the frozen start.
    """
    start = find_agent(config.agent, config.seed)
    try:
        path = newest_mini_run() / "agent"
    except UsageError:
        return start, start, config
    game = trained_config(path)
    if config.agent != "mini" or game is None or game.seed != config.seed:
        return start, start, config
    return path, start, replace(game, device=config.device)


async def _play(config: TrainConfig, player: Agent, ranks: Ranks) -> list[list[Trajectory]]:
    """A group of games of each of the first training questions."""
    environment = environment_opener(config, seed=config.seed, folder=None, ranks=ranks)(config.env)
    questions: Sequence[Question] = find_questions(config.data, "train", config.seed)[:QUESTIONS]

    async def play_one(question: Question, seed: str, sample: int) -> Trajectory:
        generate = partial(player.generate, temperature=config.temperature)
        ask = partial(environment.ask, sample=sample, session=question.id)
        return await play(question, generate, ask, player.codec, player.game, seed=seed)

    seeds = [f"explain/{config.seed}/{number}" for number in range(len(questions))]
    try:
        return await play_groups(questions, config.group_size, play_one, seeds=seeds)
    finally:
        await environment.close()


def choose_group(groups_PG: list[list[Trajectory]], config: TrainConfig) -> list[Trajectory]:
    """The group whose games earned the most different rewards: where all are equal nothing is learned.

    Raises UsageError when all games of every group earned the same.
    """
    whole = [group for group in groups_PG if all(game.stop != "env_error" for game in group)]
    kinds_P = [
        len({round(score(game, rule=RULES[config.rule]).total, 6) for game in group}) for group in whole
    ]
    if max(kinds_P, default=1) < 2:
        raise UsageError("in no group did the games earn different rewards: try another --seed")
    return whole[kinds_P.index(max(kinds_P))]
