"""Read the settings of train.py: a preset or a YAML file, and flags."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prompt_r1.config.environment import HELD_OUT, MINI_AGENT, MINI_ENVIRONMENTS
from prompt_r1.config.fields import flag_of, given_values, new_parser
from prompt_r1.config.functions import OBJECT_PREFIX
from prompt_r1.config.train import PRESETS, TrainConfig, check, has_own_questions, preset_of
from prompt_r1.config.yaml_files import read_yaml
from prompt_r1.errors import UsageError


def train_config(arguments: list[str]) -> tuple[TrainConfig, str]:
    """Read the settings of train.py; also returns the name of the preset or file they start from.

    Flags override the preset or YAML file of --config, which overrides the defaults.
    """
    about = "Train an agent to question an environment."
    parser = new_parser("train.py", about)
    presets = "|".join([*PRESETS, "FILE"])
    parser.add_argument("--config", default="", metavar=presets, help="preset or YAML file (mini)")
    given = given_values(TrainConfig, parser, arguments, preset=PRESETS["mini"])
    chosen = given.pop("config")
    source = chosen or preset_of(given.get("agent", ""), "mini")
    values = PRESETS[source] if source in PRESETS else _read_settings(Path(source), given)
    config = TrainConfig(**{**values, **given})
    if set(config.env.split(",")) <= set(MINI_ENVIRONMENTS) and (not config.data or source in PRESETS):
        own = ("mini",)  # the mini world brings its own questions
        asked = {name: given.get(name, values.get(name, own)) for name in ("data", "val_data", "test_data")}
        config = replace(config, **asked)
    if has_own_questions(config):
        if config.agent != MINI_AGENT and not chosen:
            raise UsageError(
                f"--agent {config.agent} with {config.data[0]}: say how it learns and plays: --config paper "
                "or small (for real models), --config mini (the settings of the toy agent) or a YAML file"
            )
        asked = given if source in PRESETS else {**values, **given}
        has_splits = all(name.startswith(OBJECT_PREFIX) for name in config.data)
        tasks = config.data if has_splits else ()  # the function makes questions for each split
        # The mini world's questions say nothing about one's own.
        config = replace(
            config,
            val_data=config.val_data if "val_data" in asked else tasks or (HELD_OUT,),
            test_data=config.test_data if "test_data" in asked else tasks,
        )
    if "none" in config.val_data:
        config = replace(config, val_data=())
    if "none" in config.test_data:
        config = replace(config, test_data=())
    if config.env == "none":
        config = _without_environment(config, given)
    check(config)
    return config, run_name(Path(source).stem, config, values, given)


def run_name(start: str, config: TrainConfig, preset: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The name of a run without --out: its preset or file, then agent, environment and data if they differ.

    So a run on one's own data does not meet the folder of a run in the mini world.
    """
    agent, env, data = config.agent, config.env, config.data[0] if has_own_questions(config) else ""
    chosen = {"agent": agent, "env": env if env != "none" else "alone", "data": data}
    differing = [value for name, value in chosen.items() if name in given and given[name] != preset.get(name)]
    names = [re.sub(r"\.(jsonl|parquet)$", "", Path(value.split("@")[0]).name) for value in differing]
    return re.sub(r"[^\w.-]+", "-", "-".join(filter(None, [start, *names])))[:80]


def _read_settings(path: Path, given: Mapping[str, object]) -> dict[str, Any]:
    """The settings in a YAML file, except those in `given`.

    The file may come from a stranger. Raises UsageError if it names code to import.
    """
    values = {name: value for name, value in read_yaml(path, TrainConfig).items() if name not in given}
    code = ["reward"] if values.get("reward") else []
    if any(spec.strip().startswith(OBJECT_PREFIX) for spec in values.get("env", "").split(",")):
        code.append("env")
    for name in ("data", "val_data", "test_data"):
        if any(source.startswith(OBJECT_PREFIX) for source in values.get(name, ())):
            code.append(name)
    for name in code:
        raise UsageError(
            f"{path}: {name} names code, which is imported only if the command line names it: give "
            f"{flag_of(name)} {values[name] if isinstance(values[name], str) else ' '.join(values[name])}"
        )
    return values


def _without_environment(config: TrainConfig, given: dict[str, Any]) -> TrainConfig:
    """Set up the game of --env none, except for the flags in `given`.

    The game has one turn and its own reward rule. The instruction to answer replaces the paper's instruction
    to ask, and the turn may be as long as a game.
    """
    game: dict[str, Any] = {"max_turns": 1, "rule": "alone"}
    if config.instruction.startswith("paper"):
        game |= {"instruction": "alone", "max_new": config.max_tokens}
    return replace(config, **{name: value for name, value in game.items() if name not in given})
