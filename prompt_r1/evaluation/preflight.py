"""What evaluate.py reads and checks before it starts: its flags, and what they compare.

This file does not import torch, so that a wrong command line is reported at once.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from prompt_r1.data.questions import check_data
from prompt_r1.environments.specs import check_environment, trusted_names
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.folder_settings import check_same_settings
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import FILE
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.evaluation.systems import (
    choose_systems,
    common_seed,
    environments_of,
    find_agents,
    methods_of,
    prices_of,
    questions_of,
)
from prompt_r1.pair.named_agent import newest_mini_run, run_of
from prompt_r1.programs.files import make_folder
from prompt_r1.programs.launcher import check_device
from prompt_r1.settings.agent import all_mini_data
from prompt_r1.settings.fields import experiment_values
from prompt_r1.settings.flags import parse_arguments
from prompt_r1.settings.functions import import_metric


def read_evaluation(arguments: list[str]) -> Evaluation:
    """Read the settings of evaluate.py, and find what they compare.

    Raises UsageError for an evaluation that cannot start.
    """
    config = _with_agent_and_folder(parse_arguments(EvaluateConfig, arguments))
    check_device(config.device)
    for name in config.metric:
        import_metric(name)
    encoder = Path(config.ssim_model)
    if config.ssim_model not in ("", "auto") and not (encoder / "config.json").is_file():
        raise UsageError(f"--ssim-model {config.ssim_model}: not a folder with a config.json")
    agents = find_agents(config)
    environments = environments_of(config, agents)
    systems = choose_systems(config, environments, agents)
    seed = common_seed(config, agents)
    _check_questions(config)
    prices = prices_of(config, environments)
    _check_folder_and_environments(config, {system.environment for system in systems}, environments)
    # A function of the user or the Hub may take minutes to give its questions, so it is asked last.
    questions = questions_of(config, seed)
    return Evaluation(config, seed, questions, agents, systems, environments, prices)


def _with_agent_and_folder(config: EvaluateConfig) -> EvaluateConfig:
    """The settings with the agent and the folder of a command that names none.

    The agent is the newest run in the mini world, if a method needs an agent of --agent.
    """
    if not config.agent and any(METHODS[name].agent in ("trained", "start") for name in methods_of(config)):
        config = replace(config, agent=(str(newest_mini_run()),))
    if not config.out:
        named = [name for name in (*config.agent, config.grpo_agent) if name]
        name = Path(run_of(named[0])).name if named else "environment"
        config = replace(config, out=f"runs/eval-{name}")
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


def _check_folder_and_environments(
    config: EvaluateConfig, asked: Collection[str], environments: Mapping[str, EvaluateConfig]
) -> None:
    """Raise UsageError for a folder with answers of another experiment, and for a wrong environment.

    `asked` are the environments that the systems ask, and "" if a system asks none.
    """
    folder = Path(config.out)
    begun = (folder / FILE).exists()
    if folder.exists():
        # The folder exists, so this only checks what is in it. An evaluation that cannot start makes none.
        make_folder(folder, lambda folder: begun, "an evaluation")
        check_same_settings(folder, experiment_values(config))
    # A folder with answers may be complete. Then nothing is asked, and no key is needed. Nor does an estimate
    # need one.
    if not begun and not config.dry_run:
        typed = [spec for spec in [*config.env, config.optimizer_env] if spec]
        settings_of = dict.fromkeys(typed, config)
        for spec in asked:
            if spec:  # It may be the environment of an agent's training.
                settings_of.setdefault(spec, environments[spec])
        trusted = trusted_names(typed=typed, opened=settings_of)
        for spec, settings in settings_of.items():
            check_environment(spec, settings, trusted=trusted)
