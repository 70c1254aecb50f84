"""Checks that need no model: settings, files, folders and keys, before torch is imported."""

import os
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name

from prompt_r1.agent.gguf import gguf_file
from prompt_r1.agent.names import find_agent
from prompt_r1.config.agent import HELD_OUT, MINI_AGENT, MINI_WORLD, is_mini_data
from prompt_r1.config.functions import OBJECT_PREFIX
from prompt_r1.config.train import train_config
from prompt_r1.data.files import load_questions
from prompt_r1.environments.specs import Environments
from prompt_r1.errors import UsageError
from prompt_r1.foreign import launched
from prompt_r1.storage.atomic_folder import find_damage
from prompt_r1.storage.run_folder import LOCK, check_settings, checkpoints_of, claim, open_run


def check_train(arguments: list[str]) -> None:
    """Raise UsageError for a training that cannot start."""
    config, name = train_config(arguments)
    _check_rank()
    check_device(config.device)
    check_agent(config.agent)
    environments = Environments(config)
    if not config.dry_run:  # an estimate needs no key
        environments.check(config.env)
    check_data([*config.data, *config.val_data, *config.test_data])
    if launched("RANK", 0) == 0 and not config.dry_run:
        run = open_run(config.out, config.resume, f"{name}-seed{config.seed}")
        with (run / LOCK).open("a+") as file:
            claim(file, run)  # raises if another process trains there; the training claims it again
        newest = checkpoints_of(run)[-1:]
        if newest and not find_damage(newest[0], only=("state.json", "config.yaml")):  # else it is skipped
            check_settings(newest[0], config)


def check_agent(name: str) -> str | Path:
    """The folder or hub id of an agent (its name, if it must be made). Raises UsageError if there is none."""
    is_made = name == MINI_AGENT or gguf_file(name)  # building and converting import torch
    return name if is_made else find_agent(name, seed=0)


def check_data(names: Iterable[str]) -> None:
    """Raise UsageError for a file of questions that cannot be read, and for an unknown mini:SPLIT."""
    for name in names:
        if is_mini_data(name):
            resolve_name(f"{MINI_WORLD}.world:check_part")(name.partition(":")[2])
        elif not name.startswith(("hf:", OBJECT_PREFIX)) and name not in (HELD_OUT, "none"):
            load_questions(name)


def check_device(name: str) -> None:
    """Raise UsageError for what names no device. Whether there is a GPU, torch knows."""
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise UsageError(f"--device {name}: no such device; choose auto, cpu or cuda")


def _check_rank() -> None:
    """Raise UsageError for a rank that would wait in vain for the others."""
    count, rank = launched("WORLD_SIZE", 1), launched("RANK", 0)
    if rank >= count:
        raise UsageError(
            f"RANK is {rank} of {count} ranks (WORLD_SIZE), which count from 0: start with torchrun"
        )
    if count > 1 and not os.environ.get("MASTER_ADDR"):
        raise UsageError(
            f"WORLD_SIZE is {count}, but MASTER_ADDR does not say where rank 0 is: start with torchrun, or "
            "unset WORLD_SIZE"
        )
