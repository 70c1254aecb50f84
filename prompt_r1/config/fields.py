"""What a field of a config is, and settings that several entry points or methods share."""

from dataclasses import dataclass, field
from typing import Any


def knob(default: Any, help: str, *, choices: tuple[str, ...] = (), group: str = "") -> Any:
    """A field of a config: its default, its line in the help, and its values where they are few.

    `group` is the heading, in --help-all, of this field and those that follow it.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "group": group})


@dataclass(frozen=True)
class ServedConfig:
    """An agent behind an endpoint, --agent MODEL@URL, which plays but is not trained."""

    agent_tokenizer: str = knob("", "what a served agent is: run folder, model folder or hub id (its MODEL)")
    agent_prompts: str = knob("tokens", "what a served agent is sent", choices=("tokens", "text"))


METHODS = (
    "direct", "cot", "cot-few-shot", "self-consistency", "opro", "textgrad", "gepa",
    "sft", "grpo-only", "untrained", "agent-only", "prompt-r1",
)  # fmt: skip


@dataclass(frozen=True)
class MethodConfig:
    """Settings of the methods that evaluate.py compares; the defaults are those of their authors."""

    answer_format: str = knob(
        "auto",
        'how an environment that is asked once marks its answer: <answer> tags, or "Answer only."; auto: '
        "tags, but not in the mini world",
        choices=("auto", "tags", "only"),
        group="compared methods",
    )
    train_data: tuple[str, ...] = knob((), "questions to learn from (mini, when --data is the mini world)")
    val_data: tuple[str, ...] = knob((), "questions to choose by (mini, when --data is the mini world)")
    shots: int = knob(4, "examples of cot-few-shot")
    samples: int = knob(0, "calls of self-consistency; 0: as many as the agent makes, on average")
    optimizer_env: str = knob(
        "", "SPEC of the model that writes prompts (the environment itself; in the mini world mini-optimizer)"
    )
    optimizer_args: str = knob("", "fields of its requests, as JSON (the authors' temperature, max_tokens)")
    optimizer_price: tuple[str, ...] = knob((), "IN,OUT in dollars per million tokens (--env-price)")
    optimize_calls: int = knob(0, "budget of a search, in calls of both models; 0: the authors'")
    optimize_val: int = knob(50, "validation questions of textgrad and gepa; 0: textgrad without validation")
    seed_prompt: str = knob(
        "Answer the question as well as you can.", "system message that the searches begin with"
    )
    opro_steps: int = knob(200, "steps at most")
    opro_per_step: int = knob(8, "new instructions of a step")
    opro_shown: int = knob(20, "best instructions so far that the optimiser sees")
    opro_threshold: float = knob(0.3, "score that an instruction must have to be seen")
    opro_exemplars: int = knob(3, "training questions that the optimiser sees")
    opro_train: int = knob(261, "training questions that score an instruction")
    textgrad_epochs: int = knob(3, "epochs")
    textgrad_updates: int = knob(4, "updates of an epoch")
    textgrad_batch: int = knob(3, "training questions of an update")
    textgrad_short_value: int = knob(10, "words of a long prompt's ends that the rewriter sees; 0: all")
    gepa_batch: int = knob(3, "training questions that a parent and its child are compared on")
    gepa_calls: int = knob(150, "calls of the environment before the last iteration")
    sft_agent: str = knob("", "fine-tuned agent of sft (one is fine-tuned in --out, from the agent's start)")
    sft_lr: float = knob(1e-4, "learning rate of sft")
    grpo_agent: str = knob("", "agent of grpo-only, from `train.py --env none`")


@dataclass(frozen=True)
class SftConfig:
    """Settings of supervised fine-tuning: the paper's Table 7, and LLaMA-Factory's where that is silent."""

    agent: str = knob("Qwen/Qwen3-4B", "model folder or hub id of the agent, or mini")
    data: tuple[str, ...] = knob((), "training questions: mini, or JSONL/parquet files")
    out: str = knob("", "folder for the agent and metrics.jsonl (runs/sft-seedN)")
    seed: int = knob(0, "order of the questions, start of the adapters, and the mini world")
    rank: int = knob(8, "of the adapters")
    alpha: float = knob(16.0, "adapters count alpha / rank")
    lr: float = knob(1e-4, "highest learning rate of AdamW; a tenth of warm-up, then a cosine")
    epochs: int = knob(3, "times that each question is seen")
    batch_size: int = knob(4, "examples of a micro-batch")
    accumulate: int = knob(8, "micro-batches of an optimiser step")
    cutoff: int = knob(2048, "tokens of an example; the rest is cut off")
    checkpointing: bool = knob(True, "gradient checkpointing", choices=("true", "false"))
    device: str = knob("auto", "auto, cpu or cuda")


@dataclass(frozen=True)
class EnvironmentConfig:
    """How an environment is called, limited, paid for and recorded, in training and in evaluation."""

    env_concurrency: int = knob(
        64, "calls of the environment at the same time, on each rank", group="calls of the environment"
    )
    env_args: str = knob("", 'fields of each request, as JSON: {"temperature": 0.7}')
    route: str = knob("session", "among several environments: session, uniform or weights (3,1)")
    env_timeout: float = knob(120.0, "seconds that one attempt of a call may take")
    env_rpm: float = knob(0.0, "requests a minute at most, on each rank; 0: no limit")
    env_tpm: float = knob(0.0, "tokens a minute at most, on each rank; 0: no limit")
    env_price: tuple[str, ...] = knob(
        (), "IN,OUT in dollars per million tokens, for all environments or each"
    )
    max_env_calls: int = knob(0, "budget of the run; 0: none")
    max_env_tokens: int = knob(0, "budget of the run; 0: none")
    max_env_usd: float = knob(0.0, "budget of the run; 0: none")
    journal: str = knob(
        "reuse",
        "recorded calls: live: send again; reuse; replay: send nothing",
        choices=("live", "reuse", "replay"),
    )
    journal_from: tuple[str, ...] = knob((), "journals of other runs whose replies may be used")
