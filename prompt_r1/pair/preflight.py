"""Check the settings of infer.py and of the server before torch is imported."""

from prompt_r1.environments.specs import check_environment, trusted_names
from prompt_r1.pair.named_agent import NamedAgent, resolve_agent
from prompt_r1.pair.settings import InferConfig, PairConfig, with_environment
from prompt_r1.programs.launcher import check_device
from prompt_r1.settings.flags import parse_arguments


def read_infer_config(arguments: list[str]) -> tuple[InferConfig, NamedAgent]:
    """Read the settings of infer.py, and find its agent. Raises UsageError as `check_pair` does."""
    config = parse_arguments(InferConfig, arguments)
    return config, check_pair(config)


def check_pair(config: PairConfig) -> NamedAgent:
    """Find the agent of a pair. Raises UsageError if device, agent or environment cannot be opened.

    The pair is opened with this agent. If the user names none, a newer run may have saved one by then.
    """
    check_device(config.device)
    agent = resolve_agent(config.agent, max_turns=config.max_turns, max_new=config.max_new)
    settings = with_environment(config, agent.config)
    trusted = trusted_names(typed=[config.env], opened=[settings.env])
    check_environment(settings.env, settings, trusted=trusted)
    return agent
