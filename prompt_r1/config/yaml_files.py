"""Read and write settings as YAML files."""

import dataclasses
from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin

import yaml

from prompt_r1.config.train import PRESETS
from prompt_r1.errors import UsageError

GAME_FILE = "prompt_r1.yaml"  # in the folder of every exported agent: the settings of its training


def read_yaml(path: Path, kind: type[Any]) -> dict[str, Any]:
    """Read the fields in a YAML file.

    Raises UsageError for a missing file, a key that `kind` does not have, or a value of the wrong type.
    """
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"--config {path}: {error.strerror}; presets are {', '.join(sorted(PRESETS))}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UsageError(f"--config {path} has no `key: value` lines")
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(map(str, values)) - set(known))
    if unknown:
        raise UsageError(f"--config {path}: unknown key {unknown[0]!r}; `train.py --help` lists the fields")
    return {key: _from_yaml(path, known[key], value) for key, value in values.items()}


def write_yaml(config: Any, path: Path) -> None:
    """Write every field of a config, so that the file alone documents the run."""
    values = dataclasses.asdict(config)
    for key, value in values.items():
        if isinstance(value, tuple):
            values[key] = list(value)
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), "utf-8")


def type_name(f: dataclasses.Field[Any]) -> str:
    """The type of a field, as --help and error messages name it."""
    if get_origin(f.type) is tuple:
        return "NAME"
    names: dict[object, str] = {int: "N", float: "X", bool: "true|false"}
    return names.get(f.type, "TEXT")


def _from_yaml(path: Path, f: dataclasses.Field[Any], value: Any) -> Any:
    if get_origin(f.type) is tuple:
        return tuple(map(str, value)) if isinstance(value, list) else (str(value),)
    try:
        if f.type is bool:
            return {"true": True, "false": False}[str(value).lower()]
        return f.type(value)  # type: ignore[operator]
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"--config {path}: {f.name} takes {type_name(f)}, not {value!r}") from None
