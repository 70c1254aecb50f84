"""Choose systems (methods × environments × agents), and note what their answers depend on."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from prompt_r1.environments.specs import check_environment
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import FILE, System
from prompt_r1.evaluation.settings import METHODS, EvaluateConfig
from prompt_r1.pair.names import check_agent, check_data, check_device
from prompt_r1.pair.trained import AgentSpec, newest_mini_run, resolve_agent, trained_config
from prompt_r1.programs.command_line import command
from prompt_r1.programs.files import make_folder, replace_file
from prompt_r1.settings.agent import AgentConfig, is_mini_data
from prompt_r1.settings.fields import flag_of, identifying_values, read_mapping
from prompt_r1.settings.flags import parse_arguments
from prompt_r1.settings.functions import OBJECT_PREFIX

DEFAULT_METHODS = ("direct", "untrained", "prompt-r1")
SETTINGS = "config.yaml"  # that all answers in a folder have in common
IN_TABLE_5 = ("direct", "prompt-r1")  # run with every environment
NO_AGENT = AgentSpec("", AgentConfig(), "")


def read_evaluate_config(arguments: list[str]) -> EvaluateConfig:
    """The settings of an evaluation. Raises UsageError for one that cannot start."""
    config = parse_arguments(EvaluateConfig, arguments)
    check_device(config.device)
    agents = agent_names(config)
    if not agents and not config.env:
        raise UsageError("no environment to ask: give --env SPEC, or an --agent that was trained with one")
    for name in agents:
        check_agent(name)
    if "grpo-only" in methods_of(config):
        alone = trained_config(check_agent(config.grpo_agent)) if config.grpo_agent else None
        if alone is None or alone.env != "none":
            raise UsageError(
                "grpo-only needs an agent that was trained without environment: run "
                f"`{command('train.py', '--env', 'none')}` and give --grpo-agent RUN"
            )
    if config.ssim_model not in ("", "auto") and not (Path(config.ssim_model) / "config.json").is_file():
        raise UsageError(f"--ssim-model {config.ssim_model}: not a folder with a config.json")
    check_data([*config.data, *config.train_data, *config.val_data])
    learning = [method for method in methods_of(config) if METHODS[method].training]
    if learning and not config.train_data and not all(map(is_mini_data, config.data)):
        raise UsageError(f"{learning[0]} needs training questions: give --train-data")
    folder = results_folder(config)
    begun = (folder / FILE).exists()
    if folder.exists():
        make_folder(folder, lambda folder: begun, "an evaluation")
        check_settings(folder, identifying_values(config))
    if not begun:  # one that is complete asks nothing, and needs no key
        typed = [spec for spec in [*config.env, config.optimizer_env] if spec]
        for spec in typed:
            check_environment(spec, config, typed=typed, others=typed)
    return config


def choose_systems(config: EvaluateConfig, agents: Mapping[str, AgentSpec]) -> dict[System, AgentSpec]:
    """The systems to evaluate, in the order of METHODS, each with the agent that it needs.

    --tables runs the methods of Table 5 with all environments and agents, the others with the first ones.
    """
    systems: dict[System, AgentSpec] = {}
    for method in sorted(methods_of(config), key=list(METHODS).index):
        needs, first = METHODS[method], 1 if config.tables and method not in IN_TABLE_5 else None
        environments = environments_of(config, agents)[:first] if needs.environment else [""]
        for environment in environments:
            for name, agent in list((agents or {"": NO_AGENT}).items())[:first]:
                answering = {"": "", "trained": name, "start": agent.start, "own": config.grpo_agent}
                systems.setdefault(System(method, environment, answering[needs.agent]), agent)
    return systems


def methods_of(config: EvaluateConfig) -> Sequence[str]:
    """--method; by default three methods, with --tables the paper's (grpo-only if its agent is given)."""
    if config.method or not config.tables:
        return config.method or DEFAULT_METHODS
    in_paper = [name for name, needs in METHODS.items() if needs.in_paper]
    return [name for name in in_paper if name != "grpo-only" or config.grpo_agent]


def agent_names(config: EvaluateConfig) -> Sequence[str]:
    """--agent, or the newest run in the mini world; none if no method needs an agent."""
    if not config.agent and not any(METHODS[method].agent for method in methods_of(config)):
        return ()
    return config.agent or (str(newest_mini_run()),)


def results_folder(config: EvaluateConfig) -> Path:
    """--out, or a folder with the name of the first agent."""
    first = next(iter(agent_names(config)), "environment")
    return Path(config.out or f"runs/eval-{Path(first).name}")


def resolve_agents(config: EvaluateConfig) -> dict[str, AgentSpec]:
    """The agents by their names; none if no method needs one."""
    game = {"max_turns": config.max_turns, "max_new": config.max_new}
    return {name: resolve_agent(name if config.agent else "", **game) for name in agent_names(config)}


def environments_of(config: EvaluateConfig, agents: Mapping[str, AgentSpec]) -> Sequence[str]:
    """--env, or the environments of the agents' training."""
    return config.env or tuple(dict.fromkeys(agent.config.env for agent in agents.values()))


def common_seed(config: EvaluateConfig, agents: Mapping[str, AgentSpec]) -> int:
    """--seed, or that of the agents' runs. Mini worlds with different seeds have different questions."""
    seeds = {agent.config.seed: name for name, agent in agents.items()}
    if config.seed >= 0 or not seeds:
        return max(config.seed, 0)
    if len(seeds) > 1 and any(is_mini_data(name) or name.startswith(OBJECT_PREFIX) for name in config.data):
        raise UsageError(
            f"{' and '.join(seeds.values())} were trained with other seeds, so on other questions: give "
            "--seed, or evaluate them one by one"
        )
    return next(iter(seeds))


def check_settings(folder: Path, settings: Mapping[str, object]) -> dict[str, Any]:
    """The settings in a folder's config.yaml. Raises UsageError if they contradict `settings`."""
    path, values = folder / SETTINGS, json.loads(json.dumps(settings))  # lists, as YAML has them
    kept = read_mapping(path) if path.exists() else {}
    for name in kept.keys() & values.keys():
        if kept[name] != values[name]:
            flag = f"{flag_of(name)} {kept[name]!r}, not {values[name]!r}"
            raise UsageError(f"--out {folder}: its answers have {flag}: give another --out")
    return kept


def keep_settings(folder: Path, settings: Mapping[str, object], contents: Mapping[str, str]) -> None:
    """Write config.yaml. Raises UsageError if the folder's answers have other settings or `contents`."""
    if not (folder / SETTINGS).exists() and (folder / FILE).stat().st_size:
        raise UsageError(f"--out {folder}: its answers are of an older version: give another --out")
    kept = check_settings(folder, settings)
    for name, digest in contents.items():
        if kept.get(name, digest) != digest:
            raise UsageError(f"--out {folder}: {name} has changed since its answers: give another --out")
    values = {**kept, **settings, **contents}
    replace_file(folder / SETTINGS, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())


def contents_of(config: EvaluateConfig, systems: Mapping[System, AgentSpec]) -> dict[str, str]:
    """Digests of the files and agents that answers depend on, by name."""
    names = [*config.train_data, *config.val_data]
    for system, agent in systems.items():
        names += [str(agent.path), system.agent, *system.environment.replace("hf:", "").split(",")]
    return {f"digest of {name}": digest_of(Path(name)) for name in names if name and Path(name).exists()}


def digest_of(path: Path) -> str:
    """A digest of a file, or of the files of an agent's folder."""
    folder = path / "agent" if (path / "agent").is_dir() else path
    files = [path] if path.is_file() else sorted(filter(Path.is_file, folder.iterdir()))
    contents = [checksum(file) for file in files]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]


def checksum(path: Path) -> list[int | str]:
    """The bytes and the SHA-256 of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
