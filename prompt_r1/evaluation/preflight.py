"""Check an evaluation before torch is imported."""

from prompt_r1.cli.preflight import check_agents, check_data, check_environments
from prompt_r1.config.evaluate import evaluate_config
from prompt_r1.evaluation.predictions import FILE
from prompt_r1.evaluation.systems import results_folder


def check_evaluate(arguments: list[str]) -> None:
    """Raise UsageError for an evaluation that cannot start."""
    config = evaluate_config(arguments)
    check_agents([*config.agent, *filter(None, [config.grpo_agent])])
    check_data([*config.data, *config.train_data, *config.val_data])
    begun = (results_folder(config) / FILE).exists()
    # An evaluation that is complete asks nothing, and needs no key.
    check_environments(config, [] if begun else [*config.env, config.optimizer_env])
