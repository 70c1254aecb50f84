"""Settings of the programs that load a pair of agent and environment, and their check."""

from dataclasses import dataclass

from prompt_r1.environments.specs import check_environment
from prompt_r1.pair.names import check_agent, check_device
from prompt_r1.pair.trained import agent_preset, newest_mini_run, trained_config
from prompt_r1.settings.agent import EnvironmentConfig
from prompt_r1.settings.fields import ANY, everyday, setting
from prompt_r1.settings.train import preset_of


@dataclass(frozen=True)
class PlayConfig(EnvironmentConfig):
    """How agents play whose training is over."""

    seed: int = everyday(-1, "mini world and sampling (default: the run's)", ANY)
    temperature: float = everyday(0.0, "temperature of the agent; 0: greedy", identifies=True)
    max_turns: int = everyday(0, "turns per game; 0: as in the agent's training", identifies=True)
    max_new: int = everyday(0, "new tokens per turn; 0: as in training", identifies=True)
    device: str = setting("auto", "auto, cpu or cuda")


@dataclass(frozen=True)
class PairConfig(PlayConfig):
    """Which agent plays, and with which environment."""

    agent: str = everyday("", "run folder, model folder, hub id, or mini (default: newest mini run)")
    env: str = everyday("", "environment (default: that of the agent's training)")


@dataclass(frozen=True)
class InferConfig(PairConfig):
    """Ask a question: the agent questions the environment, and answers."""

    question: str = everyday("", "question to ask (default: each line of standard input)")
    json: bool = everyday(False, "print a JSON object for each question, not the dialogue")


def check_pair(config: PairConfig) -> None:
    """Raise UsageError for a device, an agent or an environment that cannot be opened."""
    check_device(config.device)
    agent = config.agent or str(newest_mini_run())
    trained = trained_config(check_agent(agent))
    spec = config.env or (trained or agent_preset(preset_of(agent))).env
    # What an agent's folder names may come from anyone, so it is no SPEC of the user's.
    check_environment(spec, config, typed=[config.env])
