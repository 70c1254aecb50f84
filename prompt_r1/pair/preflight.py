"""Check the settings of infer.py and of the server before torch is imported, which takes seconds."""

from prompt_r1.environments.specs import check_environment
from prompt_r1.pair.named_agent import check_agent, newest_mini_run, preset_config, trained_config
from prompt_r1.pair.settings import InferConfig, PairConfig, with_environment
from prompt_r1.programs.launcher import check_device
from prompt_r1.settings.flags import parse_arguments


def read_infer_config(arguments: list[str]) -> InferConfig:
    """Read the settings of infer.py. Raises UsageError for an agent or environment that cannot be opened."""
    config = parse_arguments(InferConfig, arguments)
    check_pair(config)
    return config


def check_pair(config: PairConfig) -> PairConfig:
    """Raise UsageError for a device, an agent or an environment that cannot be opened.

    Returns the settings by which the environment will be asked. Some may be those of the agent's training.
    Do not open a pair with them: a SPEC of the agent's folder would count as typed by the user.
    """
    check_device(config.device)
    agent = config.agent or str(newest_mini_run())
    trained = trained_config(check_agent(agent)) or preset_config(agent)
    settings = with_environment(config, trained)
    check_environment(settings.env, settings, typed=[config.env])
    return settings
