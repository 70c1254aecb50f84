"""The config.yaml of an evaluation folder: what all answers in the folder have in common.

The file holds the settings that define the experiment, and digests of the files and agents that answers
depend on.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import FILE, System
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.evaluation.systems import game_of_start
from prompt_r1.pair.named_agent import NamedAgent
from prompt_r1.programs.files import replace_file
from prompt_r1.settings.fields import flag_of, read_mapping

SETTINGS = "config.yaml"


def check_same_settings(folder: Path, settings: Mapping[str, object]) -> dict[str, Any]:
    """The settings in a folder's config.yaml. Raises UsageError if they contradict `settings`."""
    path = folder / SETTINGS
    kept = read_mapping(path) if path.exists() else {}
    given = json.loads(json.dumps(settings))  # Tuples become lists, which YAML has too.
    for name in kept.keys() & given.keys():
        if kept[name] != given[name]:
            flag = f"{flag_of(name)} {kept[name]!r}, not {given[name]!r}"
            raise UsageError(f"--out {folder}: its answers have {flag}: give another --out")
    return kept


def keep_settings(folder: Path, settings: Mapping[str, object], digests: Mapping[str, str]) -> None:
    """Write config.yaml. Raises UsageError if the folder's answers have other settings or digests."""
    has_answers = (folder / FILE).stat().st_size > 0
    if has_answers and not (folder / SETTINGS).exists():
        raise UsageError(f"--out {folder}: its answers are of an older version: give another --out")
    kept = check_same_settings(folder, settings)
    for name, digest in digests.items():
        if kept.get(name, digest) != digest:
            raise UsageError(f"--out {folder}: {name} has changed since its answers: give another --out")
    values = {**kept, **settings, **digests}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    replace_file(folder / SETTINGS, text.encode())


def digests_of_systems(config: EvaluateConfig, systems: Mapping[System, NamedAgent]) -> dict[str, str]:
    """Digests of what the answers depend on.

    - the question files that prepare methods
    - the environments and agents that are on this machine; for methods that begin with an agent's start, the
      start in place of the agent
    - the games of these starts
    """
    specs = [config.optimizer_env, *(system.environment for system in systems)]
    agents = []
    games = {}
    for system, agent in systems.items():
        if METHODS[system.method].agent == "start":
            agents.append(agent.start)
            games[f"game of {agent.start}"] = game_of_start(agent)
        elif METHODS[system.method].agent:
            agents.append(str(agent.built().path))
    return {**digests_of([*config.train_data, *config.val_data], specs, agents), **games}


def digests_of(files: Iterable[str], specs: Iterable[str], agents: Iterable[str]) -> dict[str, str]:
    """Digests of the files, environments and agents that exist on this machine, by name.

    A SPEC may name several environments (hf:A,hf:B), and each of them may be a model on this machine.
    """
    names = [*files, *agents]
    for spec in specs:
        names += [part.removeprefix("hf:") for part in spec.split(",")]
    # An agent may occur several times, by its folder and by its run. Its weights are read only once.
    here = dict.fromkeys(_agent_folder(name) for name in names if name and Path(name).exists())
    return {f"digest of {name}": _digest(Path(name)) for name in here}


def _agent_folder(name: str) -> str:
    """The folder of the agent that a run has saved, if `name` is a run; otherwise `name`."""
    folder = Path(name) / "agent"
    return str(folder) if folder.is_dir() else name


def _digest(path: Path) -> str:
    """A digest of a file, or of the files of an agent's folder."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    digests = []
    for file in files:
        with file.open("rb") as content:
            digests.append([file.stat().st_size, hashlib.file_digest(content, "sha256").hexdigest()])
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]
