"""Settings of the programs that load a pair of agent and environment, and their checks without torch."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from prompt_r1.environments.specs import CheckedEnvironment, check_environment, trusted_names
from prompt_r1.pair.named_agent import NamedAgent, resolve_agent
from prompt_r1.programs.launcher import check_device
from prompt_r1.settings.agent import EnvironmentConfig
from prompt_r1.settings.fields import everyday_setting, setting
from prompt_r1.settings.flags import given_values

AnyPairConfig = TypeVar("AnyPairConfig", bound="PairConfig")  # the config of infer.py or of the server


@dataclass(frozen=True)
class PlayConfig(EnvironmentConfig):
    """How agents play after their training."""

    seed: int | None = everyday_setting(None, "mini world and sampling", default_text="the run's")
    temperature: float = everyday_setting(0.0, "temperature of the agent; 0: greedy", defines_experiment=True)
    max_turns: int = everyday_setting(
        0, "turns per game; 0: as in the agent's training", defines_experiment=True
    )
    max_new: int = everyday_setting(0, "new tokens per turn; 0: as in training", defines_experiment=True)
    device: str = setting("auto", "auto, cpu or cuda")


@dataclass(frozen=True)
class PairConfig(PlayConfig):
    """Which agent plays, and with which environment."""

    agent: str = everyday_setting(
        "", "run folder, model folder, hub id, or mini", default_text="newest mini run"
    )
    env: str = everyday_setting("", "environment", default_text="as in the agent's training")


@dataclass(frozen=True)
class InferConfig(PairConfig):
    """Ask a question: the agent questions the environment, and answers."""

    question: str = everyday_setting("", "question to ask", default_text="each line of standard input")
    json: bool = everyday_setting(False, "print a JSON object for each question, not the dialogue")


@dataclass(frozen=True)
class ServeConfig(PairConfig):
    """Serve an agent and its environment as one OpenAI-compatible model.

    Requests need the key in PROMPT_R1_API_KEY, if it is set. --max-env-calls and --max-env-usd are limits of
    the whole server.
    """

    host: str = everyday_setting("127.0.0.1", "address to listen at")
    port: int = everyday_setting(8000, "port; 0: any free one", high=65535)
    model_name: str = everyday_setting("prompt-r1", "name of the pair in /v1/models and in requests")
    request_usd: float = everyday_setting(
        0.0, "limit of dollars per question (needs --env-price, max_tokens); 0: none"
    )
    request_seconds: float = everyday_setting(300.0, "limit of seconds per question", low=1e-9)


@dataclass(frozen=True)
class ChosenPair(Generic[AnyPairConfig]):
    """The agent and the environment that a user's settings choose. `open_pair` (api.py) opens them."""

    agent: NamedAgent
    config: AnyPairConfig  # the user's settings
    environment: CheckedEnvironment  # of --env or else of the agent's training, or an object of the user


def read_pair(config_class: type[AnyPairConfig], arguments: list[str]) -> ChosenPair[AnyPairConfig]:
    """Read the flags of infer.py or of the server, and choose the pair that they name.

    Raises UsageError if device, agent or environment cannot be opened.
    """
    given = given_values(config_class, arguments)
    config = config_class(**given)
    check_device(config.device)
    agent = resolve_agent(config.agent, max_turns=config.max_turns, max_new=config.max_new)
    return choose_pair(config, given, agent)


def choose_pair(
    config: AnyPairConfig, given: Collection[str], agent: NamedAgent
) -> ChosenPair[AnyPairConfig]:
    """Choose the environment of an agent: the one of its training if the user names none by --env.

    `given` are the names of the settings that the user gave. Only names that the user typed are trusted: the
    settings of the training were read from the agent's folder, which may come from anyone. Raises UsageError
    if the environment cannot be opened.
    """
    spec = config.env
    settings: EnvironmentConfig = config
    if not spec:
        spec = agent.config.env
        settings = with_settings_of_training(config, given, agent.config)
    trusted = trusted_names(typed=[config.env], opened=[spec])
    return ChosenPair(agent, config, check_environment(spec, settings, trusted=trusted))


def with_settings_of_training(
    config: EnvironmentConfig, given: Collection[str], trained: EnvironmentConfig
) -> EnvironmentConfig:
    """A user's settings, with system message, fields of requests and route as in an agent's training.

    Those that are `given` stay.
    """
    inherited = {"env_system", "env_args", "route"}.difference(given)
    return replace(config, **{name: getattr(trained, name) for name in inherited})
