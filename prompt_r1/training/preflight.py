"""Read the settings of train.py and of the warm start; check the functions, files and keys that they name.

Imports no torch, so that mistakes are named at once.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from prompt_r1.data.questions import check_data
from prompt_r1.data.rows import read_rows
from prompt_r1.environments.budget import parse_prices
from prompt_r1.environments.specs import CheckedEnvironment, check_environment, is_mini, trusted_names
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.questions import TRAINING_MIX, check_part
from prompt_r1.pair.named_agent import locate_agent
from prompt_r1.programs.launcher import check_device, is_first_rank, launcher_number
from prompt_r1.settings.agent import HELD_OUT, MINI_AGENT, all_mini_data, is_mini_data, mini_part
from prompt_r1.settings.fields import AT_LEAST_1, LEARNING_RATE, SEED, THREADS, everyday_setting, setting
from prompt_r1.settings.flags import given_values
from prompt_r1.settings.functions import find_loss, import_advantages, import_reward
from prompt_r1.settings.train import PRESETS, TrainConfig, train_config
from prompt_r1.training.run_folder import LOCK, check_settings, claim, newest_checkpoint, open_run


@dataclass(frozen=True)
class ChosenTraining:
    """The training that a user's settings choose."""

    config: TrainConfig
    environment: CheckedEnvironment | None  # None for --dry-run, which opens none


def read_training(arguments: list[str]) -> ChosenTraining:
    """Read the settings of a training. Raises UsageError for a training that cannot start."""
    flags = given_values(TrainConfig, arguments, presets=PRESETS)
    config = train_config(flags)
    _check_functions(config)
    _check_rank()
    check_device(config.device)
    if config.wandb and find_spec("wandb") is None:
        raise UsageError("--wandb: `pip install wandb`, or omit it: metrics.jsonl has the same numbers")
    locate_agent(config.agent)
    parse_prices(config.env_price, config.env.split(","))
    environment = None
    if not config.dry_run:  # An estimate needs no key.
        # The SPEC of a YAML file does not count as typed, because the file may come from anyone.
        trusted = trusted_names(typed=[flags.get("env", "")], opened=[config.env])
        environment = check_environment(config.env, config, trusted=trusted)
    val_files = () if config.val_data == (HELD_OUT,) else config.val_data
    check_data([*config.data, *val_files, *config.test_data])
    if is_first_rank() and not config.dry_run:
        run = open_run(config.out)
        # The lock is only tried. The training takes it again, after its ranks have met.
        with (run / LOCK).open("a+") as file:
            claim(file, run)
            # It says nothing here: the training itself names the damaged checkpoints that it skips.
            newest = newest_checkpoint(run, say=lambda damage: None)
            if newest is not None:
                check_settings(newest, config)
    return ChosenTraining(config, environment)


def warnings_of(config: TrainConfig) -> list[str]:
    """What a user should know before a run starts: a toy beside real parts, or the toy's learning rate."""
    data = " ".join(config.data)
    is_toy = {"--agent mini": config.agent == MINI_AGENT, f"--data {data}": all_mini_data(config.data)}
    if not config.without_environment:
        is_toy["--env mini"] = is_mini(config.env)
    toy_flags = [flag for flag in is_toy if is_toy[flag]]
    real_flags = [flag for flag in is_toy if not is_toy[flag]]
    warnings = []
    if toy_flags and real_flags:
        warnings.append(f"{', '.join(toy_flags)}: made for the invented mini world, and of no use outside it")
    if config.agent != MINI_AGENT and config.lr >= PRESETS["mini"]["lr"]:
        warnings.append(
            f"--lr {config.lr:g} suits the toy agent, and destroys a pretrained model: give about 3e-5 for a "
            "small model (--config small), 1e-6 for a large one (--config paper)"
        )
    return warnings


def _check_functions(config: TrainConfig) -> None:
    """Import the user's functions. Raises UsageError if one cannot be called."""
    if config.reward:
        import_reward(config.reward)
    if config.advantage_function:
        import_advantages(config.advantage_function)
    if config.loss_function:
        find_loss(config.loss_function)


def _check_rank() -> None:
    """Raise UsageError for a rank that would wait for an hour, and in vain, for the others."""
    count = launcher_number("WORLD_SIZE", default=1)
    rank = launcher_number("RANK", default=0)
    if rank >= count:
        raise UsageError(
            f"RANK is {rank} of {count} ranks (WORLD_SIZE), which count from 0: start with torchrun"
        )


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
    seed: int = setting(0, "seed of the order of questions, the adapters and the mini world", SEED)
    rank: int = setting(0, "rank of LoRA adapters, alpha is twice as much; 0: train all weights")
    lr: float = everyday_setting(
        1e-4, "peak learning rate (warm-up in a tenth of the steps, cosine)", LEARNING_RATE
    )
    epochs: int = everyday_setting(3, "epochs", AT_LEAST_1)
    batch_size: int = setting(0, "examples per optimiser step; 0: 32, or fewer, so that there are 30 steps")
    micro_batch: int = setting(4, "examples in memory at a time", AT_LEAST_1)
    cutoff: int = setting(2048, "tokens of an example; longer ones are cut", AT_LEAST_1)
    device: str = setting("auto", "auto, cpu or cuda")
    threads: int = setting(0, "threads of torch on a CPU; 0: its own choice", THREADS)


def read_warm_start_config(arguments: list[str]) -> FineTuningConfig:
    """Read the settings of a warm start. Raises UsageError for a warm start that cannot begin."""
    config = FineTuningConfig(**given_values(FineTuningConfig, arguments))
    if not config.games:
        raise UsageError("give the games to learn from: --games FILE, or --games mini")
    check_device(config.device)
    locate_agent(config.agent)
    if is_mini_data(config.games):
        check_part(mini_part(config.games), TRAINING_MIX)
    elif next(iter(read_rows(config.games)), None) is None:
        raise UsageError(f"--games {config.games}: there are no games in it")
    out = config.out or f"runs/sft-seed{config.seed}"
    if (Path(out) / "agent").exists():
        raise UsageError(f"{out} has an agent, which would be replaced: give another --out")
    return replace(config, out=out)
