"""The trained mini agents of the studies, each in its own world, and how they play."""

import asyncio
from collections.abc import Sequence
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
from prompt_r1.rollout import play
from prompt_r1.types import Ask, GameSettings, Generate, Question, Trajectory


@dataclass(frozen=True)
class StudiedRun:
    """A run: its agent before and after training, its environment and test questions."""

    agents: dict[str, Agent]  # "untrained", "trained"
    environment: MiniEnvironment
    questions: list[Question]


def find_runs(under: Path) -> list[Path]:
    """The mini runs in a folder that trained with the environment mini; the longest of each seed."""
    longest: dict[int, tuple[int, Path]] = {}  # seed → steps and agent folder
    for file in sorted(under.glob(f"*/agent/{GAME_FILE}")):
        config = trained_config(file.parent)
        if config and config.agent == "mini" and config.env == "mini":
            found = config.steps, file.parent
            longest[config.seed] = max(longest.get(config.seed, found), found)
    return [agent.parent for _, agent in longest.values()]


def load_run(folder: Path, *, per_kind: int) -> StudiedRun:
    """A run with the first `per_kind` test questions of each kind. Raises UsageError if it is no mini run."""
    config = trained_config(folder / "agent")
    if config is None or config.env != "mini":
        raise UsageError(f"{folder} is not a run in the mini world, whose environment the studies need")
    device, mini = pick_device("cpu"), mini_world(config.seed)
    questions: list[Question] = []
    for kind in dict.fromkeys(question.dataset for question in mini.test):
        questions += [question for question in mini.test if question.dataset == kind][:per_kind]
    agents = {
        "untrained": load_agent(
            find_agent(config.agent, config.seed), config, device, frame=kept_frame(folder / "agent")
        ),
        "trained": load_agent(folder / "agent", config, device),
    }
    environment = MiniEnvironment(mini.world, "A", seed=config.seed)
    return StudiedRun(agents, environment, questions)


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
