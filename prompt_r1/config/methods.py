"""Settings of the compared methods and of supervised fine-tuning."""

from dataclasses import dataclass

from prompt_r1.config.fields import setting

METHODS = (
    "direct", "cot", "cot-few-shot", "self-consistency", "opro", "textgrad", "gepa",
    "sft", "grpo-only", "untrained", "agent-only", "prompt-r1",
)  # fmt: skip


@dataclass(frozen=True)
class MethodConfig:
    """Settings of the methods that evaluate.py compares; the defaults are those of their authors."""

    answer_format: str = setting(
        "auto",
        'how an environment that is asked once marks its answer: <answer> tags, or "Answer only."; auto: '
        "tags, but not in the mini world",
        choices=("auto", "tags", "only"),
        group="compared methods",
    )
    train_data: tuple[str, ...] = setting((), "questions to learn from (mini, when --data is the mini world)")
    val_data: tuple[str, ...] = setting((), "questions to choose by (mini, when --data is the mini world)")
    shots: int = setting(4, "examples of cot-few-shot")
    samples: int = setting(0, "calls of self-consistency; 0: as many as the agent makes, on average")
    optimizer_env: str = setting(
        "", "SPEC of the model that writes prompts (the environment itself; in the mini world mini-optimizer)"
    )
    optimizer_args: str = setting(
        "", "fields of its requests, as JSON (the authors' temperature, max_tokens)"
    )
    optimizer_price: tuple[str, ...] = setting((), "IN,OUT in dollars per million tokens (--env-price)")
    optimize_calls: int = setting(0, "budget of a search, in calls of both models; 0: the authors'")
    optimize_val: int = setting(
        50, "validation questions of textgrad and gepa; 0: textgrad without validation"
    )
    seed_prompt: str = setting(
        "Answer the question as well as you can.", "system message that the searches begin with"
    )
    opro_steps: int = setting(200, "steps at most")
    opro_per_step: int = setting(8, "new instructions of a step")
    opro_shown: int = setting(20, "best instructions so far that the optimiser sees")
    opro_threshold: float = setting(0.3, "score that an instruction must have to be seen")
    opro_exemplars: int = setting(3, "training questions that the optimiser sees")
    opro_train: int = setting(261, "training questions that score an instruction")
    textgrad_epochs: int = setting(3, "epochs")
    textgrad_updates: int = setting(4, "updates of an epoch")
    textgrad_batch: int = setting(3, "training questions of an update")
    textgrad_short_value: int = setting(10, "words of a long prompt's ends that the rewriter sees; 0: all")
    gepa_batch: int = setting(3, "training questions that a parent and its child are compared on")
    gepa_calls: int = setting(150, "calls of the environment before the last iteration")
    sft_agent: str = setting(
        "", "fine-tuned agent of sft (one is fine-tuned in --out, from the agent's start)"
    )
    sft_lr: float = setting(1e-4, "learning rate of sft")
    grpo_agent: str = setting("", "agent of grpo-only, from `train.py --env none`")


@dataclass(frozen=True)
class SftConfig:
    """Settings of supervised fine-tuning: the paper's Table 7, and LLaMA-Factory's where that is silent."""

    agent: str = setting("Qwen/Qwen3-4B", "model folder or hub id of the agent, or mini")
    data: tuple[str, ...] = setting((), "training questions: mini, or JSONL/parquet files")
    out: str = setting("", "folder for the agent and metrics.jsonl (runs/sft-seedN)")
    seed: int = setting(0, "order of the questions, start of the adapters, and the mini world")
    rank: int = setting(8, "of the adapters")
    alpha: float = setting(16.0, "adapters count alpha / rank")
    lr: float = setting(1e-4, "highest learning rate of AdamW; a tenth of warm-up, then a cosine")
    epochs: int = setting(3, "times that each question is seen")
    batch_size: int = setting(4, "examples of a micro-batch")
    accumulate: int = setting(8, "micro-batches of an optimiser step")
    cutoff: int = setting(2048, "tokens of an example; the rest is cut off")
    checkpointing: bool = setting(True, "gradient checkpointing", choices=("true", "false"))
    device: str = setting("auto", "auto, cpu or cuda")
