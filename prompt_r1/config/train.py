"""Settings of train.py, and its presets."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from prompt_r1.config.fields import EnvironmentConfig, check_ranges, setting
from prompt_r1.errors import UsageError
from prompt_r1.protocol import INSTRUCTIONS
from prompt_r1.types import GameSettings


@dataclass(frozen=True)
class TrainConfig(EnvironmentConfig):
    """Settings of train.py; the defaults are the paper's (Table 6 and the released run script)."""

    EVERYDAY: ClassVar = (
        "agent", "env", "data", "val_data", "test_data", "out", "resume", "seed", "steps", "questions", "lr",
        "max_turns", "env_price", "max_env_usd", "dry_run", "explain",
    )  # fmt: skip

    agent: str = setting(
        "Qwen/Qwen3-4B", "model folder, hub id or mini", group="who plays, on what", identifies=True
    )
    env: str = setting(
        "gpt-4o-mini", "environment: mini, MODEL, MODEL@URL, hf:DIR; several: A,B; or none", identifies=True
    )
    data: tuple[str, ...] = setting((), "training questions: mini, or JSONL/parquet files", identifies=True)
    val_data: tuple[str, ...] = setting((), "validation questions; none: no validation")
    test_data: tuple[str, ...] = setting((), "questions for the table at the end; none: no table")
    out: str = setting("", "run folder (runs/CONFIG-seedN)")
    resume: str = setting("auto", "auto: go on where it stopped; never: begin anew; or a run folder")
    seed: int = setting(0, "world, order of the questions and sampling", identifies=True)
    instruction: str = setting(
        "paper",
        "paper, paper-50 or short; alone or answer: without environment",
        choices=tuple(INSTRUCTIONS),
        group="the game",
        identifies=True,
    )
    max_turns: int = setting(5, "turns of a game", above=0, identifies=True)
    max_new: int = setting(1024, "new tokens of a turn", above=0, identifies=True)
    max_tokens: int = setting(8192, "tokens of a game", above=0, identifies=True)
    max_reply_tokens: int = setting(
        1024, "tokens of a reply that the agent reads; 0: all", at_least=0, identifies=True
    )
    force_answer: bool = setting(False, "tell the agent when its last turn has come", identifies=True)
    stop_tags: bool = setting(
        False, "end a turn at </interaction_prompt> or </answer>", choices=("true", "false"), identifies=True
    )
    rule: str = setting(
        "paper",
        "reward rule (eqs 12-15); alone: for --env none",
        choices=("paper", "release", "alone"),
        identifies=True,
    )
    steps: int = setting(320, "rollout batches", group="the algorithm", above=0)
    questions: int = setting(128, "questions of a step, over all ranks", above=0, identifies=True)
    group_size: int = setting(5, "games of a question", at_least=2, identifies=True)
    mini_batch: int = setting(64, "games of an optimiser step, over all ranks", above=0, identifies=True)
    mini_batch_of: str = setting(
        "games",
        "what --mini-batch counts; questions keep groups whole",
        choices=("games", "questions"),
        identifies=True,
    )
    lr: float = setting(1e-6, "learning rate of AdamW, constant", above=0, identifies=True)
    beta1: float = setting(0.9, "AdamW", identifies=True)
    beta2: float = setting(0.999, "AdamW", identifies=True)
    weight_decay: float = setting(0.01, "AdamW", at_least=0, identifies=True)
    grad_clip: float = setting(1.0, "largest gradient norm", above=0, identifies=True)
    clip: float = setting(0.2, "clip range of the ratio (eq. 17)", identifies=True)
    kl_coef: float = setting(
        0.001, "weight of the KL to the frozen start (eq. 17); 0: none", at_least=0, identifies=True
    )
    loss: str = setting(
        "sequence-mean", "how tokens are averaged", choices=("sequence-mean", "token-mean"), identifies=True
    )
    temperature: float = setting(1.0, "sampling in training; validation is greedy", above=0, identifies=True)
    val_every: int = setting(20, "steps between validations", group="instruments", above=0)
    val_limit: int = setting(256, "validation questions at most", above=0)
    save_every: int = setting(20, "steps between checkpoints", above=0)
    keep: int = setting(2, "newest checkpoints that stay, beside the best by validation", at_least=2)
    on_collapse: str = setting(
        "warn", "when a curve collapses: warn, stop, or rollback", choices=("warn", "stop", "rollback")
    )
    track: str = setting("none", "metrics also to", choices=("none", "tensorboard", "wandb"))
    device: str = setting("auto", "auto, cpu or cuda", group="the machine")
    parallel: str = setting(
        "auto",
        "weights on several ranks: whole (ddp), sharded (fsdp), sharded in each node (hsdp)",
        choices=("auto", "none", "ddp", "fsdp", "hsdp"),
    )
    rank_timeout: float = setting(3600.0, "seconds that a rank waits for another before it gives up", above=0)
    offload: str = setting(
        "none",
        "sharded weights that wait in CPU memory; all: AdamW too",
        choices=("none", "reference", "all"),
    )
    threads: int = setting(0, "CPU threads of torch; 0: its own choice", at_least=0)
    dtype: str = setting(
        "bfloat16", "of matrix products; weights are float32", choices=("float32", "bfloat16")
    )
    tokens_per_batch: int = setting(16384, "tokens of a micro-batch, a group's opening once", above=0)
    checkpointing: bool = setting(True, "gradient checkpointing", choices=("true", "false"))
    kv_tokens: int = setting(0, "tokens of the KV cache on each rank; 0: what memory allows", at_least=0)
    dry_run: bool = setting(False, "only estimate calls, tokens, dollars and memory")
    explain: bool = setting(False, "only walk one question through the algorithm, slowly")

    @property
    def game(self) -> GameSettings:
        """The rules of the game, without the rest of the training."""
        return GameSettings(**{f.name: getattr(self, f.name) for f in fields(GameSettings)})

    @property
    def games_per_update(self) -> int:
        """Games of an optimiser step."""
        if self.mini_batch_of == "questions":
            return self.mini_batch * self.group_size
        return self.mini_batch


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
    check_ranges(config)
    if (config.env == "none") != (config.rule == "alone") or (config.env == "none" and config.max_turns > 1):
        raise UsageError(
            "--env none and --rule alone go together, with --max-turns 1: without an environment the agent "
            "answers at once"
        )
    if "@http" in config.agent:
        raise UsageError(
            f"--agent {config.agent}: an agent behind an endpoint can play, but not be trained; give the "
            "folder or hub id of its weights"
        )
    if "," in config.env and config.route != "session":
        raise UsageError(
            "training compares the games of a question, which must all meet the same environment: give one "
            "environment, or --route session"
        )
    if 0 < config.kv_tokens < config.max_tokens:
        raise UsageError(
            f"--kv-tokens {config.kv_tokens} does not hold one game: --max-tokens is {config.max_tokens}"
        )
    if config.on_collapse == "rollback" and not config.val_data:
        raise UsageError("--on-collapse rollback goes back to the agent that validated best: give --val-data")
    if not config.data:
        raise UsageError("no training questions: give --data FILE … (JSONL or parquet), or --data mini")
