"""Methods and agents by name."""

from collections.abc import Callable
from pathlib import Path

import torch

from prompt_r1.baselines.direct import FORMATS, AnswerFormat, Direct
from prompt_r1.baselines.games import Game
from prompt_r1.baselines.method import Method
from prompt_r1.config import TrainConfig
from prompt_r1.environments import MINI_SPECS
from prompt_r1.environments.pool import Pool
from prompt_r1.knobs import METHODS, MethodConfig
from prompt_r1.players import KnownAgent, Player, find_agent, load_player
from prompt_r1.types import UsageError


class Agents:
    """The agents of an evaluation, each loaded when it is first needed."""

    def __init__(self, known: KnownAgent, device: torch.device) -> None:
        self.known = known
        self.device = device
        self._loaded: dict[str, Player] = {}

    def trained(self) -> Player:
        return self._load(self.known.path, self.known.game)

    def untrained(self) -> Player:
        """What the agent was before training; the agent itself when it was not trained here."""
        return self._load(find_agent(self.known.start, self.known.game.seed), self.known.game)

    def _load(self, path: str | Path, game: TrainConfig) -> Player:
        if str(path) not in self._loaded:
            self._loaded[str(path)] = load_player(path, game, self.device)
        return self._loaded[str(path)]


def make_method(
    name: str,
    *,
    environment: Pool,
    spec: str,
    open_environment: Callable[..., Pool],
    agents: Agents,
    temperature: float,
    config: MethodConfig,
    folder: Path | None,
) -> Method:
    """The method called `name` on `environment`, whose name for users is `spec`.

    `open_environment` (players.environment_opener) opens another one, that of an optimiser, say.
    `temperature` is that of an agent. What a method prepares lies in `folder`/NAME (None: nothing is kept).
    Raises UsageError for a name that is none.
    """
    match name:
        case "direct":
            return Direct(environment, answer_format(config, spec))
        case "prompt-r1":
            return Game(name, agents.trained, environment, game=agents.known.game, temperature=temperature)
        case "untrained":
            return Game(name, agents.untrained, environment, game=agents.known.game, temperature=temperature)
        case "agent-only":
            return Game(name, agents.trained, None, game=agents.known.game, temperature=temperature)
    raise UsageError(f"there is no method {name!r}: choose one of {', '.join(METHODS)}")


def answer_format(config: MethodConfig, spec: str) -> AnswerFormat:
    """How environments are asked for an answer: with tags, but for the mini world's, which cannot."""
    if config.answer_format != "auto":
        return FORMATS[config.answer_format]
    return FORMATS["only" if is_mini(spec) else "tags"]


def is_mini(spec: str) -> bool:
    """Is this (also) the mini world, in process or served?"""
    return any(part.split("@")[0] in MINI_SPECS for part in spec.split(","))
