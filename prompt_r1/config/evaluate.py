"""Settings of evaluate.py."""

from dataclasses import dataclass

from prompt_r1.config.environment import EnvironmentConfig
from prompt_r1.config.fields import NOT_NEGATIVE, POSITIVE, Range, parse_arguments, setting
from prompt_r1.config.methods import METHODS, MethodConfig


@dataclass(frozen=True)
class EvaluateConfig(MethodConfig, EnvironmentConfig):
    """Settings of evaluate.py. Those that `identify` are the same for all answers in a folder."""

    data: tuple[str, ...] = setting(
        (),
        "mini, mini:validation, mini:ood, JSONL/parquet files, or hf:ORG/NAME:SPLIT (default: mini)",
        everyday=True,
    )
    method: tuple[str, ...] = setting(
        (),
        f"{', '.join(METHODS)} (default: direct untrained prompt-r1; with --tables the paper's)",
        choices=tuple(METHODS),
        everyday=True,
    )
    agent: tuple[str, ...] = setting(
        (), "run or model folders, hub ids, or mini (default: the newest mini run)", everyday=True
    )
    env: tuple[str, ...] = setting((), "environments (default: the agents' own)", everyday=True)
    tables: bool = setting(False, "fill the paper's Tables 2 to 5: every method, ablation and transfer")
    limit: int = setting(
        0,
        "most questions of each file, a random sample stratified by dataset; 0: all",
        range=NOT_NEGATIVE,
        everyday=True,
    )
    repeats: int = setting(1, "answers to each question, averaged per question", range=POSITIVE)
    metrics: str = setting(
        "strict",
        "rules of EM, SM and F1: ours, or those of the released code",
        choices=("strict", "official"),
    )
    ssim_model: str = setting("", "folder of the sentence encoder of SSim, or auto: search for it")
    out: str = setting("", "results folder (runs/eval-AGENT)", everyday=True)
    seed: int = setting(-1, "mini world and sampling (default: the run's)", everyday=True)
    temperature: float = setting(
        0.0, "temperature of the agent; 0: greedy", range=NOT_NEGATIVE, identifies=True
    )
    top_p: float = setting(
        1.0,
        "the agent samples from the most likely tokens of this probability",
        range=Range(above=0, below=1 + 1e-9),
        identifies=True,
    )
    max_turns: int = setting(
        0, "most turns of a game; 0: as in the agent's training", range=NOT_NEGATIVE, identifies=True
    )
    max_new: int = setting(
        0, "most new tokens of a turn; 0: as in the agent's training", range=NOT_NEGATIVE, identifies=True
    )
    device: str = setting("auto", "auto, cpu or cuda")


def evaluate_config(arguments: list[str]) -> EvaluateConfig:
    """Read the settings of evaluate.py."""
    return parse_arguments(EvaluateConfig, "evaluate.py", "Score methods on questions.", arguments)
