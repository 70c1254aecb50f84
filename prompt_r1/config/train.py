"""Settings of the entry points: one flat dataclass each, presets and YAML files.

The defaults of `TrainConfig` are the paper's (Table 6 and the released run script); mini is a preset.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from prompt_r1.config.fields import EnvironmentConfig, knob
from prompt_r1.errors import UsageError

INSTRUCTION_NAMES = ("paper", "paper-50", "short", "alone", "answer")


@dataclass(frozen=True)
class TrainConfig(EnvironmentConfig):
    """Settings of train.py; the defaults are the paper's (Table 6 and the released run script)."""

    EVERYDAY: ClassVar = (
        "agent", "env", "data", "val_data", "test_data", "out", "resume", "seed", "steps", "questions", "lr",
        "max_turns", "env_price", "max_env_usd", "dry_run", "explain",
    )  # fmt: skip

    agent: str = knob("Qwen/Qwen3-4B", "model folder, hub id or mini", group="who plays, on what")
    env: str = knob("gpt-4o-mini", "environment: mini, MODEL, MODEL@URL, hf:DIR; several: A,B; or none")
    data: tuple[str, ...] = knob((), "training questions: mini, or JSONL/parquet files")
    val_data: tuple[str, ...] = knob((), "validation questions; none: no validation")
    test_data: tuple[str, ...] = knob((), "questions for the table at the end; none: no table")
    out: str = knob("", "run folder (runs/CONFIG-seedN)")
    resume: str = knob("auto", "auto: go on where it stopped; never: begin anew; or a run folder")
    seed: int = knob(0, "world, order of the questions and sampling")
    instruction: str = knob(
        "paper",
        "paper, paper-50 or short; alone or answer: without environment",
        choices=INSTRUCTION_NAMES,
        group="the game",
    )
    max_turns: int = knob(5, "turns of a game")
    max_new: int = knob(1024, "new tokens of a turn")
    max_tokens: int = knob(8192, "tokens of a game")
    max_reply_tokens: int = knob(1024, "tokens of a reply that the agent reads; 0: all")
    force_answer: bool = knob(False, "tell the agent when its last turn has come")
    stop_tags: bool = knob(
        False, "end a turn at </interaction_prompt> or </answer>", choices=("true", "false")
    )
    rule: str = knob(
        "paper", "reward rule (eqs 12-15); alone: for --env none", choices=("paper", "release", "alone")
    )
    steps: int = knob(320, "rollout batches", group="the algorithm")
    questions: int = knob(128, "questions of a step, over all ranks")
    group_size: int = knob(5, "games of a question")
    mini_batch: int = knob(64, "games of an optimiser step, over all ranks")
    mini_batch_of: str = knob(
        "games", "what --mini-batch counts; questions keep groups whole", choices=("games", "questions")
    )
    lr: float = knob(1e-6, "learning rate of AdamW, constant")
    beta1: float = knob(0.9, "AdamW")
    beta2: float = knob(0.999, "AdamW")
    weight_decay: float = knob(0.01, "AdamW")
    grad_clip: float = knob(1.0, "largest gradient norm")
    clip: float = knob(0.2, "clip range of the ratio (eq. 17)")
    kl_coef: float = knob(0.001, "weight of the KL to the frozen start (eq. 17); 0: none")
    loss: str = knob("sequence-mean", "how tokens are averaged", choices=("sequence-mean", "token-mean"))
    temperature: float = knob(1.0, "sampling in training; validation is greedy")
    val_every: int = knob(20, "steps between validations", group="instruments")
    val_limit: int = knob(256, "validation questions at most")
    save_every: int = knob(20, "steps between checkpoints")
    keep: int = knob(2, "newest checkpoints that stay, beside the best by validation; at least 2")
    on_collapse: str = knob(
        "warn", "when a curve collapses: warn, stop, or rollback", choices=("warn", "stop", "rollback")
    )
    track: str = knob("none", "metrics also to", choices=("none", "tensorboard", "wandb"))
    device: str = knob("auto", "auto, cpu or cuda", group="the machine")
    parallel: str = knob(
        "auto",
        "weights on several ranks: whole (ddp), sharded (fsdp), sharded in each node (hsdp)",
        choices=("auto", "none", "ddp", "fsdp", "hsdp"),
    )
    rank_timeout: float = knob(3600.0, "seconds that a rank waits for another before it gives up")
    offload: str = knob(
        "none",
        "sharded weights that wait in CPU memory; all: AdamW too",
        choices=("none", "reference", "all"),
    )
    threads: int = knob(0, "CPU threads of torch; 0: its own choice")
    dtype: str = knob("bfloat16", "of matrix products; weights are float32", choices=("float32", "bfloat16"))
    tokens_per_batch: int = knob(16384, "tokens of a micro-batch, a group's opening once")
    checkpointing: bool = knob(True, "gradient checkpointing", choices=("true", "false"))
    kv_tokens: int = knob(0, "tokens of the KV cache on each rank; 0: what memory allows")
    dry_run: bool = knob(False, "only estimate calls, tokens, dollars and memory")
    explain: bool = knob(False, "only walk one question through the algorithm, slowly")

    @property
    def games_per_update(self) -> int:
        """Games of an optimiser step."""
        return self.mini_batch * (self.group_size if self.mini_batch_of == "questions" else 1)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "mini": {
        "agent": "mini", "env": "mini", "data": ("mini",), "val_data": ("mini",), "test_data": ("mini",),
        "instruction": "short", "max_turns": 4, "max_new": 48, "max_tokens": 320, "rule": "release",
        "steps": 80, "questions": 16, "mini_batch": 40, "lr": 5e-4, "beta2": 0.98, "weight_decay": 0.0,
        "val_limit": 100, "dtype": "float32", "tokens_per_batch": 4096, "checkpointing": False,
        "threads": 1,
    },
}  # fmt: skip


def check(config: TrainConfig) -> None:
    """Raise UsageError for values with which no training is possible."""
    positive = (
        "max_turns",
        "max_new",
        "max_tokens",
        "steps",
        "questions",
        "mini_batch",
        "lr",
        "grad_clip",
        "val_every",
        "val_limit",
        "save_every",
        "rank_timeout",
        "tokens_per_batch",
        "env_concurrency",
        "env_timeout",
        "temperature",
    )
    for name in positive:
        if not getattr(config, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, not {getattr(config, name)}")
    for name in ("max_reply_tokens", "env_rpm", "env_tpm", "max_env_calls", "max_env_tokens", "max_env_usd"):
        if not getattr(config, name) >= 0:
            raise UsageError(
                f"--{name.replace('_', '-')} must be 0 (none) or more, not {getattr(config, name)}"
            )
    if (config.env == "none") != (config.rule == "alone") or (config.env == "none" and config.max_turns > 1):
        raise UsageError("--env none and --rule alone go together, with --max-turns 1: without an "
                         "environment the agent answers at once")  # fmt: skip
    if "@http" in config.agent:
        raise UsageError(f"--agent {config.agent}: an agent behind an endpoint plays, but cannot be trained; "
                         "give the folder or hub id of its weights")  # fmt: skip
    if "," in config.env and config.route != "session":
        raise UsageError("training compares the games of a question, which must meet the same environment: "
                         "give one environment, or --route session")  # fmt: skip
    for f in fields(config):
        if f.metadata["choices"] and f.type is str and getattr(config, f.name) not in f.metadata["choices"]:
            raise UsageError(f"{f.name} must be one of {', '.join(f.metadata['choices'])}, "
                             f"not {getattr(config, f.name)!r}")  # fmt: skip
    if 0 < config.kv_tokens < config.max_tokens or config.kv_tokens < 0:
        raise UsageError(
            f"--kv-tokens {config.kv_tokens} does not hold one game: --max-tokens is {config.max_tokens}"
        )
    if config.keep < 2:
        raise UsageError(f"--keep must be at least 2, not {config.keep}: the newest checkpoint may be broken")
    if config.on_collapse == "rollback" and not config.val_data:
        raise UsageError("--on-collapse rollback goes back to the agent that validated best: give --val-data")
    if config.group_size < 2:
        raise UsageError(
            f"--group-size must be at least 2, not {config.group_size}: GRPO compares games of a question"
        )
    if not config.data:
        raise UsageError("no training questions: give --data FILE … (JSONL or parquet), or --data mini")
