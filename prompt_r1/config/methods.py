"""Settings of the compared methods and of `sft`."""

from dataclasses import dataclass

from prompt_r1.config.fields import LEARNING_RATE, NOT_NEGATIVE, POSITIVE, setting

METHODS = (
    "direct",
    "cot",
    "cot-few-shot",
    "self-consistency",
    "random-search",
    "opro",
    "textgrad",
    "gepa",
    "sft",
    "grpo-only",
    "untrained",
    "best-of-n",
    "bc",
    "rft",
    "agent-only",
    "prompt-r1",
)
RIVALS = ("best-of-n", "bc", "rft")  # of training by GRPO
NOT_IN_PAPER = ("random-search", *RIVALS)
SEARCHES = ("random-search", "opro", "textgrad", "gepa")  # for a better prompt


@dataclass(frozen=True)
class MethodConfig:
    """Settings of the methods that evaluate.py compares; the defaults are those of their authors.

    A setting whose name begins with a method's affects only its answers.
    """

    answer_format: str = setting(
        "auto",
        'how an environment that is asked once marks its answer: <answer> tags, or "Answer only."; auto: '
        "tags, except in the mini world",
        choices=("auto", "tags", "only"),
        group="compared methods",
        methods=("direct", "cot", "cot-few-shot", "self-consistency", *SEARCHES),
    )
    train_data: tuple[str, ...] = setting(
        (),
        "training questions (mini, if --data is the mini world)",
        methods=("cot-few-shot", *SEARCHES, "sft", "rft"),
    )
    val_data: tuple[str, ...] = setting(
        (),
        "validation questions (mini, if --data is the mini world)",
        methods=("self-consistency", *SEARCHES),
    )
    shots: int = setting(4, "examples of cot-few-shot", range=POSITIVE, methods=("cot-few-shot",))
    samples: int = setting(
        0,
        "calls of self-consistency; 0: the mean number of the agent's calls",
        range=NOT_NEGATIVE,
        methods=("self-consistency",),
    )
    optimizer_env: str = setting(
        "",
        "SPEC of the model that writes prompts (the environment itself; in the mini world mini-optimizer)",
        methods=SEARCHES,
    )
    optimizer_args: str = setting(
        "", "fields of its requests, as JSON (the authors' temperature, max_tokens)", methods=SEARCHES
    )
    optimizer_price: tuple[str, ...] = setting(
        (), "IN,OUT in dollars per million tokens (--env-price)", methods=()
    )
    method_args: str = setting(
        "",
        'request fields by method, as JSON, in place of those of its authors: {"cot": {"temperature": 0.5}}',
    )
    optimize_calls: int = setting(
        0,
        "budget of each prompt search, in calls of both models; 0: the authors'",
        range=NOT_NEGATIVE,
        methods=SEARCHES,
    )
    optimize_val: int = setting(
        50,
        "validation questions of textgrad and gepa; 0: textgrad without validation",
        range=NOT_NEGATIVE,
        methods=("textgrad", "gepa"),
    )
    seed_prompt: str = setting(
        "Answer the question as well as you can.",
        "system message that a prompt search starts from",
        methods=SEARCHES,
    )
    opro_steps: int = setting(200, "most steps", range=POSITIVE, methods=SEARCHES[:2])
    opro_per_step: int = setting(8, "new instructions per step", range=POSITIVE, methods=SEARCHES[:2])
    opro_train: int = setting(
        261, "training questions that score an instruction", range=POSITIVE, methods=SEARCHES[:2]
    )
    textgrad_epochs: int = setting(3, "epochs", range=POSITIVE)
    textgrad_updates: int = setting(4, "updates per epoch", range=POSITIVE)
    textgrad_batch: int = setting(3, "training questions per update", range=POSITIVE)
    gepa_batch: int = setting(3, "training questions that compare a child with its parent", range=POSITIVE)
    gepa_calls: int = setting(150, "calls of the environment before the last iteration", range=NOT_NEGATIVE)
    best_of: int = setting(
        8, "games of the untrained agent that best-of-n votes on", range=POSITIVE, methods=("best-of-n",)
    )
    rft_calls: int = setting(10_000, "calls of the environment in all rounds of rft", range=POSITIVE)
    rft_rounds: int = setting(2, "rounds of playing and fine-tuning", range=POSITIVE)
    imitation_lr: float = setting(
        3e-3, "learning rate of bc and rft", range=LEARNING_RATE, methods=("bc", "rft")
    )
    sft_agent: str = setting("", "fine-tuned agent of sft (default: fine-tune the agent's start, in --out)")
    sft_lr: float = setting(1e-4, "learning rate of sft", range=LEARNING_RATE)
    grpo_agent: str = setting("", "agent of grpo-only, from `train.py --env none`", methods=())


@dataclass(frozen=True)
class SftConfig:
    """Settings of supervised fine-tuning: the paper's Table 7, with LLaMA-Factory's defaults for the rest.

    The warm start on recorded games (`games`) has settings of its own kind: `preset`, and `rank` 0.
    """

    agent: str = setting("Qwen/Qwen3-4B", "model folder or hub id of the agent, or mini")
    data: tuple[str, ...] = setting((), "training questions: mini, or JSONL/parquet files")
    games: str = setting(
        "", "warm start: imitate the games of this JSONL file (question, turns) in place of gold answers"
    )
    preset: str = setting(
        "paper", "game of the warm start: instruction and limits of this preset", choices=("paper", "mini")
    )
    out: str = setting("", "folder for the agent and metrics.jsonl (runs/sft-seedN)")
    seed: int = setting(0, "seed of the order of questions, the adapters and the mini world")
    rank: int = setting(8, "rank of the adapters; 0: train all weights", range=NOT_NEGATIVE)
    alpha: float = setting(16.0, "scale of the adapters, alpha / rank", range=POSITIVE)
    lr: float = setting(
        1e-4,
        "peak learning rate of AdamW (warm-up over a tenth of the steps, then cosine)",
        range=LEARNING_RATE,
    )
    epochs: int = setting(3, "epochs", range=POSITIVE)
    batch_size: int = setting(4, "examples per micro-batch", range=POSITIVE)
    accumulate: int = setting(8, "micro-batches per optimiser step", range=POSITIVE)
    cutoff: int = setting(2048, "most tokens of an example; the rest is cut off", range=POSITIVE)
    checkpointing: bool = setting(True, "gradient checkpointing")
    device: str = setting("auto", "auto, cpu or cuda")
