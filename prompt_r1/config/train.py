"""Settings of train.py, and its presets."""

from dataclasses import dataclass, fields
from typing import Any

from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.environment import MINI_AGENT, SMOLLM2, is_mini, is_mini_data
from prompt_r1.config.fields import FRACTION, LEARNING_RATE, NOT_NEGATIVE, POSITIVE, Range, setting
from prompt_r1.config.functions import import_reward
from prompt_r1.errors import UsageError


@dataclass(frozen=True)
class TrainConfig(AgentConfig):
    """Settings of train.py; the defaults are the paper's (Table 6 and the released run script)."""

    out: str = setting("", "run folder (runs/CONFIG-seedN)", everyday=True, group="the run")
    resume: str = setting("auto", "auto (resume), never (new run), or a run folder", everyday=True)
    steps: int = setting(320, "training steps", range=POSITIVE, everyday=True, group="the algorithm")
    questions: int = setting(
        128,
        "questions per step, over all ranks",
        range=Range(above=0, below=100_001),
        everyday=True,
        identifies=True,
    )
    group_size: int = setting(5, "games per question", range=Range(at_least=2, below=10_001), identifies=True)
    mini_batch: int = setting(64, "games per optimiser step, over all ranks", range=POSITIVE, identifies=True)
    lr: float = setting(
        1e-6, "learning rate of AdamW, constant", range=LEARNING_RATE, everyday=True, identifies=True
    )
    beta2: float = setting(0.999, "AdamW", range=FRACTION, identifies=True)
    weight_decay: float = setting(0.01, "AdamW", range=NOT_NEGATIVE, identifies=True)
    clip: float = setting(0.2, "clip range of the ratio (eq. 17)", range=POSITIVE, identifies=True)
    clip_high: float = setting(
        0.0, "clip range above 1 (DAPO: 0.28); 0: that of --clip", range=NOT_NEGATIVE, identifies=True
    )
    adapter_rank: int = setting(
        0,
        "train low-rank adapters (LoRA) of this rank beside the frozen weights; 0: train all weights",
        range=NOT_NEGATIVE,
        identifies=True,
    )
    kl_coef: float = setting(
        0.001, "weight of the KL to the frozen start (eq. 17); 0: no KL", range=NOT_NEGATIVE, identifies=True
    )
    loss: str = setting(
        "sequence-mean", "how tokens are averaged", choices=("sequence-mean", "token-mean"), identifies=True
    )
    save_every: int = setting(
        20, "steps between checkpoints, and between validations", range=POSITIVE, group="instruments"
    )
    val_limit: int = setting(
        256, "most validation questions, a random sample stratified by dataset", range=POSITIVE
    )
    wandb: bool = setting(False, "log metrics to Weights & Biases too")
    device: str = setting("auto", "auto, cpu or cuda", group="the machine")
    parallel: str = setting(
        "auto",
        "weights on several ranks: replicated (ddp) or sharded (fsdp)",
        choices=("auto", "ddp", "fsdp"),
    )
    offload: bool = setting(False, "keep sharded weights and AdamW's states in CPU memory")
    tokens_per_batch: int = setting(
        16384, "tokens per micro-batch; a group's shared opening counts once", range=POSITIVE
    )
    checkpointing: bool = setting(True, "gradient checkpointing")
    dry_run: bool = setting(False, "estimate calls, tokens and dollars, then exit", everyday=True)

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
        "val_data": ("mini",),
        "test_data": ("mini",),
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
    "val_data": ("mini:pop",),
    "test_data": ("mini:pop",),
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


def agent_preset(name: str) -> AgentConfig:
    """How the agent of a preset plays."""
    known = {f.name for f in fields(AgentConfig)}
    return AgentConfig(**{name: value for name, value in PRESETS[name].items() if name in known})


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
