"""Settings of evaluate.py."""

from dataclasses import dataclass

from prompt_r1.config.fields import NOT_NEGATIVE, POSITIVE, EnvironmentConfig, ServedConfig, setting
from prompt_r1.config.methods import METHODS, MethodConfig


@dataclass(frozen=True)
class EvaluateConfig(MethodConfig, ServedConfig, EnvironmentConfig):
    """Settings of evaluate.py."""

    data: tuple[str, ...] = setting(
        ("mini",), "mini, mini:validation, mini:ood, or JSONL/parquet files", everyday=True
    )
    method: tuple[str, ...] = setting(
        (), "methods to score (direct untrained prompt-r1; with --tables all)", choices=METHODS, everyday=True
    )
    agent: tuple[str, ...] = setting(
        (),
        "run or model folders, hub ids, MODEL@URL, or mini (default: the newest mini run)",
        everyday=True,
    )
    env: tuple[str, ...] = setting((), "environments (default: the agents' own)", everyday=True)
    tables: bool = setting(False, "fill the paper's Tables 2 to 5: every method, ablation and transfer")
    compare: tuple[str, ...] = setting(
        (), "only compare two predictions.jsonl, paired by question; FILE or FILE:METHOD[:ENV[:AGENT]]"
    )
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
        0.0,
        "temperature of the agent; 0: greedy",
        range=NOT_NEGATIVE,
        identifies=True,
        methods=("self-consistency", "sft", "grpo-only", "untrained", "agent-only", "prompt-r1"),
    )
    device: str = setting("auto", "auto, cpu or cuda")
    kv_tokens: int = setting(0, "tokens of the KV cache; 0: as memory allows", range=NOT_NEGATIVE)
