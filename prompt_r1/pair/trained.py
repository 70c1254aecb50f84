"""Agents that were trained here: their settings, and which agent plays if the user names none."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from prompt_r1.errors import UsageError
from prompt_r1.pair.names import RUNS, exported_step, find_agent
from prompt_r1.programs.command_line import command
from prompt_r1.settings.agent import GAME_FILE, MINI_AGENT, AgentConfig, EnvironmentConfig
from prompt_r1.settings.fields import read_yaml, settings_of
from prompt_r1.settings.train import PRESETS, preset_of

Given = TypeVar("Given", bound=EnvironmentConfig)


def trained_config(path: str | Path) -> AgentConfig | None:
    """The settings by which an exported agent plays and was trained; None if it was not trained here."""
    file = Path(path) / GAME_FILE
    if not file.is_file():
        return None
    # The file has all settings of a training, perhaps by another version. Only an agent's settings are read.
    return AgentConfig(**read_yaml(file, AgentConfig, all_known=False))


def agent_preset(name: str) -> AgentConfig:
    """How the agent of a preset plays."""
    known = {f.name for f in settings_of(AgentConfig)}
    return AgentConfig(**{name: value for name, value in PRESETS[name].items() if name in known})


def default_config(name: str) -> AgentConfig:
    """How an agent plays that was not trained here: by the preset of its name (mini, smollm2), or `paper`."""
    return agent_preset(preset_of(name, default="paper"))


def environment_settings(spec: str, trained: AgentConfig, given: Given) -> Given:
    """How the environment is asked that a user names by `spec`, or for "" the environment of the training.

    An environment that the user names has the user's settings, `given`. The environment of the training has
    the system message, the fields of requests and the route of the training, unless the user gave others.
    """
    if spec:
        return given
    default = EnvironmentConfig()
    return replace(
        given,
        env_system=trained.env_system if given.env_system == default.env_system else given.env_system,
        env_args=given.env_args or trained.env_args,
        route=trained.route if given.route == default.route else given.route,
    )


def newest_mini_run() -> Path:
    """The run folder under runs/ with the newest mini agent that was trained with an environment."""
    saved = RUNS.glob(f"*/agent/{GAME_FILE}")
    for file in sorted(saved, key=lambda file: file.stat().st_mtime, reverse=True):
        config = trained_config(file.parent)
        if config is not None and config.agent == MINI_AGENT and not config.without_environment:
            return file.parent.parent
    raise UsageError(
        f"no trained agent under {RUNS}/: run `{command('train.py')}` first, or give --agent and --env"
    )


@dataclass(frozen=True)
class NamedAgent:
    """An agent that a user named."""

    path: str | Path  # its folder or hub id
    config: AgentConfig  # how it was trained, or the preset whose game it plays
    start: str  # the name of the model from which the training started; the agent's own if it was not trained
    is_newest: bool = False  # the user named no agent, and this is the newest mini run

    def describe(self, *, environment: str, seed: int) -> str:
        """One line: which agent of which step plays, and with which environment and seed."""
        path = Path(self.path)
        run = path.parent if path.name == "agent" else self.path
        line = f"agent {run}"
        step = exported_step(path)
        if step == 0:  # No later agent of the run was better in validation.
            line += ", step 0 (as it was before training)"
        elif step > 0:
            line += f", step {step}"
        line += f", environment {environment}, seed {seed}"
        if self.is_newest:
            line += " (the newest mini run; --agent names another)"
        return line


def resolve_agent(name: str, *, max_turns: int = 0, max_new: int = 0) -> NamedAgent:
    """The agent that a user names for infer and evaluate. "" names the newest mini run.

    `max_turns` and `max_new`, if not 0, replace the limits of its game.
    """
    known_as = name or str(newest_mini_run())
    # `mini` is the agent of seed 0, which comes with the package. --seed is the seed of its world.
    path = find_agent(known_as, seed=0)
    trained = trained_config(path)
    config = default_config(known_as) if trained is None else trained
    config = replace(config, max_turns=max_turns or config.max_turns, max_new=max_new or config.max_new)
    start = name if trained is None else trained.agent
    return NamedAgent(path, config, start, is_newest=not name)
