"""Read the settings of train.py; check the functions, files and keys that they name.

Imports no torch, so that mistakes are named at once.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from prompt_r1.data.questions import check_data
from prompt_r1.environments.specs import CheckedEnvironment, check_environment, is_mini, trusted_names
from prompt_r1.errors import UsageError
from prompt_r1.pair.named_agent import NamedAgent, resolve_agent
from prompt_r1.programs.launcher import check_device, is_first_rank
from prompt_r1.reward import OwnReward
from prompt_r1.settings.agent import HELD_OUT, MINI, all_mini_data
from prompt_r1.settings.flags import given_values
from prompt_r1.settings.functions import OwnLoss, import_advantages, import_loss, import_reward
from prompt_r1.settings.train import PRESETS, TrainConfig, train_config
from prompt_r1.training.run_folder import LOCK, check_same_settings, claim, newest_checkpoint, open_run

if TYPE_CHECKING:  # It imports torch.
    from prompt_r1.grpo import OwnAdvantages


@dataclass(frozen=True)
class ChosenTraining:
    """The training that a user's settings choose."""

    config: TrainConfig
    agent: NamedAgent  # from which it starts
    environment: CheckedEnvironment | None  # None for --dry-run, which opens none
    # The user's functions. None: the paper's reward, advantages and loss.
    own_reward: OwnReward | None = None
    own_advantages: "OwnAdvantages | None" = None
    own_loss: OwnLoss | None = None


def read_training(arguments: list[str]) -> ChosenTraining:
    """Read the settings of a training. Raises UsageError for a training that cannot start."""
    flags = given_values(TrainConfig, arguments, presets=PRESETS)
    config = train_config(flags)
    own_reward = import_reward(config.reward) if config.reward else None
    own_advantages = import_advantages(config.advantage_function) if config.advantage_function else None
    own_loss = import_loss(config.loss_function) if config.loss_function else None
    check_device(config.device)
    if config.wandb and find_spec("wandb") is None:
        raise UsageError("--wandb: `pip install wandb`, or omit it: metrics.jsonl has the same numbers")
    agent = resolve_agent(config.agent)
    environment = None
    if not config.dry_run:  # An estimate needs no key.
        # The SPEC of a YAML file does not count as typed, because the file may come from anyone.
        trusted = trusted_names(typed=[flags.get("env", "")], opened=[config.env])
        environment = check_environment(config.env, config, trusted=trusted)
    val_files = () if config.val_data == (HELD_OUT,) else config.val_data
    check_data([*config.data, *val_files, *config.test_data])
    if is_first_rank() and not config.dry_run:
        _check_run_folder(config)
    return ChosenTraining(config, agent, environment, own_reward, own_advantages, own_loss)


def _check_run_folder(config: TrainConfig) -> None:
    """Make the folder of --out. Raises UsageError if another run uses it, or has other settings in it."""
    run = open_run(config.out)
    # The lock is only tried. The training takes it again, after its ranks have met.
    with (run / LOCK).open("a+") as file:
        claim(file, run)
        # `newest_checkpoint` prints nothing here: the training itself names the damaged checkpoints that it
        # skips.
        newest = newest_checkpoint(run, say=lambda damage: None)
        if newest is not None:
            check_same_settings(newest, config)


def warnings_of(config: TrainConfig) -> list[str]:
    """What a user should know before a run starts: a toy beside real parts, or the toy's learning rate."""
    toys = []
    if config.agent == MINI:
        toys.append("--agent mini")
    if all_mini_data(config.data):
        toys.append(f"--data {' '.join(config.data)}")
    if is_mini(config.env):
        toys.append("--env mini")
    parts = 2 if config.without_environment else 3
    warnings = []
    if 0 < len(toys) < parts:
        warnings.append(f"{', '.join(toys)}: made for the invented mini world, and of no use outside it")
    if config.agent != MINI and config.lr >= PRESETS["mini"]["lr"]:
        warnings.append(
            f"--lr {config.lr:g} suits the toy agent, and destroys a pretrained model: give about 3e-5 for a "
            "small model (--config small), 1e-6 for a large one (--config paper)"
        )
    return warnings
