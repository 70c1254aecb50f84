"""The trained mini agents of the studies, each in its own world, and how they play."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prompt_r1.agent.agent import Agent, load_agent
from prompt_r1.agent.frame_file import kept_frame
from prompt_r1.agent.names import find_agent, trained_config
from prompt_r1.config.yaml_files import GAME_FILE
from prompt_r1.distributed.ranks import pick_device
from prompt_r1.errors import UsageError
from prompt_r1.miniworld import MiniEnvironment, mini_world
from prompt_r1.miniworld.beliefs import Style
from prompt_r1.rollout import play
from prompt_r1.types import Ask, GameSettings, Generate, Question, Trajectory

STYLES: dict[str, Style] = {"mini": "A", "mini-b": "B"}


@dataclass(frozen=True)
class StudiedRun:
    """A run: its agent before and after training, its environment and test questions."""

    seed: int
    agents: dict[str, Agent]  # "untrained", "trained"
    environment: MiniEnvironment
    questions: list[Question]


def find_runs(under: Path, home: str = "mini") -> list[Path]:
    """The mini runs in a folder that trained with an environment; the longest of each seed."""
    longest: dict[int, tuple[int, Path]] = {}  # seed → steps and agent folder
    for file in sorted(under.glob(f"*/agent/{GAME_FILE}")):
        config = trained_config(file.parent)
        if config and config.agent == "mini" and config.env == home:
            found = config.steps, file.parent
            longest[config.seed] = max(longest.get(config.seed, found), found)
    return [agent.parent for _, agent in longest.values()]


def load_run(folder: Path, *, per_kind: int, home: str = "mini") -> StudiedRun:
    """A run with the first `per_kind` test questions of each kind.

    Raises UsageError if it was not trained with the environment `home`.
    """
    config = trained_config(folder / "agent")
    if config is None or config.env != home:
        raise UsageError(f"{folder} is not a run with the environment {home}, which the studies need")
    device, mini = pick_device("cpu"), mini_world(config.seed)
    agents = {
        "untrained": load_agent(
            find_agent(config.agent, config.seed), config, device, frame=kept_frame(folder / "agent")
        ),
        "trained": load_agent(folder / "agent", config, device),
    }
    environment = MiniEnvironment(mini.world, STYLES[home], seed=config.seed)
    return StudiedRun(config.seed, agents, environment, first_of_each_kind(mini.test, per_kind))


def first_of_each_kind(questions: Sequence[Question], per_kind: int) -> list[Question]:
    """The first `per_kind` questions of each kind."""
    found: list[Question] = []
    for kind in dict.fromkeys(question.dataset for question in questions):
        found += [question for question in questions if question.dataset == kind][:per_kind]
    return found


def seed_groups(seeds: Collection[int]) -> dict[str, list[int]]:
    """Seed 0, on which the wordings of the mini world were chosen, and the others, if there are both."""
    others = sorted(set(seeds) - {0})
    if not others or 0 not in seeds:
        return {}
    return {"seed 0": [0], f"{'seeds' if len(others) > 1 else 'seed'} {', '.join(map(str, others))}": others}


def greedy(agent: Agent) -> Generate:
    """The agent's turns without sampling."""
    return partial(agent.generate, temperature=0.0)


def play_all(
    questions: Sequence[Question],
    generate: Generate,
    ask: Ask,
    agent: Agent,
    game: GameSettings | None = None,
) -> list[Trajectory]:
    """One game of each question, all concurrently; `game` replaces the agent's own rules."""

    async def play_one(question: Question) -> Trajectory:
        seed = f"study/{question.id}"
        return await play(question, generate, ask, agent.codec, game or agent.game, seed=seed)

    async def games() -> list[Trajectory]:
        return await asyncio.gather(*map(play_one, questions))

    trajectories = asyncio.run(games())
    assert all(game.stop != "env_error" for game in trajectories), "the mini world never fails"
    return trajectories
