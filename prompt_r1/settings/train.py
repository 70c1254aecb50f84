"""Settings of train.py: flags, which override a preset or a YAML file, which overrides the defaults."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.settings.agent import (
    HELD_OUT,
    MINI_AGENT,
    SMOLLM2,
    AgentConfig,
    is_mini,
    is_mini_data,
    of_instruments,
    of_machine,
)
from prompt_r1.settings.fields import (
    LEARNING_RATE,
    POSITIVE,
    Range,
    flag_of,
    given_values,
    read_yaml,
    setting,
)
from prompt_r1.settings.functions import OBJECT_PREFIX, import_reward

of_run = partial(setting, group="the run", everyday=True)
of_algorithm = partial(setting, group="the algorithm", identifies=True)


@dataclass(frozen=True)
class TrainConfig(AgentConfig):
    """Train an agent to question an environment; the defaults are the paper's (Table 6, released script)."""

    out: str = of_run("", "run folder (runs/CONFIG-seedN)")
    resume: str = of_run("auto", "auto (resume), never (new run), or a run folder")
    steps: int = of_run(320, "training steps", POSITIVE)
    dry_run: bool = of_run(False, "estimate calls, tokens and dollars, then exit")
    questions: int = of_algorithm(
        128, "questions per step, over all ranks", Range(above=0, below=100_001), everyday=True
    )
    group_size: int = of_algorithm(5, "games per question", Range(at_least=2, below=10_001))
    mini_batch: int = of_algorithm(64, "games per optimiser step, over all ranks", POSITIVE)
    lr: float = of_algorithm(1e-6, "learning rate of AdamW, constant", LEARNING_RATE, everyday=True)
    beta2: float = of_algorithm(0.999, "AdamW", Range(at_least=0, below=1))
    weight_decay: float = of_algorithm(0.01, "AdamW")
    clip: float = of_algorithm(0.2, "clip range of the ratio (eq. 17)", POSITIVE)
    clip_high: float = of_algorithm(0.0, "clip range above 1 (DAPO: 0.28); 0: that of --clip")
    adapter_rank: int = of_algorithm(0, "rank of LoRA adapters of the frozen weights; 0: train all weights")
    kl_coef: float = of_algorithm(0.001, "weight of the KL to the frozen start (eq. 17); 0: no KL")
    loss: str = of_algorithm("sequence-mean", "how tokens are averaged", ("sequence-mean", "token-mean"))
    save_every: int = of_instruments(20, "steps between checkpoints, and between validations", POSITIVE)
    val_limit: int = of_instruments(256, "validation questions, stratified by dataset", POSITIVE)
    wandb: bool = of_instruments(False, "log metrics to Weights & Biases too")
    device: str = of_machine("auto", "auto, cpu or cuda")
    parallel: str = of_machine("auto", "weights replicated (ddp) or sharded (fsdp)", ("auto", "ddp", "fsdp"))
    offload: bool = of_machine(False, "keep sharded weights and AdamW's states in CPU memory")
    tokens_per_batch: int = of_machine(16384, "tokens per micro-batch; shared openings count once", POSITIVE)
    checkpointing: bool = of_machine(True, "gradient checkpointing")
    env_from_file: bool = False  # no setting: whether the YAML file of --config, and no flag, names `env`

    @property
    def typed_environments(self) -> tuple[str, ...]:
        """The SPECs that the command line names. The key of OPENAI_API_KEY is sent to no other URL."""
        return () if self.env_from_file else (self.env,)

    @property
    def layout(self) -> str:
        """`parallel`, where adapters decide `auto`: they need whole weights on every rank."""
        return "ddp" if self.adapter_rank and self.parallel == "auto" else self.parallel


def has_own_questions(config: TrainConfig) -> bool:
    """Whether a run trains on questions that are not of the mini world."""
    return not all(map(is_mini_data, config.data))


def warnings_of(config: TrainConfig) -> list[str]:
    """What a user should know before a run starts: toys beside real parts, the toy's learning rate."""
    toys = {"--agent mini": config.agent == MINI_AGENT, "--data mini": not has_own_questions(config)}
    if config.env != "none":
        toys["--env mini"] = is_mini(config.env)
    warnings = []
    if any(toys.values()) and not all(toys.values()):
        names = ", ".join(flag for flag, is_toy in toys.items() if is_toy)
        warnings.append(f"{names}: a toy that knows nothing of your own questions, agent or environment")
    if config.agent != MINI_AGENT and config.lr >= PRESETS["mini"]["lr"]:
        warnings.append(
            f"--lr {config.lr:g} suits the toy agent, and destroys a pretrained model: give about 3e-5 for a "
            "small model (--config small), 1e-6 for a large one (--config paper)"
        )
    return warnings


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "mini": {
        "agent": "mini",
        "env": "mini",
        "data": ("mini",),
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
        "tokens_per_batch": 4096,
        "checkpointing": False,
    },
}
# A pretrained model of a few hundred million parameters on a CPU, which knows the format from `sft --games`.
PRESETS["small"] = {
    **PRESETS["mini"],
    "agent": SMOLLM2,
    "data": ("mini:pop",),  # one step in casual words, which such a model learns to ask clearly in minutes
    "max_tokens": 512,
    "steps": 24,
    "questions": 4,
    "group_size": 4,
    "mini_batch": 16,
    "lr": 3e-5,
    "kl_coef": 0.0,
    "save_every": 8,
    "val_limit": 20,
}


def preset_of(agent: str, other: str = "paper") -> str:
    """The preset of the agents that have one; `other` for all others."""
    return {MINI_AGENT: "mini", SMOLLM2: "small"}.get(agent, other)


def check(config: TrainConfig) -> None:
    """Raise UsageError for settings with which no training is possible."""
    alone = config.env == "none"
    if not config.data:
        raise UsageError("no training questions: give --data FILE … (JSONL or parquet), or --data mini")
    if alone != (config.rule == "alone") or (alone and config.max_turns > 1):
        raise UsageError(
            "--env none and --rule alone go together, with --max-turns 1: without an environment the agent "
            "answers at once"
        )
    if config.adapter_rank and (config.parallel == "fsdp" or config.offload):
        raise UsageError(
            "--adapter-rank trains beside whole weights on every GPU, which cannot be sharded or offloaded: "
            "give --parallel ddp (or auto) without --offload"
        )
    if config.offload and config.parallel != "fsdp":
        raise UsageError("--offload is for sharded weights: give --parallel fsdp")
    if config.reward:
        import_reward(config.reward)


def train_config(arguments: list[str]) -> TrainConfig:
    """Read the settings of train.py, with the run folder that follows from them where --out is not given."""
    given = given_values(TrainConfig, arguments, PRESETS)
    chosen = given.pop("config")
    source = chosen or preset_of(given.get("agent", ""), "mini")
    if source not in PRESETS and not Path(source).is_file():
        raise UsageError(f"--config {source}: neither a preset ({', '.join(PRESETS)}) nor a YAML file")
    values = PRESETS[source] if source in PRESETS else _read_settings(Path(source), given)
    asked = {**values, **given}
    env_from_file = source not in PRESETS and "env" in values and "env" not in given
    config = TrainConfig(**asked, env_from_file=env_from_file)
    if has_own_questions(config) and config.agent != MINI_AGENT and not chosen:
        raise UsageError(
            f"--agent {config.agent} with {config.data[0]}: say how it learns and plays: --config paper or "
            "small (for real models), --config mini (the settings of the toy agent) or a YAML file"
        )
    splits: dict[str, Any] = {"val_data": (HELD_OUT,), "test_data": ()}
    if all(is_mini_data(name) or name.startswith(OBJECT_PREFIX) for name in config.data):
        splits = dict.fromkeys(splits, config.data)  # the mini world and functions have each split
    for name, default in splits.items():
        names = asked.get(name, default)
        splits[name] = () if "none" in names else names
    config = replace(config, **splits)
    if config.env == "none":
        config = _without_environment(config, given)
    check(config)
    if not config.out:
        name = run_name(Path(source).stem, config, values, given)
        config = replace(config, out=f"runs/{name}-seed{config.seed}")
    return config


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
    for name in ("reward", "env", "data", "val_data", "test_data"):
        value = values.get(name, "")
        text = value if isinstance(value, str) else " ".join(value)
        if re.search(rf"(^|[\s,]){OBJECT_PREFIX}", text) or (name == "reward" and text):
            raise UsageError(
                f"{path}: {name} names code, which is imported only if the command line names it: give "
                f"{flag_of(name)} {text}"
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
