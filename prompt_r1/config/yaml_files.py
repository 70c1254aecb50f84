"""Read and write settings as YAML files."""

import dataclasses
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.fields import typed_value
from prompt_r1.errors import UsageError

STEP_FILE = "training.json"  # there too: the metrics of the agent's step
GAME_FILE = "prompt_r1.yaml"  # in the folder of every exported agent: the settings of its training

# PyYAML raises more than its own errors: `!!int x`, `!!bool x` and `!!int ""`, or thousands of brackets.
NOT_YAML = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def read_mapping(path: Path) -> dict[str, object]:
    """The `key: value` lines of a YAML file. Raises UsageError for anything else."""
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except NOT_YAML as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} has no `key: value` lines")
    return {str(key): value for key, value in values.items()}


def read_agent_config(path: Path) -> AgentConfig:
    """How the agent of an exported folder plays: its settings without those of its training.

    Its training, perhaps by another version, had other settings too. Raises UsageError.
    """
    known = {f.name for f in fields(AgentConfig)}
    values = {name: value for name, value in read_mapping(path).items() if name in known}
    return AgentConfig(**_typed(path, values, AgentConfig))


def read_yaml(path: Path, kind: type[Any]) -> dict[str, Any]:
    """Read the fields of a config in a YAML file. Raises UsageError that names the file and the key."""
    return _typed(path, read_mapping(path), kind)


def write_yaml(config: Any, path: Path) -> None:
    """Write every field of a config, so that the file alone documents the run."""
    values = dataclasses.asdict(config)
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    path.write_text(yaml.safe_dump(lists, sort_keys=False, allow_unicode=True), "utf-8")


def _typed(path: Path, values: dict[str, object], kind: type[Any]) -> dict[str, Any]:
    known = {f.name: f for f in fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise UsageError(f"{path}: unknown key {unknown[0]!r}; `train.py --help-all` lists the fields")
    try:
        return {key: typed_value(known[key], value, key) for key, value in values.items()}
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
