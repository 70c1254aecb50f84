"""Settings of the warm start, and of every other fine-tuning on games.

The settings of train.py stand in settings/train.py. Imports no torch, so that mistakes are named at once.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from prompt_r1.data.rows import read_rows
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.questions import TRAINING_MIX, check_part
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.programs.launcher import check_device
from prompt_r1.settings.agent import is_mini_data, mini_part
from prompt_r1.settings.fields import everyday_setting, setting
from prompt_r1.settings.flags import given_values


@dataclass(frozen=True)
class FineTuningConfig:
    """Teach an agent the format of the game by recorded games, with the settings of the paper's Table 7."""

    agent: str = everyday_setting(
        "Qwen/Qwen3-4B", "model folder, .gguf file or hub id of the agent, smollm2 or mini"
    )
    games: str = everyday_setting(
        "", "JSONL file of games (question, turns), or demonstrations: mini, mini:KIND"
    )
    preset: str = setting(
        "small", "preset of instruction and limits; mini has its own", choices=("paper", "small")
    )
    out: str = everyday_setting("", "folder for the agent and metrics.jsonl (runs/sft-seedN)")
    seed: int = setting(0, "seed of the order of questions, the adapters and the mini world")
    rank: int = setting(0, "rank of LoRA adapters, alpha is twice as much; 0: train all weights")
    lr: float = everyday_setting(
        1e-4, "peak learning rate (warm-up in a tenth of the steps, cosine)", low=1e-12
    )
    epochs: int = everyday_setting(3, "epochs", low=1)
    batch_size: int = setting(0, "examples per optimiser step; 0: 32, or fewer, so that there are 30 steps")
    micro_batch: int = setting(4, "examples in memory at a time", low=1)
    cutoff: int = setting(2048, "tokens of an example; longer ones are cut", low=1)
    device: str = setting("auto", "auto, cpu or cuda")
    threads: int = setting(0, "threads of torch on a CPU; 0: its own choice")


def read_warm_start_config(arguments: list[str]) -> FineTuningConfig:
    """Read the settings of a warm start. Raises UsageError for a warm start that cannot begin."""
    config = FineTuningConfig(**given_values(FineTuningConfig, arguments))
    if not config.games:
        raise UsageError("give the games to learn from: --games FILE, or --games mini")
    check_device(config.device)
    resolve_agent(config.agent)
    if is_mini_data(config.games):
        check_part(mini_part(config.games), TRAINING_MIX)
    elif next(iter(read_rows(config.games)), None) is None:
        raise UsageError(f"--games {config.games}: there are no games in it")
    out = config.out or f"runs/sft-seed{config.seed}"
    if (Path(out) / "agent").exists():
        raise UsageError(f"{out} has an agent, which would be replaced: give another --out")
    return replace(config, out=out)
