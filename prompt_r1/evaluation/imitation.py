"""Agents that are fine-tuned before they play, for the methods `sft`, `bc` and `rft`.

    sft    LoRA on gold answers
    bc     LoRA on recorded games that ended right: the demonstrations of the mini world's warm start
    rft    LoRA on the agent's own games that ended right, in two rounds. In each round the newest agent plays
           training questions. Then a fresh copy of the start is fine-tuned on all right games so far (STaR,
           Zelikman et al. 2022, arXiv 2203.14465; ReST, Gulcehre et al. 2023, arXiv 2308.08998)

Each fine-tuning begins with the start of the user's agent: the agent before its training. It is done once,
and later evaluations use the agent in the folder.
"""

import itertools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from prompt_r1.environments.environment import Environment
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import System
from prompt_r1.miniworld.demonstrations import demonstrations
from prompt_r1.model.machine import pick_device, use_threads
from prompt_r1.pair.agent import Agent, Sampling, load_agent, play_question
from prompt_r1.pair.named_agent import NamedAgent, teaching_command
from prompt_r1.protocol import Codec
from prompt_r1.reward import Rule, score_games, well_formed
from prompt_r1.rollout import play_groups, trajectory_of
from prompt_r1.settings.agent import MINI
from prompt_r1.training.settings import FineTuningConfig
from prompt_r1.training.supervised import fine_tune_agent
from prompt_r1.types import Completion, Question, Trajectory

# The numbers of rft:
ROUNDS = 2  # A round plays games, and then fine-tunes on all right games so far.
CALLS = 10_000  # calls of the environment in all rounds together
QUESTIONS_AT_ONCE = 20  # the most questions that are played before the calls are counted again
GROUP_SIZE = 5  # games of each question
GAMES_WITHOUT_RIGHT = 100  # If none of this many games ended right, rft gives up.

SFT_RANK = 8
IMITATION_RANK = 16


async def fine_tuned_agent(
    evaluation: Evaluation, system: System, agent: NamedAgent, environment: Environment
) -> NamedAgent:
    """Fine-tune an agent as the system's method says, or use the fine-tuned agent in the system's folder.

    `environment` replies to the games of rft.
    """
    train = evaluation.data.train
    learns_from = METHODS[system.method].fine_tuned_on
    folder = evaluation.folder_of(system)
    config = agent.config
    rank = IMITATION_RANK
    if learns_from == "gold answers":  # The games have one turn, in which the agent answers.
        config = replace(config, agent=agent.start, env="none", instruction="answer")
        rank = SFT_RANK
    model = folder / "agent"
    fine_tuned = NamedAgent(str(model), config, agent.start, model)
    if model.exists():
        return fine_tuned
    settings = FineTuningConfig(
        agent=agent.start,
        seed=evaluation.seed,
        # At LLaMA-Factory's learning rate the mini agent does not learn.
        lr=3e-3 if agent.start == MINI else 1e-4,
        rank=rank,
        device=str(pick_device(evaluation.config.device)),
    )
    match learns_from:
        case "gold answers":
            fine_tune_agent(
                lambda codec: [example_of(question, codec) for question in train], settings, config, folder
            )
        case "demonstrations":
            assert agent.start == MINI, f"there are no demonstrations for {agent.start}"
            # The demonstrations of the mini agent that the run started from: each seed has its own.
            fine_tune_agent(
                lambda codec: right_demonstrations(config.seed, config.base_rule, codec),
                settings,
                config,
                folder,
            )
        case "own games":
            calls = evaluation.config.optimize_calls or CALLS
            await fine_tune_on_own_games(agent, environment, train, settings, folder, calls=calls)
    return fine_tuned


async def fine_tune_on_own_games(
    agent: NamedAgent,
    environment: Environment,
    train: Sequence[Question],
    settings: FineTuningConfig,
    folder: Path,
    *,
    calls: int,
) -> None:
    """Fine-tune an agent on its own games that ended right.

    All rounds together make about `calls` calls of the environment: a round may exceed its share by the games
    of one question. Raises UsageError if none of the first games ended right.
    """
    config = agent.config
    rng = random.Random(f"rft {settings.seed}")
    epochs = itertools.count(1)
    right: list[Trajectory] = []  # the games of all rounds that ended right
    path = agent.make(config.seed)
    for number in range(1, ROUNDS + 1):
        use_threads(in_training=config.threads)
        player = load_agent(path, config, torch.device(settings.device))
        seed = f"rft {settings.seed}/{number}"
        draws_of_round = play_round(player, environment, train, rng, epochs, seed=seed, calls=calls / ROUNDS)
        games_played = 0
        async for games in draws_of_round:
            right.extend(game for game in games if ended_right(game, config.base_rule))
            games_played += len(games)
            if not right and games_played >= GAMES_WITHOUT_RIGHT:
                break
        if not right:
            raise UsageError(
                f"no game of {agent.start} ended right in {games_played}: there is nothing to imitate. If it "
                f"lacks the format, `{teaching_command(agent.start)}` teaches it"
            )
        del player  # Its KV cache is freed before the fine-tuning loads a model.
        out = folder if number == ROUNDS else folder.with_name(f"{folder.name}-round-{number}")
        path = fine_tune_agent(lambda codec: right, settings, config, out)


async def play_round(
    player: Agent,
    environment: Environment,
    train: Sequence[Question],
    rng: random.Random,
    epochs: Iterator[int],
    *,
    seed: str,
    calls: float,
) -> AsyncIterator[list[Trajectory]]:
    """Draw questions and play them, until about `calls` calls are made. Yields the games of each draw."""
    most_calls_of_question = GROUP_SIZE * max(1, player.game.max_turns - 1)
    calls_made = 0
    while calls_made < calls:
        # So many questions fit into the round even if every game makes as many calls as it may.
        fitting = max(1, int((calls - calls_made) // most_calls_of_question))
        questions = rng.sample(train, min(fitting, QUESTIONS_AT_ONCE, len(train)))
        # Each draw is an epoch of its own, so a question that is drawn again gets new sampled replies.
        seed_of_draw = f"{seed}/{calls_made}"
        games = await play_games(player, environment, questions, seed=seed_of_draw, epoch=next(epochs))
        # A game without a call counts as one, so that the round of an agent that never asks ends, too.
        calls_made += sum(max(1, game.spent.calls) for game in games)
        yield games


async def play_games(
    player: Agent, environment: Environment, questions: Sequence[Question], *, seed: str, epoch: int
) -> list[Trajectory]:
    """Play GROUP_SIZE games of each question, all concurrently."""

    async def play_one(question: Question, *, number: int, sample: int) -> Trajectory:
        sampling = Sampling(f"{seed}/{sample}/{question.id}", temperature=1.0)
        return await play_question(player, environment, question, sampling, sample=sample, epoch=epoch)

    games_PG = await play_groups(dict(enumerate(questions)), GROUP_SIZE, play_one)
    return [game for group in games_PG for game in group]


def example_of(question: Question, codec: Codec) -> Trajectory:
    """A question and its first gold answer, without thinking, as a game of one turn."""
    # Some chat templates open <think> at the start of the agent's turn. It is closed before the answer.
    opening = codec.encoder.trusted(("</think>\n" if codec.opened else "") + "<answer>")
    end = [*codec.encoder.trusted("</answer>"), codec.turn_end]
    answer = [*opening, *codec.encoder.untrusted(question.answers[0]), *end]
    example = Trajectory(question)
    example.add_context(codec.opening(question.text))
    example.add_sampled(Completion(answer, [0.0] * len(answer), finished=True))
    return example


def ended_right(game: Trajectory, rule: Rule) -> bool:
    """Whether a game asks the environment, has only well-formed turns, and earns the full reward."""
    [reward] = score_games([game], rule=rule)
    if reward is None:  # The environment broke the game.
        return False
    return reward.total > 1 - 1e-6 and well_formed(game) and len(game.turns) > 1


def right_demonstrations(seed: int, rule: Rule, codec: Codec) -> list[Trajectory]:
    """The demonstrations of the mini agent's warm start that ended right."""
    played = [trajectory_of(question, turns, codec) for question, turns in demonstrations(seed)]
    return [game for game in played if ended_right(game, rule)]
