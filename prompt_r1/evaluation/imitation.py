"""Agents that are fine-tuned before they play, for the methods `sft`, `bc` and `rft`.

sft    LoRA on gold answers
bc     LoRA on recorded games that ended right: in the mini world, the demonstrations of the warm start
rft    LoRA on the agent's own games on training questions that ended right. In each of two rounds the agent
       of the round before plays, and its start learns from all right games so far (STaR, Zelikman et al.
       2022, arXiv 2203.14465; ReST, Gulcehre et al. 2023, arXiv 2308.08998)

Each begins with the start of the user's agent, and is done once: the agent in the folder is used again.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from prompt_r1.environments.environment import Environment
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.agent import demonstrations
from prompt_r1.miniworld.demonstrations import record
from prompt_r1.pair.agent import Agent, load_agent, play_question
from prompt_r1.pair.names import find_agent
from prompt_r1.pair.trained import AgentSpec, agent_preset, trained_config
from prompt_r1.programs.command_line import teaching_command
from prompt_r1.protocol import Codec
from prompt_r1.reward import Rule, score, well_formed
from prompt_r1.settings.agent import MINI_AGENT, AgentConfig
from prompt_r1.settings.train import preset_of
from prompt_r1.training.warm_start import fine_tune_agent
from prompt_r1.training.warm_start_settings import SftConfig
from prompt_r1.types import Completion, Question, Trajectory

# The numbers of rft:
ROUNDS = 2  # A round plays games and fine-tunes on the right ones so far.
CALLS = 10_000  # Calls of the environment in all rounds.
QUESTIONS_AT_ONCE = 20  # Questions that are played between two looks at the calls that are left.
GROUP_SIZE = 5  # Games of a question.
GAMES_WITHOUT_RIGHT = 100  # rft gives up after so many games if no game ended right.

SFT_RANK = 8
IMITATION_RANK = 16


def sft_agent(
    agent: AgentSpec, train: Sequence[Question], *, seed: int, device: str, folder: Path
) -> AgentSpec:
    """Fine-tune an agent on the gold answers to training questions, for a game of one turn."""
    settings = _settings(agent, seed=seed, device=device, rank=SFT_RANK)
    # The mini agents of two seeds differ. The start must be the agent that the run has trained.
    game = one_turn_config(agent.start, seed=agent.config.seed)
    if not _is_done(folder):
        fine_tune_agent(
            lambda codec: [example_of(question, codec) for question in train], settings, game, folder
        )
    return AgentSpec(folder / "agent", game, agent.start)


def bc_agent(agent: AgentSpec, *, seed: int, device: str, folder: Path) -> AgentSpec:
    """Fine-tune the mini agent on the demonstrations that ended right. Raises UsageError for other agents."""
    if agent.start != MINI_AGENT:
        raise UsageError("bc imitates the demonstrations of the mini agent: leave it out with other agents")
    settings = _settings(agent, seed=seed, device=device, rank=IMITATION_RANK)
    rule = agent.config.base_rule
    if not _is_done(folder):
        fine_tune_agent(lambda codec: right_demonstrations(seed, rule, codec), settings, agent.config, folder)
    return AgentSpec(folder / "agent", agent.config, agent.start)


async def rft_agent(
    agent: AgentSpec,
    environment: Environment,
    train: Sequence[Question],
    *,
    seed: int,
    device: torch.device,
    folder: Path,
    calls: int,
) -> AgentSpec:
    """Fine-tune an agent on its own right games. `calls`: limit of the games (0: CALLS).

    Raises UsageError if none of the first games ended right.
    """
    settings = _settings(agent, seed=seed, device=str(device), rank=IMITATION_RANK)
    if not _is_done(folder):
        start = find_agent(agent.start, agent.config.seed)
        player = load_agent(start, agent.config, device)
        await imitate_own_games(
            player, environment, train, settings, agent.config, folder, calls=calls or CALLS
        )
    return AgentSpec(folder / "agent", agent.config, agent.start)


def _settings(agent: AgentSpec, *, seed: int, device: str, rank: int) -> SftConfig:
    # At LLaMA-Factory's learning rate the mini agent does not learn.
    lr = 3e-3 if agent.start == MINI_AGENT else 1e-4
    return SftConfig(agent=agent.start, seed=seed, lr=lr, rank=rank, device=device)


def _is_done(folder: Path) -> bool:
    return trained_config(folder / "agent") is not None


def one_turn_config(start: str, *, seed: int) -> AgentConfig:
    """How an agent plays that answers in one turn, without an environment."""
    preset = agent_preset(preset_of(start))
    game = replace(preset, env="none", instruction="answer")
    return replace(game, agent=start, seed=seed)


def example_of(question: Question, codec: Codec) -> Trajectory:
    """A question and its first gold answer, without thinking, as a game of one turn."""
    opening = codec.encoder.trusted(("</think>\n" if codec.opened else "") + "<answer>")
    end = [*codec.encoder.trusted("</answer>"), codec.turn_end]
    answer = [*opening, *codec.encoder.untrusted(question.answers[0]), *end]
    example = Trajectory(question)
    example.add_context(codec.opening(question.text))
    example.add_sampled(Completion(answer, [0.0] * len(answer), finished=True))
    return example


def ended_right(game: Trajectory, rule: Rule) -> bool:
    """Whether a game asks, is well formed throughout, and earns the full reward."""
    has_full_reward = score(game, rule=rule).total > 1 - 1e-6
    return has_full_reward and well_formed(game) and len(game.turns) > 1


def right_demonstrations(seed: int, rule: Rule, codec: Codec) -> list[Trajectory]:
    """The demonstrations of the mini agent's warm start that ended right."""
    played = [record(question, turns, codec) for question, turns in demonstrations(seed)]
    return [game for game in played if ended_right(game, rule)]


async def imitate_own_games(
    agent: Agent,
    environment: Environment,
    train: Sequence[Question],
    settings: SftConfig,
    game: AgentConfig,
    folder: Path,
    *,
    calls: int,
) -> None:
    """Play and fine-tune in rounds. Each ends after its share of `calls`.

    Raises UsageError if none of the first games ended right.
    """
    rng = random.Random(f"rft {settings.seed}")
    rule = game.base_rule
    right: list[Trajectory] = []

    def games_so_far(_: Codec) -> list[Trajectory]:
        return right

    epoch = 0
    for number in range(1, ROUNDS + 1):
        made = 0
        tried = 0
        while made < calls / ROUNDS and (right or tried < GAMES_WITHOUT_RIGHT):
            epoch += 1  # A question that is drawn again gets new replies where the environment samples.
            questions = rng.sample(train, min(QUESTIONS_AT_ONCE, len(train)))
            seed = f"rft {settings.seed}/{number}/{made}"
            played = await _play_groups(agent, environment, questions, seed=seed, epoch=epoch)
            # A game without a call counts as one, so that the round of an agent that never asks ends too.
            made += sum(max(1, one.spent.calls) for one in played)
            tried += len(played)
            right += [one for one in played if ended_right(one, rule)]
        if not right:
            raise UsageError(
                f"no game of {settings.agent} ended right in {tried}: there is nothing to imitate. If it "
                f"lacks the format, `{teaching_command(settings.agent)}` teaches it"
            )
        is_last = number == ROUNDS
        out = folder if is_last else folder.with_name(f"{folder.name}-round-{number}")
        learned = fine_tune_agent(games_so_far, settings, game, out)
        if not is_last:
            agent = load_agent(learned, game, agent.policy.device)


async def _play_groups(
    agent: Agent, environment: Environment, questions: Sequence[Question], *, seed: str, epoch: int
) -> list[Trajectory]:
    """Play GROUP_SIZE games of each question at once."""
    games = []
    for question in questions:
        for sample in range(GROUP_SIZE):
            games.append(
                play_question(
                    agent,
                    environment,
                    question,
                    seed=f"{seed}/{sample}/{question.id}",
                    temperature=1.0,
                    sample=sample,
                    epoch=epoch,
                )
            )
    return await asyncio.gather(*games)
