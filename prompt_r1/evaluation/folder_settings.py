"""The config.yaml of an evaluation folder: what all answers in the folder have in common.

The file holds the settings that define the experiment. Under `depends_on`, it has what the answers depend on
beside them, such as digests of files and agents.
"""

import hashlib
from pathlib import Path
from typing import Any

import yaml

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.named_agent import SETTINGS_FILE, NamedAgent
from prompt_r1.programs.files import replace_file
from prompt_r1.settings.agent import HUGGING_FACE_PREFIX, MINI, is_mini_data, names_of
from prompt_r1.settings.fields import experiment_values, read_mapping

SETTINGS = "config.yaml"
DEPENDS_ON = "depends_on"  # its key for what the answers depend on beside the settings


def contents_of(folder: Path) -> dict[str, Any]:
    """The contents of a folder's config.yaml; {} if there is none."""
    path = folder / SETTINGS
    return read_mapping(path) if path.exists() else {}


def settings_in_common(config: EvaluateConfig, seed: int) -> dict[str, Any]:
    """The settings that define the experiment, as YAML holds them."""
    return experiment_values(config) | {"seed": seed}


def check_settings(config: EvaluateConfig, seed: int) -> None:
    """Raise UsageError if the answers in --out were made by an earlier version or with other settings."""
    kept = contents_of(Path(config.out))
    if kept and DEPENDS_ON not in kept:
        raise UsageError(f"--out {config.out}: its answers are of an earlier version: give another --out")
    for name, value in settings_in_common(config, seed).items():
        if name in kept and kept[name] != value:
            problem = f"its answers were made with {name} = {kept[name]!r}, not {value!r}"
            raise UsageError(f"--out {config.out}: {problem}: give another --out")


def write_settings(evaluation: Evaluation) -> None:
    """Write config.yaml. Raises UsageError if something has changed that the folder's answers depend on."""
    folder = evaluation.folder
    check_settings(evaluation.config, evaluation.seed)
    settings = settings_in_common(evaluation.config, evaluation.seed)
    kept = contents_of(folder).get(DEPENDS_ON, {})
    depends_on = dependencies_of(evaluation)
    # The tables also show what an agent of this command has answered in earlier commands. So its files must
    # not have changed, even if no method of this command uses them.
    for agent in evaluation.agents.values():
        name = f"digest of {agent.folder or agent.name}"
        if name in kept and name not in depends_on:
            depends_on[name] = _digest(Path(agent.make(agent.config.seed)))
    for name, value in depends_on.items():
        if name in kept and kept[name] != value:
            raise UsageError(f"--out {folder}: {name} has changed since its answers: give another --out")
    content = {**settings, DEPENDS_ON: {**kept, **depends_on}}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    replace_file(folder / SETTINGS, text.encode())


def dependencies_of(evaluation: Evaluation) -> dict[str, str]:
    """What the answers depend on beside the settings, by names.

    - the system message, the request fields and the route of each environment. An agent may bring them from
      its training
    - the game of an agent's start, for methods that begin with the start
    - digests of the files in `files_of`
    """
    found = {}
    for spec, asked in evaluation.environments.items():
        found[f"request to {spec}"] = repr([asked.env_system, asked.env_args, asked.route])
    for system, agent in evaluation.systems.items():
        if agent is not None and METHODS[system.method].agent == "start":
            found[f"game of {agent.start}"] = game_of(agent)
    for name, path in files_of(evaluation).items():
        found[f"digest of {name}"] = _digest(path)
    return found


def files_of(evaluation: Evaluation) -> dict[str, Path]:
    """The files and folders on this machine that the answers depend on, by their names.

    They are the question files that prepare methods, and the environments and agents in this process. An
    agent in a folder has the name of the folder. `mini`, `smollm2` and GGUF files have the name that the user
    gave. When one of these changes, it gets another folder, so under the folder's name the change would not
    be noticed.
    """
    config = evaluation.config
    data = (*config.train_data, *config.val_data)
    paths = {name: Path(name) for name in data if not is_mini_data(name)}
    for spec in evaluation.specs:
        for name in names_of(spec):
            if name.startswith(HUGGING_FACE_PREFIX):
                folder = name.removeprefix(HUGGING_FACE_PREFIX)
                paths[folder] = Path(folder)
    for agent in evaluation.systems.values():
        if agent is not None:
            paths[str(agent.folder or agent.name)] = Path(agent.make(agent.config.seed))
    return {name: path for name, path in paths.items() if path.exists()}


def game_of(agent: NamedAgent) -> str:
    """What an agent plays: the rules, the instruction and the reward, and which mini agent it is."""
    config = agent.config
    game: list[object] = [config.game, config.instruction_text, config.base_rule, config.reward]
    if agent.start == MINI:  # Each seed has its own mini agent.
        game.append(config.seed)
    return repr(game)


def _digest(path: Path) -> str:
    """A digest of a file, or of an agent's folder: of its model and of the settings of its training."""
    from prompt_r1.model.model_digest import digest_of_model  # It imports torch.

    if path.is_file():
        return _digest_of_file(path)
    settings = path / SETTINGS_FILE
    return digest_of_model(path) + (_digest_of_file(settings) if settings.exists() else "")


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]
