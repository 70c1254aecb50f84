"""Settings of the programs that load a pair of agent and environment."""

from dataclasses import dataclass

from prompt_r1.settings.agent import EnvironmentConfig
from prompt_r1.settings.fields import ANY, everyday_setting, setting


@dataclass(frozen=True)
class PlayConfig(EnvironmentConfig):
    """How agents play after their training."""

    seed: int = everyday_setting(-1, "mini world and sampling (default: the run's)", ANY)
    temperature: float = everyday_setting(0.0, "temperature of the agent; 0: greedy", defines_experiment=True)
    max_turns: int = everyday_setting(
        0, "turns per game; 0: as in the agent's training", defines_experiment=True
    )
    max_new: int = everyday_setting(0, "new tokens per turn; 0: as in training", defines_experiment=True)
    device: str = setting("auto", "auto, cpu or cuda")


@dataclass(frozen=True)
class PairConfig(PlayConfig):
    """Which agent plays, and with which environment."""

    agent: str = everyday_setting("", "run folder, model folder, hub id, or mini (default: newest mini run)")
    env: str = everyday_setting("", "environment (default: as in the agent's training)")


@dataclass(frozen=True)
class InferConfig(PairConfig):
    """Ask a question: the agent questions the environment, and answers."""

    question: str = everyday_setting("", "question to ask (default: each line of standard input)")
    json: bool = everyday_setting(False, "print a JSON object for each question, not the dialogue")
