"""Settings of evaluate.py and of its methods."""

from dataclasses import dataclass
from functools import partial

from prompt_r1.evaluation.methods import METHODS
from prompt_r1.pair.settings import PlayConfig
from prompt_r1.settings.fields import POSITIVE, Range, everyday, setting

of_methods = partial(setting, group="compared methods", identifies=True)


@dataclass(frozen=True)
class EvaluateConfig(PlayConfig):
    """Score methods on questions. Settings of a method that have no flag are the authors' settings."""

    data: tuple[str, ...] = everyday(("mini",), "mini, mini:validation, mini:ood, files, hf:ORG/NAME:SPLIT")
    method: tuple[str, ...] = everyday(
        (), f"{', '.join(METHODS)} (direct untrained prompt-r1; with --tables the paper's)", tuple(METHODS)
    )
    agent: tuple[str, ...] = everyday((), "run or model folders, hub ids, or mini (default: newest mini run)")
    env: tuple[str, ...] = everyday((), "environments (default: the agents' own)")
    dry_run: bool = setting(False, "estimate calls, dollars and hours, then exit")
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
    optimizer_env: str = of_methods("", "environment that writes prompts (default: the one that is asked)")
    optimizer_price: str = of_methods("", "IN,OUT price of its tokens (--env-price)", identifies=False)
    optimize_calls: int = of_methods(
        5000, "calls of a search (both models) or of rft; 0: as many as the authors' code makes"
    )
    optimize_examples: int = of_methods(
        0, "questions that score a prompt; 0: 261 of training for opro, 50 of validation for textgrad, gepa"
    )
    grpo_agent: str = of_methods("", "agent of grpo-only, from `train.py --env none`", identifies=False)
    # This is no setting: it is true if --agent was not given, and the newest mini run plays.
    agent_is_newest: bool = False
