"""The compared methods, their settings, and those of `sft`."""

from dataclasses import dataclass
from typing import Literal

from prompt_r1.config.fields import LEARNING_RATE, NOT_NEGATIVE, POSITIVE, setting


@dataclass(frozen=True)
class Needs:
    """What a method needs to answer.

    `agent`: the trained one, its start, one of its own (that another flag names), or none.
    """

    environment: bool = True
    agent: Literal["", "trained", "start", "own"] = ""
    training: bool = False  # training questions, to prepare
    in_paper: bool = True


METHODS = {
    "direct": Needs(),
    "cot": Needs(),
    "opro": Needs(training=True),
    "textgrad": Needs(training=True),
    "gepa": Needs(training=True),
    "sft": Needs(environment=False, agent="start", training=True),
    "grpo-only": Needs(environment=False, agent="own"),
    "untrained": Needs(agent="start"),
    "bc": Needs(agent="start", in_paper=False),
    "rft": Needs(agent="start", training=True, in_paper=False),
    "agent-only": Needs(environment=False, agent="trained"),
    "prompt-r1": Needs(agent="trained"),
}


@dataclass(frozen=True)
class MethodConfig:
    """Settings of the methods that evaluate.py compares; everything else is as their authors have it."""

    train_data: tuple[str, ...] = setting(
        (),
        "training questions (mini, if --data is the mini world)",
        group="compared methods",
        identifies=True,
    )
    val_data: tuple[str, ...] = setting(
        (), "validation questions (mini, if --data is the mini world)", identifies=True
    )
    optimizer_env: str = setting(
        "",
        "SPEC of the model that writes prompts (the environment itself; in the mini world mini-optimizer)",
        identifies=True,
    )
    optimizer_price: str = setting("", "IN,OUT in dollars per million tokens (--env-price)")
    optimize_calls: int = setting(
        0,
        "calls of each prompt search (of both models) and of rft; 0: as many as the authors make",
        range=NOT_NEGATIVE,
        identifies=True,
    )
    optimize_examples: int = setting(
        0,
        "questions that score a prompt; 0: 261 training questions for opro, 50 validation questions for "
        "textgrad and gepa",
        range=NOT_NEGATIVE,
        identifies=True,
    )
    grpo_agent: str = setting("", "agent of grpo-only, from `train.py --env none`")


@dataclass(frozen=True)
class SftConfig:
    """Settings of supervised fine-tuning: the paper's Table 7, with LLaMA-Factory's defaults for the rest."""

    agent: str = setting("Qwen/Qwen3-4B", "model folder, .gguf file or hub id of the agent, smollm2 or mini")
    games: str = setting(
        "",
        "JSONL file of the games to imitate: question, turns; mini or mini:KIND: demonstrations of the mini "
        "world, of all kinds of questions or one",
    )
    preset: str = setting(
        "small",
        "preset whose instruction and limits the game has; the agent mini has its own",
        choices=("paper", "small"),
    )
    out: str = setting("", "folder for the agent and metrics.jsonl (runs/sft-seedN)")
    seed: int = setting(0, "seed of the order of questions, the adapters and the mini world")
    rank: int = setting(
        0, "rank of LoRA adapters, alpha is twice as much; 0: train all weights", range=NOT_NEGATIVE
    )
    lr: float = setting(
        1e-4,
        "peak learning rate of AdamW (warm-up over a tenth of the steps, then cosine)",
        range=LEARNING_RATE,
    )
    epochs: int = setting(3, "epochs", range=POSITIVE)
    batch_size: int = setting(
        0, "examples per optimiser step; 0: 32, or fewer, so that there are 30 steps", range=NOT_NEGATIVE
    )
    micro_batch: int = setting(4, "examples in memory at a time", range=POSITIVE)
    cutoff: int = setting(2048, "most tokens of an example; longer ones are left out", range=POSITIVE)
    device: str = setting("auto", "auto, cpu or cuda")
    threads: int = setting(0, "threads of torch on a CPU; 0: its own choice", range=NOT_NEGATIVE)
