"""Settings of evaluate.py."""

from dataclasses import dataclass
from typing import ClassVar

from prompt_r1.config.fields import EnvironmentConfig, ServedConfig, setting
from prompt_r1.config.methods import METHODS, MethodConfig


@dataclass(frozen=True)
class EvaluateConfig(MethodConfig, ServedConfig, EnvironmentConfig):
    """Settings of evaluate.py."""

    EVERYDAY: ClassVar = ("data", "method", "agent", "env", "limit", "out", "seed", "env_price")

    data: tuple[str, ...] = setting(("mini",), "mini, mini:validation, mini:ood, or JSONL/parquet files")
    method: tuple[str, ...] = setting(
        (), "any of them (direct untrained prompt-r1; with --tables all)", choices=METHODS
    )
    agent: tuple[str, ...] = setting(
        (), "run folders, model folders, hub ids, MODEL@URL, or mini (default: the newest mini run)"
    )
    env: tuple[str, ...] = setting((), "environments (default: those that the agents were trained with)")
    tables: bool = setting(False, "fill the paper's Tables 2 to 5: every method, ablation and transfer")
    compare: tuple[str, ...] = setting(
        (), "only compare two predictions.jsonl, paired by question; FILE or FILE:METHOD[:ENV[:AGENT]]"
    )
    limit: int = setting(0, "questions of each file at most; 0: all", at_least=0)
    repeats: int = setting(1, "answers to each question, averaged by question", above=0)
    metrics: str = setting(
        "strict",
        "rules of EM, SM and F1: ours, or the release's with its leaks",
        choices=("strict", "official"),
    )
    ssim_model: str = setting("", "folder of the encoder of SSim, or auto: where it is usually found")
    out: str = setting("", "folder for predictions, tables and journal (runs/eval-AGENT)")
    seed: int = setting(-1, "seed of the mini world and of sampling (default: the run's)")
    temperature: float = setting(0.0, "of the agent; 0: greedy", at_least=0, identifies=True)
    device: str = setting("auto", "auto, cpu or cuda")
    kv_tokens: int = setting(0, "tokens of the KV cache; 0: what memory allows", at_least=0)
