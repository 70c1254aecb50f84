"""Export an agent on one rank, fake a run, read tensors and games, fill the disk, and lock a run folder."""

import json
import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from prompt_r1.model.policy import Policy
from prompt_r1.pair.named_agent import SETTINGS_FILE, STEP_FILE
from prompt_r1.settings.fields import write_yaml
from prompt_r1.settings.train import PRESETS, TrainConfig
from prompt_r1.training.export import export_agent
from prompt_r1.training.run_folder import LOCK, claim
from tests.support.games import ONE_RANK

Metrics = Mapping[str, float]


def export(policy: Policy, base: Path, config: TrainConfig, folder: Path, metrics: Metrics) -> Path:
    """Export the agent; returns the folder."""
    export_agent(policy, str(base), config, folder, metrics=metrics, ranks=ONE_RANK)
    return folder


def save_run(folder: Path, *, seed: int, step: int, saved: int, env: str = "mini") -> None:
    """The files of a mini run's agent that a name is resolved by; `saved` is a time."""
    agent = folder / "agent"
    agent.mkdir(parents=True)
    write_yaml(TrainConfig(**{**PRESETS["mini"], "seed": seed, "env": env}), agent / SETTINGS_FILE)
    (agent / "config.json").write_text("{}")
    (agent / "tokenizer.json").touch()
    save_file({}, agent / "model.safetensors")
    (agent / STEP_FILE).write_text(json.dumps({"step": step}))
    os.utime(agent / SETTINGS_FILE, (saved, saved))


def save_playable_run(folder: Path, asking_agent: Path, *, saved: int) -> None:
    """A mini run whose agent can be loaded; `saved` is a time."""
    agent = shutil.copytree(asking_agent, folder / "agent")
    game = "instruction: short\nmax_tokens: 900\nmax_new: 80\nmax_turns: 3\n"
    (agent / SETTINGS_FILE).write_text(f"agent: mini\nenv: mini\n{game}")
    os.utime(agent / SETTINGS_FILE, (saved, saved))


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder as a run does that uses it."""
    with (folder / LOCK).open("a+") as file:
        claim(file, folder)
        yield


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a folder, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def newest_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Weights and Adam states of the newest checkpoint of a run."""
    return load_tensors(max((run / "checkpoints").iterdir()))


def recorded_games(run: Path, name: str) -> list[dict[str, Any]]:
    """The games in the files NAME-rank*.jsonl of a run, such as step-000001 or test-trained, of all ranks."""
    files = sorted((run / "trajectories").glob(f"{name}-rank*.jsonl"))
    assert files, f"{run} has no games of {name}"
    return [json.loads(row) for file in files for row in file.read_text("utf-8").splitlines()]
