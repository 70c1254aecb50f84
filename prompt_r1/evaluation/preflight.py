"""Check an evaluation before torch is imported."""

from pathlib import Path

from prompt_r1.cli.preflight import check_agents, check_data, check_device, check_environments
from prompt_r1.config.evaluate import evaluate_config
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import FILE
from prompt_r1.evaluation.systems import agent_names, results_folder


def check_evaluate(arguments: list[str]) -> None:
    """Raise UsageError for an evaluation that cannot start."""
    config = evaluate_config(arguments)
    check_device(config.device)
    agents = agent_names(config)
    if not agents and not config.env:
        raise UsageError("no environment to ask: give --env SPEC, or an --agent that was trained with one")
    check_agents([*agents, *filter(None, [config.grpo_agent])])
    if config.ssim_model not in ("", "auto") and not (Path(config.ssim_model) / "config.json").is_file():
        raise UsageError(f"--ssim-model {config.ssim_model}: not a folder with a config.json")
    check_data([*config.data, *config.train_data, *config.val_data])
    begun = (results_folder(config) / FILE).exists()
    # An evaluation that is complete asks nothing, and needs no key.
    check_environments(config, [] if begun else [*config.env, config.optimizer_env])
