"""Settings of evaluate.py and of its methods."""

from dataclasses import dataclass
from functools import partial

from prompt_r1.evaluation.methods import DEFAULT_METHODS, METHODS
from prompt_r1.pair.settings import PlayConfig
from prompt_r1.settings.fields import everyday_setting, setting

method_setting = partial(setting, group="compared methods", defines_experiment=True)


@dataclass(frozen=True)
class EvaluateConfig(PlayConfig):
    """Score methods on questions. Settings of a method that have no flag are the authors' settings."""

    data: tuple[str, ...] = everyday_setting(
        ("mini",), "mini, mini:validation, mini:ood, files, hf:ORG/NAME:SPLIT"
    )
    method: tuple[str, ...] = everyday_setting(
        (),
        f"{', '.join(METHODS)} ({' '.join(DEFAULT_METHODS)}; with --tables the paper's)",
        choices=tuple(METHODS),
    )
    agent: tuple[str, ...] = everyday_setting(
        (), "run or model folders, hub ids, or mini", default_text="newest mini run"
    )
    env: tuple[str, ...] = everyday_setting((), "environments", default_text="the agents' own")
    dry_run: bool = setting(False, "estimate calls, tokens and dollars, then exit")
    tables: bool = setting(False, "fill the paper's Tables 2 to 5: every method, ablation and transfer")
    limit: int = everyday_setting(0, "questions of each file, a random sample stratified by dataset; 0: all")
    repeats: int = setting(1, "answers to each question, averaged per question", low=1)
    metrics: str = setting(
        "strict", "rules of EM, SM and F1: ours, or the release's", choices=("strict", "official")
    )
    metric: tuple[str, ...] = setting(
        (), "MODULE:FUNCTION of your own metrics: (answer, question) -> 0 to 1, a column beside EM"
    )
    ssim_model: str = setting("", "folder of the sentence encoder of SSim, or auto: search for it")
    out: str = everyday_setting("", "results folder (runs/eval-AGENT)")
    top_p: float = setting(
        1.0, "nucleus of the agent's sampling, a probability", low=1e-9, high=1, defines_experiment=True
    )
    train_data: tuple[str, ...] = method_setting((), "training questions (mini, if --data is the mini world)")
    val_data: tuple[str, ...] = method_setting((), "validation questions (mini, if --data is the mini world)")
    optimizer_env: str = method_setting(
        "", "environment that writes prompts", default_text="the one that is asked"
    )
    optimize_calls: int = method_setting(
        5000, "calls of a search (both models) or of rft; 0: as many as the authors' code makes"
    )
    optimize_examples: int = method_setting(
        0, "questions that score a prompt; 0: 261 of training for opro, 50 of validation for textgrad, gepa"
    )
    grpo_agent: str = method_setting(
        "", "agent of grpo-only, from `train.py --env none`", defines_experiment=False
    )
