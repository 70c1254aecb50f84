"""What evaluate.py checks before it starts: its flags, and whether the evaluation can begin.

This file does not import torch, so that a wrong command line is reported at once.
"""

from dataclasses import replace
from pathlib import Path

from prompt_r1.data.questions import check_data
from prompt_r1.environments.specs import check_environment
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.folder_settings import check_same_settings
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import FILE
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.evaluation.systems import environments_of, methods_of
from prompt_r1.pair.named_agent import check_agent, newest_mini_run, resolve_agent, run_of, trained_config
from prompt_r1.programs.command_line import command
from prompt_r1.programs.files import make_folder
from prompt_r1.programs.launcher import check_device
from prompt_r1.settings.agent import all_mini_data
from prompt_r1.settings.fields import experiment_values
from prompt_r1.settings.flags import parse_arguments
from prompt_r1.settings.functions import import_metric


def read_evaluate_config(arguments: list[str]) -> EvaluateConfig:
    """The settings of an evaluation. Raises UsageError for an evaluation that cannot start."""
    config = _with_agent_and_folder(parse_arguments(EvaluateConfig, arguments))
    check_device(config.device)
    for name in config.metric:
        import_metric(name)
    if not config.agent and not config.env:
        raise UsageError("no environment to ask: give --env SPEC, or an --agent that was trained with one")
    for name in config.agent:
        check_agent(name)
    if "grpo-only" in methods_of(config):
        _check_grpo_agent(config.grpo_agent)
    encoder = Path(config.ssim_model)
    if config.ssim_model not in ("", "auto") and not (encoder / "config.json").is_file():
        raise UsageError(f"--ssim-model {config.ssim_model}: not a folder with a config.json")
    _check_questions(config)
    _check_folder_and_environments(config)
    return config


def _check_questions(config: EvaluateConfig) -> None:
    """Raise UsageError for files that cannot be read, and for methods that lack questions."""
    check_data([*config.data, *config.train_data, *config.val_data])
    if all_mini_data(config.data):  # The mini world has questions for every method.
        return
    for method in methods_of(config):
        if METHODS[method].needs_training and not config.train_data:
            raise UsageError(f"{method} needs training questions: give --train-data")
        if METHODS[method].needs_validation and not config.val_data:
            raise UsageError(f"{method} needs validation questions: give --val-data")


def _check_folder_and_environments(config: EvaluateConfig) -> None:
    """Raise UsageError for a folder with answers of another experiment, and for a wrong environment."""
    folder = Path(config.out)
    begun = (folder / FILE).exists()
    if folder.exists():
        # The folder exists, so this only checks what is in it. An evaluation that cannot start makes none.
        make_folder(folder, lambda folder: begun, "an evaluation")
        check_same_settings(folder, experiment_values(config))
    # A folder with answers may be complete. Then nothing is asked, and no key is needed.
    if not begun and not config.dry_run:  # An estimate needs no key.
        _check_environments(config)


def _check_environments(config: EvaluateConfig) -> None:
    """Raise UsageError for an environment that cannot be opened, also for one of the agents' training."""
    typed = [spec for spec in [*config.env, config.optimizer_env] if spec]
    asked = dict.fromkeys(typed, config)
    if any(METHODS[method].needs_environment for method in methods_of(config)):
        trained = {name: resolve_agent(name).config for name in config.agent}
        asked = environments_of(config, trained) | asked
    for spec, settings in asked.items():
        check_environment(spec, settings, typed=typed, others=asked.keys())


def _with_agent_and_folder(config: EvaluateConfig) -> EvaluateConfig:
    """The settings with the agent and the folder of a command that names none.

    The agent is the newest run in the mini world, if a method needs an agent. It is looked up only here,
    because a training may export a newer agent while the evaluation asks.
    """
    needs_agent = any(METHODS[method].agent for method in methods_of(config))
    if needs_agent and not config.agent:
        config = replace(config, agent=(str(newest_mini_run()),))
    if not config.out:
        name = Path(run_of(config.agent[0])).name if config.agent else "environment"
        config = replace(config, out=f"runs/eval-{name}")
    return config


def _check_grpo_agent(name: str) -> None:
    trained = trained_config(check_agent(name)) if name else None
    if trained is None or not trained.without_environment:
        raise UsageError(
            "grpo-only needs an agent that was trained without environment: run "
            f"`{command('train.py', '--env', 'none')}` and give --grpo-agent RUN"
        )
