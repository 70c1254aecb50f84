"""Settings of train.py, and its presets."""

from dataclasses import dataclass, fields, replace
from typing import Any

from prompt_r1.config.fields import (
    FRACTION,
    LEARNING_RATE,
    NOT_NEGATIVE,
    POSITIVE,
    EnvironmentConfig,
    Range,
    check_ranges,
    setting,
)
from prompt_r1.config.functions import import_metric, import_reward
from prompt_r1.errors import UsageError
from prompt_r1.options.advantages import ADVANTAGES
from prompt_r1.options.cost import MOST_WEIGHT
from prompt_r1.options.credit import CREDITS
from prompt_r1.options.routes import AGENT_ROUTE, names_in, route_instruction
from prompt_r1.protocol import INSTRUCTIONS
from prompt_r1.reward import RULES, Rule
from prompt_r1.types import GameSettings


@dataclass(frozen=True)
class TrainConfig(EnvironmentConfig):
    """Settings of train.py; the defaults are the paper's (Table 6 and the released run script)."""

    agent: str = setting(
        "Qwen/Qwen3-4B",
        "model folder, hub id or mini",
        everyday=True,
        identifies=True,
        group="agent, environment and data",
    )
    env: str = setting(
        "gpt-4o-mini",
        "mini, MODEL, MODEL@URL, hf:DIR, several: A,B, or none",
        everyday=True,
        identifies=True,
    )
    data: tuple[str, ...] = setting(
        (), "mini, or JSONL/parquet files to train on", everyday=True, identifies=True
    )
    val_data: tuple[str, ...] = setting((), "validation questions; none: no validation", everyday=True)
    test_data: tuple[str, ...] = setting(
        (), "test questions, played at the end; none: no test", everyday=True
    )
    out: str = setting("", "run folder (runs/CONFIG-seedN)", everyday=True)
    resume: str = setting("auto", "auto (resume), never (new run), or a run folder", everyday=True)
    seed: int = setting(
        0, "seed of the mini world, question order and sampling", everyday=True, identifies=True
    )
    instruction: str = setting(
        "paper",
        "paper, paper-50 or short; alone or answer: without environment",
        choices=tuple(INSTRUCTIONS),
        identifies=True,
        group="the game",
    )
    max_turns: int = setting(5, "most turns of a game", range=POSITIVE, everyday=True, identifies=True)
    max_new: int = setting(1024, "most new tokens of a turn", range=POSITIVE, identifies=True)
    max_tokens: int = setting(8192, "most tokens of a game", range=POSITIVE, identifies=True)
    max_reply_tokens: int = setting(
        1024, "tokens of a reply that the agent reads; 0: all", range=NOT_NEGATIVE, identifies=True
    )
    force_answer: bool = setting(False, "tell the agent when its last turn has come", identifies=True)
    stop_tags: bool = setting(False, "end a turn at </interaction_prompt> or </answer>", identifies=True)
    game_deadline: float = setting(
        0.0,
        "most seconds that a training game waits for replies; late, it leaves its group; 0: no limit",
        range=NOT_NEGATIVE,
    )
    rule: str = setting(
        "paper",
        "reward rule (eqs 12-15); alone: for --env none",
        choices=("paper", "release", "alone"),
        identifies=True,
    )
    answer_metric: str = setting(
        "", "MODULE:FUNCTION in place of F1 in the reward (eq. 13): 0 to 1", identifies=True
    )
    reward: str = setting("", "MODULE:FUNCTION in place of the whole reward (eq. 15)", identifies=True)
    cost_weight: float = setting(
        0.0,
        "weight of a right game's cost beside the other right games of its question; 0: none",
        range=NOT_NEGATIVE,
        identifies=True,
    )
    cost_of: str = setting(
        "usd", "cost of a game: dollars or calls", choices=("usd", "calls"), identifies=True
    )
    steps: int = setting(320, "training steps", range=POSITIVE, everyday=True, group="the algorithm")
    questions: int = setting(
        128, "questions per step, over all ranks", range=POSITIVE, everyday=True, identifies=True
    )
    group_size: int = setting(5, "games per question", range=Range(at_least=2), identifies=True)
    mini_batch: int = setting(64, "games per optimiser step, over all ranks", range=POSITIVE, identifies=True)
    mini_batch_of: str = setting(
        "games",
        "unit of --mini-batch; questions: groups stay together",
        choices=("games", "questions"),
        identifies=True,
    )
    lr: float = setting(
        1e-6, "learning rate of AdamW, constant", range=LEARNING_RATE, everyday=True, identifies=True
    )
    beta1: float = setting(0.9, "AdamW", range=FRACTION, identifies=True)
    beta2: float = setting(0.999, "AdamW", range=FRACTION, identifies=True)
    weight_decay: float = setting(0.01, "AdamW", range=NOT_NEGATIVE, identifies=True)
    grad_clip: float = setting(1.0, "largest gradient norm", range=POSITIVE, identifies=True)
    clip: float = setting(0.2, "clip range of the ratio (eq. 17)", range=POSITIVE, identifies=True)
    clip_high: float = setting(
        0.0, "clip range above 1 (DAPO: 0.28); 0: that of --clip", range=NOT_NEGATIVE, identifies=True
    )
    ratio: str = setting(
        "token",
        "ratio of each token, or of each game (GSPO; needs a --clip of about 3e-4)",
        choices=("token", "sequence"),
        identifies=True,
    )
    advantages: str = setting(
        "group",
        "eq. 16; or with the std of the step; or without std (Dr. GRPO)",
        choices=tuple(ADVANTAGES),
        identifies=True,
    )
    credit: str = setting(
        "game",
        "one advantage for all turns of a game, or one for each turn",
        choices=tuple(CREDITS),
        identifies=True,
    )
    drop_even_groups: bool = setting(
        False, "train on no group whose games all did equally well (DAPO)", identifies=True
    )
    adapter_rank: int = setting(
        0,
        "train low-rank adapters (LoRA) of this rank beside the frozen weights; 0: train all weights",
        range=NOT_NEGATIVE,
        identifies=True,
    )
    adapter_alpha: float = setting(
        32.0, "adapters change the weights by this / rank · B A", range=POSITIVE, identifies=True
    )
    kl_coef: float = setting(
        0.001, "weight of the KL to the frozen start (eq. 17); 0: no KL", range=NOT_NEGATIVE, identifies=True
    )
    importance_cap: float = setting(
        2.0,
        "cap of the importance weights π_policy / π_engine; 0: none. float32 has them only with --ahead",
        range=NOT_NEGATIVE,
        identifies=True,
    )
    ahead: int = setting(
        0,
        "1: train on games that began before the last update, and play the next ones meanwhile",
        range=Range(at_least=0, below=2),
        identifies=True,
    )
    loss: str = setting(
        "sequence-mean", "how tokens are averaged", choices=("sequence-mean", "token-mean"), identifies=True
    )
    temperature: float = setting(
        1.0,
        "sampling temperature of training games; validation is greedy",
        range=Range(at_least=1e-6),
        identifies=True,
    )
    val_every: int = setting(20, "steps between validations", range=POSITIVE, group="instruments")
    val_limit: int = setting(
        256, "most validation questions, a random sample stratified by dataset", range=POSITIVE
    )
    save_every: int = setting(20, "steps between checkpoints", range=POSITIVE)
    keep: int = setting(2, "newest checkpoints to keep, beside the best one", range=Range(at_least=2))
    on_collapse: str = setting(
        "warn", "when training collapses: warn, stop, or rollback", choices=("warn", "stop", "rollback")
    )
    track: str = setting("none", "log metrics to this tracker too", choices=("none", "tensorboard", "wandb"))
    device: str = setting("auto", "auto, cpu or cuda", group="the machine")
    parallel: str = setting(
        "auto",
        "weights on several ranks: replicated (ddp), sharded (fsdp), sharded within each node (hsdp)",
        choices=("auto", "none", "ddp", "fsdp", "hsdp"),
    )
    rank_timeout: float = setting(
        3600.0, "seconds that a rank waits for another", range=Range(above=0, below=1e9)
    )
    offload: str = setting(
        "none",
        "sharded weights kept in CPU memory; all: with AdamW's states",
        choices=("none", "reference", "all"),
    )
    threads: int = setting(
        0, "CPU threads of torch, also when the agent plays later; 0: torch's default", range=NOT_NEGATIVE
    )
    dtype: str = setting(
        "bfloat16",
        "dtype of matrix products on GPUs; CPUs and the trained weights: float32",
        choices=("float32", "bfloat16"),
    )
    tokens_per_batch: int = setting(
        16384, "tokens per micro-batch; a group's shared opening counts once", range=POSITIVE
    )
    checkpointing: bool = setting(True, "gradient checkpointing")
    slow_attention: bool = setting(False, "train on a GPU even where FlashAttention cannot be used")
    fused_kernels: bool = setting(
        True, "on GPUs, fused RMSNorm, rotary embedding and SwiGLU, where a comparison at load agrees"
    )
    kv_tokens: int = setting(
        0, "tokens of the KV cache on each rank; 0: as memory allows", range=NOT_NEGATIVE
    )
    dry_run: bool = setting(False, "estimate calls, tokens, dollars and memory, then exit", everyday=True)
    explain: bool = setting(False, "walk through the algorithm on one question, then exit", everyday=True)

    @property
    def game(self) -> GameSettings:
        """The rules of the game, without the rest of the training."""
        return GameSettings(**{f.name: getattr(self, f.name) for f in fields(GameSettings)})

    @property
    def reward_rule(self) -> Rule:
        """The rule of the reward, with the user's own metric and reward if there are any."""
        rule = RULES[self.rule]
        if self.answer_metric:
            rule = replace(rule, metric=import_metric(self.answer_metric))
        return replace(rule, own=import_reward(self.reward)) if self.reward else rule

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may be below and above 1."""
        return self.clip, self.clip_high or self.clip

    @property
    def layout(self) -> str:
        """`parallel`, where adapters decide `auto`: they need whole weights on every rank."""
        return "ddp" if self.adapter_rank and self.parallel == "auto" else self.parallel

    @property
    def told(self) -> str:
        """The instruction of the agent; with --route agent it names the environments and their prices."""
        told = INSTRUCTIONS[self.instruction]
        if self.route != AGENT_ROUTE:
            return told
        return f"{told}\n{route_instruction(self.env, self.env_price)}"

    @property
    def games_per_update(self) -> int:
        """Games of an optimiser step."""
        if self.mini_batch_of == "questions":
            return self.mini_batch * self.group_size
        return self.mini_batch


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
        "threads": 1,
    },
}


def check(config: TrainConfig) -> None:
    """Raise UsageError for settings with which no training is possible."""
    check_ranges(config)
    alone = config.env == "none"
    if alone != (config.rule == "alone") or (alone and config.max_turns > 1):
        raise UsageError(
            "--env none and --rule alone go together, with --max-turns 1: without an environment the agent "
            "answers at once"
        )
    if "@http" in config.agent:
        raise UsageError(
            f"--agent {config.agent}: an agent behind an endpoint can play, but not be trained; give "
            "the folder or hub id of its weights"
        )
    if "," in config.env and config.route not in ("session", AGENT_ROUTE):
        raise UsageError(
            "all games of a question must meet the same environment, because training compares them: give "
            "one environment, --route session, or --route agent, where the choice is trained too"
        )
    if config.route == AGENT_ROUTE:
        if "," not in config.env:
            raise UsageError("--route agent chooses among several environments: give --env SPEC,SPEC")
        names_in(config.env)  # raises UsageError for names that the agent cannot write or tell apart
    if config.cost_weight > MOST_WEIGHT:
        raise UsageError(
            f"--cost-weight {config.cost_weight:g} could make a cheap wrong game better than a dear right "
            f"one: give at most {MOST_WEIGHT:g}"
        )
    if config.cost_weight and config.cost_of == "usd" and not config.env_price:
        raise UsageError("--cost-weight needs --env-price IN,OUT, or --cost-of calls")
    if 0 < config.kv_tokens < config.max_tokens:
        raise UsageError(
            f"--kv-tokens {config.kv_tokens} does not hold one game: --max-tokens is {config.max_tokens}"
        )
    if 0 < config.importance_cap < 1:
        raise UsageError(
            f"--importance-cap {config.importance_cap:g} would truncate the weights of nearly all tokens: "
            "give 1 or more, or 0 (no weights)"
        )
    other_advantages = config.advantages != "group" or config.credit != "game" or config.cost_weight > 0
    other_loss = config.ratio != "token" or config.clip_high > 0
    if config.explain and (other_advantages or other_loss):
        raise UsageError(
            "--explain shows eqs 16 and 17 as the paper has them: leave out --advantages, --credit, --ratio, "
            "--clip-high and --cost-weight"
        )
    if config.credit == "turn" and (config.advantages != "group" or config.ratio != "token"):
        raise UsageError(
            "--credit turn has advantages of its own, and they differ between the tokens of a game: leave "
            "out --advantages and --ratio"
        )
    if config.adapter_rank and config.ahead:
        raise UsageError(
            "with --adapter-rank the weights that learn also play, but --ahead 1 plays with older ones: give "
            "one of the two"
        )
    if config.credit == "turn" and config.cost_weight:
        raise UsageError("--cost-weight charges whole games, and --credit turn has no advantage of them")
    if config.adapter_rank and (config.parallel in ("fsdp", "hsdp") or config.offload != "none"):
        raise UsageError(
            "--adapter-rank trains beside whole weights on every GPU, which cannot be sharded or offloaded: "
            "give --parallel ddp (or auto) and --offload none"
        )
    if config.on_collapse == "rollback" and not config.val_data:
        raise UsageError("--on-collapse rollback returns to the best agent in validation: give --val-data")
    if config.answer_metric:
        import_metric(config.answer_metric)
    if config.reward:
        import_reward(config.reward)
    if not config.data:
        raise UsageError("no training questions: give --data FILE … (JSONL or parquet), or --data mini")
