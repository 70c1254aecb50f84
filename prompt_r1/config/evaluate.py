"""Settings of evaluate.py and of its methods."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from prompt_r1.cli.preflight import check_agent, check_device
from prompt_r1.config.agent import MINI_AGENT, is_mini_data
from prompt_r1.config.fields import ANY, LEARNING_RATE, POSITIVE, Range, everyday, parse_arguments, setting
from prompt_r1.config.pair import PlayConfig
from prompt_r1.data.files import read_rows
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.world import TRAINING_MIX


@dataclass(frozen=True)
class Needs:
    """What a method needs to answer."""

    environment: bool = True
    agent: Literal["", "trained", "start", "own"] = ""  # own: that of --grpo-agent
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

of_methods = partial(setting, group="compared methods", identifies=True)


@dataclass(frozen=True)
class EvaluateConfig(PlayConfig):
    """Score methods on questions; settings without a flag are those of a method's authors."""

    data: tuple[str, ...] = everyday(("mini",), "mini, mini:validation, mini:ood, files, hf:ORG/NAME:SPLIT")
    method: tuple[str, ...] = everyday(
        (), f"{', '.join(METHODS)} (direct untrained prompt-r1; with --tables the paper's)", tuple(METHODS)
    )
    agent: tuple[str, ...] = everyday((), "run or model folders, hub ids, or mini (default: newest mini run)")
    env: tuple[str, ...] = everyday((), "environments (default: the agents' own)")
    tables: bool = setting(False, "fill the paper's Tables 2 to 5: every method, ablation and transfer")
    limit: int = everyday(0, "questions of each file, a random sample stratified by dataset; 0: all")
    repeats: int = setting(1, "answers to each question, averaged per question", POSITIVE)
    metrics: str = setting("strict", "rules of EM, SM and F1: ours, or the release's", ("strict", "official"))
    ssim_model: str = setting("", "folder of the sentence encoder of SSim, or auto: search for it")
    out: str = everyday("", "results folder (runs/eval-AGENT)")
    top_p: float = setting(
        1.0, "nucleus of the agent's sampling, a probability", Range(above=0, below=1 + 1e-9), identifies=True
    )
    train_data: tuple[str, ...] = of_methods((), "training questions (mini, if --data is the mini world)")
    val_data: tuple[str, ...] = of_methods((), "validation questions (mini, if --data is the mini world)")
    optimizer_env: str = of_methods(
        "", "environment that writes prompts (the asked one; in the mini world mini-optimizer)"
    )
    optimizer_price: str = of_methods("", "IN,OUT price of its tokens (--env-price)", identifies=False)
    optimize_calls: int = of_methods(0, "calls of a search (both models) or of rft; 0: the authors' number")
    optimize_examples: int = of_methods(
        0, "questions that score a prompt; 0: 261 of training for opro, 50 of validation for textgrad, gepa"
    )
    grpo_agent: str = of_methods("", "agent of grpo-only, from `train.py --env none`", identifies=False)


@dataclass(frozen=True)
class SftConfig:
    """Teach an agent the format of the game by recorded games, with the settings of the paper's Table 7."""

    agent: str = everyday("Qwen/Qwen3-4B", "model folder, .gguf file or hub id of the agent, smollm2 or mini")
    games: str = everyday("", "JSONL file of games (question, turns), or demonstrations: mini, mini:KIND")
    preset: str = setting("small", "preset of instruction and limits; mini has its own", ("paper", "small"))
    out: str = everyday("", "folder for the agent and metrics.jsonl (runs/sft-seedN)")
    seed: int = setting(0, "seed of the order of questions, the adapters and the mini world", ANY)
    rank: int = setting(0, "rank of LoRA adapters, alpha is twice as much; 0: train all weights")
    lr: float = everyday(1e-4, "peak learning rate (warm-up in a tenth of the steps, cosine)", LEARNING_RATE)
    epochs: int = everyday(3, "epochs", POSITIVE)
    batch_size: int = setting(0, "examples per optimiser step; 0: 32, or fewer, so that there are 30 steps")
    micro_batch: int = setting(4, "examples in memory at a time", POSITIVE)
    cutoff: int = setting(2048, "tokens of an example; longer ones are left out", POSITIVE)
    device: str = setting("auto", "auto, cpu or cuda")
    threads: int = setting(0, "threads of torch on a CPU; 0: its own choice")


def check_sft(arguments: list[str]) -> SftConfig:
    """The settings of a warm start. Raises UsageError for one that cannot begin."""
    config = parse_arguments(SftConfig, arguments)
    if not config.games:
        raise UsageError("give the games to learn from: --games FILE, or --games mini")
    check_device(config.device)
    check_agent(config.agent)
    if is_mini_data(config.games):
        if config.games not in (MINI_AGENT, *(f"{MINI_AGENT}:{kind}" for kind in TRAINING_MIX)):
            raise UsageError(f"--games {config.games}: choose mini, or mini: and {', '.join(TRAINING_MIX)}")
    elif not any(True for _ in read_rows(config.games)):
        raise UsageError(f"--games {config.games}: there are no games in it")
    return config
