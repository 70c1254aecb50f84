"""The trained mini agents that the studies are about, each in its own world, and how they are played."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prompt_r1.agent.agent import Agent, load_agent
from prompt_r1.agent.names import find_agent, trained_config
from prompt_r1.config.train import TrainConfig
from prompt_r1.config.yaml_files import GAME_FILE
from prompt_r1.distributed.ranks import pick_device
from prompt_r1.errors import UsageError
from prompt_r1.miniworld import MiniEnvironment, make_world, mini_world
from prompt_r1.rollout import play
from prompt_r1.types import Environment, Question, Trajectory


@dataclass(frozen=True)
class Run:
    """A run folder: its agent before and after training, the world's environment, its test questions."""

    folder: Path
    config: TrainConfig
    agents: dict[str, Agent]  # "untrained", "trained"
    environment: MiniEnvironment
    questions: list[Question]


def find_runs(under: Path) -> list[Path]:
    """The mini runs below a folder that trained with the environment mini, the longest of each seed."""
    found: dict[int, tuple[int, Path]] = {}
    for file in sorted(under.glob(f"*/agent/{GAME_FILE}")):
        config = trained_config(file.parent)
        if config and config.agent == "mini" and config.env == "mini":
            found[config.seed] = max(found.get(config.seed, (0, file)), (config.steps, file.parent.parent))
    return [folder for _, folder in found.values()]


def load_run(folder: Path, *, per_kind: int) -> Run:
    """A run with the first `per_kind` test questions of each kind. Raises UsageError for no mini run."""
    config = trained_config(folder / "agent")
    if config is None or config.env != "mini":
        raise UsageError(f"{folder} is no run in the mini world: the studies ask its environment")
    config = replace(config, data=("mini",))
    device, world = pick_device("cpu"), mini_world(config.seed)
    kinds = dict.fromkeys(question.dataset for question in world.test)
    questions = [
        question
        for kind in kinds
        for question in [one for one in world.test if one.dataset == kind][:per_kind]
    ]
    agents = {
        "untrained": load_agent(find_agent(config.agent, config.seed), config, device),
        "trained": load_agent(folder / "agent", config, device),
    }
    environment = MiniEnvironment(make_world(config.seed), "A", seed=config.seed)
    return Run(folder, config, agents, environment, questions)


def play_greedily(agent: Agent, questions: Sequence[Question], environment: Environment) -> list[Trajectory]:
    """One greedy game of each question, all concurrently."""
    generate = partial(agent.generate, temperature=0.0)

    async def play_one(question: Question) -> Trajectory:
        ask = partial(environment.ask, sample=0, session=question.id)
        seed = f"study/{question.id}"
        return await play(question, generate, ask, agent.codec, agent.game, seed=seed)

    async def games() -> list[Trajectory]:
        return await asyncio.gather(*map(play_one, questions))

    played = asyncio.run(games())
    assert all(game.stop != "env_error" for game in played), "the mini world never fails"
    return played
