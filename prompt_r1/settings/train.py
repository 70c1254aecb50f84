"""Settings of train.py. Flags override a preset or a YAML file, which overrides the defaults."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.settings.agent import (
    HELD_OUT,
    MINI,
    SMOLLM2,
    AgentConfig,
    all_mini_data,
    has_own_splits,
    machine_setting,
    record_setting,
)
from prompt_r1.settings.fields import read_yaml, setting, settings_of, shown

run_setting = partial(setting, group="the run", everyday=True)
algorithm_setting = partial(setting, group="the algorithm", defines_experiment=True)


@dataclass(frozen=True)
class TrainConfig(AgentConfig):
    """Train an agent to question an environment.

    The default preset, mini, trains a toy in minutes; paper has the paper's settings (Table 6, its script).
    """

    out: str = run_setting("", "run folder; a run in it is resumed", default_text="runs/CONFIG-seedN")
    steps: int = run_setting(320, "training steps", low=1)
    epochs: int = run_setting(0, "passes over the questions", default_text="--steps decides")
    dry_run: bool = run_setting(False, "estimate calls, tokens and dollars, then exit")
    questions: int = algorithm_setting(128, "questions per step, over all ranks", low=1, everyday=True)
    group_size: int = algorithm_setting(5, "games per question", low=2)
    mini_batch: int = algorithm_setting(64, "games per optimiser step, over all ranks", low=1)
    lr: float = algorithm_setting(1e-6, "learning rate of AdamW, constant", low=1e-12, everyday=True)
    beta2: float = algorithm_setting(0.999, "beta2 of AdamW", high=0.999999)
    weight_decay: float = algorithm_setting(0.01, "weight decay of AdamW")
    clip: float = algorithm_setting(0.2, "clip range of the ratio (eq. 17)", low=1e-9)
    clip_high: float = algorithm_setting(0.0, "clip range above 1 (DAPO: 0.28); 0: as --clip")
    adapter_rank: int = algorithm_setting(
        0, "rank of LoRA adapters of the frozen weights; 0: train all weights"
    )
    kl_coef: float = algorithm_setting(0.001, "weight of the KL to the frozen start (eq. 17); 0: no KL")
    loss: str = algorithm_setting(
        "sequence-mean", "how tokens are averaged", choices=("sequence-mean", "token-mean")
    )
    loss_function: str = algorithm_setting(
        "", "your MODULE:FUNCTION in place of the loss (eq. 17)", code="always"
    )
    advantage: str = algorithm_setting(
        "standardised",
        "eq. 16; centred does not divide by the std of the group",
        choices=("standardised", "centred"),
    )
    advantage_function: str = algorithm_setting(
        "", "your MODULE:FUNCTION that changes advantages, also by turn", code="always"
    )
    mask_truncated: bool = algorithm_setting(
        False, "leave out games that --max-new or --max-tokens cut; the loss is the mean over the others"
    )
    skip_no_spread: bool = algorithm_setting(
        False, "leave out groups of equal rewards (needs --kl-coef 0); the loss is the mean over the others"
    )
    save_every: int = record_setting(20, "steps between checkpoints, and between validations", low=1)
    wandb: bool = record_setting(False, "log metrics to Weights & Biases too")
    device: str = machine_setting("auto", "auto, cpu or cuda")
    ranks: int = machine_setting(
        1, "processes on a CPU; 0: one per core, and at least 4 questions for each", high=256
    )
    parallel: str = machine_setting(
        "auto",
        "weights replicated (ddp) or sharded: over all ranks (fsdp) or in each node (hsdp)",
        choices=("auto", "ddp", "fsdp", "hsdp"),
    )
    offload: bool = machine_setting(False, "keep sharded weights and AdamW's states in CPU memory")
    tokens_per_batch: int = machine_setting(
        16384, "tokens per micro-batch; shared openings count once", low=1
    )
    checkpointing: bool = machine_setting(True, "gradient checkpointing")


MINI_PRESET: dict[str, Any] = {
    "agent": MINI,
    "env": MINI,
    "data": (MINI,),
    "instruction": "short",
    "max_turns": 4,
    "max_new": 48,
    "max_tokens": 320,
    "rule": "release",
    "steps": 80,
    "questions": 16,
    "mini_batch": 40,
    "lr": 5e-4,
    "beta2": 0.98,
    "weight_decay": 0.0,
    "val_limit": 100,
    "dtype": "float32",
    # More ranks use more cores. More threads hardly help so small a model.
    "ranks": 0,
    "threads": 1,
    "tokens_per_batch": 4096,
    "checkpointing": False,
}
# `small` is for a pretrained model of a few hundred million parameters on a CPU, after a warm start.
SMALL_PRESET: dict[str, Any] = {
    **MINI_PRESET,
    "agent": SMOLLM2,
    # One-step questions in casual words: such a model learns in minutes to ask them clearly.
    "data": ("mini:pop",),
    "max_tokens": 512,
    "ranks": 1,
    "threads": 0,
    "steps": 24,
    "questions": 4,
    "group_size": 4,
    "mini_batch": 16,
    "lr": 3e-5,
    "kl_coef": 0.0,
    "save_every": 8,
    "val_limit": 20,
}
PRESETS: dict[str, dict[str, Any]] = {"mini": MINI_PRESET, "small": SMALL_PRESET, "paper": {}}


def preset_of(agent: str, *, default: str) -> str:
    """The preset that belongs to an agent: mini for mini, small for smollm2, `default` for others."""
    return {MINI: "mini", SMOLLM2: "small"}.get(agent, default)


def train_config(flags: Mapping[str, Any]) -> TrainConfig:
    """The settings of train.py, from the values of its flags, which may include --config."""
    # Without --config, the agent decides the preset. With neither --config nor --agent, the toy is trained.
    source = flags.get("config", preset_of(flags.get("agent", ""), default="mini"))
    base = PRESETS[source] if source in PRESETS else settings_of_file(source, flags)
    given = {**base, **flags}
    given.pop("config", None)
    config = with_defaults(TrainConfig(**given), given)
    if not config.out:
        config = replace(config, out=f"runs/{Path(source).stem}-seed{config.seed}")
    check_consistency(config, flags)
    return config


def settings_of_file(source: str, flags: Collection[str]) -> dict[str, Any]:
    """The settings in a YAML file.

    The file may come from a stranger. So UsageError is raised if it names code to import, in a setting that
    the user's flags do not override.
    """
    path = Path(source)
    if not path.is_file():
        presets = ", ".join(PRESETS)
        raise UsageError(f"--config {source!r}: neither a preset ({presets}) nor a YAML file")
    values = read_yaml(path, TrainConfig)
    for entry in settings_of(TrainConfig):
        if entry.name in values and entry.name not in flags and entry.names_code(values[entry.name]):
            raise UsageError(
                f"{source}: {entry.name} names code, which is imported only if the command line names it: "
                f"give {entry.flag} {shown(values[entry.name])}"
            )
    return values


def with_defaults(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """The config with the values that follow from other settings, unless they are `given`.

    Data with splits of its own is validated and tested on these. Of questions from files, a tenth is held out
    for validation, and there is no test. "none" means no questions.
    """
    data_has_splits = all(has_own_splits(name) for name in config.data)
    validation = given.get("val_data", config.data if data_has_splits else (HELD_OUT,))
    test = given.get("test_data", config.data if data_has_splits else ())
    max_new = config.max_new
    if config.without_environment and "max_new" not in given:
        max_new = config.max_tokens  # The only turn may be as long as a game.
    return replace(
        config,
        val_data=() if validation == ("none",) else validation,
        test_data=() if test == ("none",) else test,
        max_new=max_new,
    )


def check_consistency(config: TrainConfig, flags: Mapping[str, object]) -> None:
    """Raise UsageError for settings that contradict each other, and for a training that lacks some."""
    if "steps" in flags and config.epochs:
        raise UsageError(
            "--steps and --epochs both say how long to train: give one of them (--epochs 0 overrides a file)"
        )
    if "config" not in flags and config.agent != MINI and not all_mini_data(config.data):
        # A real model would train on real questions with the settings of the toy.
        raise UsageError(
            f"--agent {config.agent} with {config.data[0]}: say how it learns and plays: --config paper or "
            "small (for real models), --config mini (the settings of the toy agent) or a YAML file"
        )
    if not config.data:
        raise UsageError("no training questions: give --data FILE …, or --data mini")
    shards_weights = config.parallel in ("fsdp", "hsdp")
    if config.adapter_rank and shards_weights:
        raise UsageError("--adapter-rank needs whole weights on every GPU: give --parallel ddp (or auto)")
    if config.offload and not shards_weights:
        raise UsageError("--offload is for sharded weights: give --parallel fsdp without --adapter-rank")
    if config.skip_no_spread and config.kl_coef:
        raise UsageError(
            "--skip-no-spread would leave out games that the KL learns from: give --kl-coef 0 with it"
        )
