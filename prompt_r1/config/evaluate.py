"""Settings of evaluate.py."""

from dataclasses import dataclass
from typing import ClassVar

from prompt_r1.config.fields import METHODS, EnvironmentConfig, MethodConfig, ServedConfig, knob


@dataclass(frozen=True)
class EvaluateConfig(MethodConfig, ServedConfig, EnvironmentConfig):
    """Settings of evaluate.py."""

    EVERYDAY: ClassVar = ("data", "method", "agent", "env", "limit", "out", "seed", "env_price")

    data: tuple[str, ...] = knob(("mini",), "mini, mini:validation, mini:ood, or JSONL/parquet files")
    method: tuple[str, ...] = knob(
        (), "any of them (direct untrained prompt-r1; with --tables all)", choices=METHODS
    )
    agent: tuple[str, ...] = knob(
        (), "run folders, model folders, hub ids, MODEL@URL, or mini (default: the newest mini run)"
    )
    env: tuple[str, ...] = knob((), "environments (default: those that the agents were trained with)")
    tables: bool = knob(False, "fill the paper's Tables 2 to 5: every method, ablation and transfer")
    compare: tuple[str, ...] = knob(
        (), "only compare two predictions.jsonl, paired by question; FILE or FILE:METHOD[:ENV[:AGENT]]"
    )
    limit: int = knob(0, "questions of each file at most; 0: all")
    repeats: int = knob(1, "answers to each question, averaged by question")
    metrics: str = knob(
        "strict",
        "rules of EM, SM and F1: ours, or the release's with its leaks",
        choices=("strict", "official"),
    )
    ssim_model: str = knob("", "folder of the encoder of SSim, or auto: where it is usually found")
    out: str = knob("", "folder for predictions, tables and journal (runs/eval-AGENT)")
    seed: int = knob(-1, "seed of the mini world and of sampling (default: the run's)")
    temperature: float = knob(0.0, "of the agent; 0: greedy")
    device: str = knob("auto", "auto, cpu or cuda")
    kv_tokens: int = knob(0, "tokens of the KV cache; 0: what memory allows")
