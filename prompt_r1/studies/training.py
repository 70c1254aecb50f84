"""Proposition 2: more training makes a better agent (eqs 34-39).

    Reinforcement learning can make small-scale LLMs better guide large-scale LLMs to complete tasks.

No games are played: the run folders hold the validation results.
"""

from collections.abc import Sequence
from pathlib import Path

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.studies.study import pooled_validations, validations


def training_table(folders: Sequence[Path]) -> str:
    """A Markdown table: EM of greedy games of held-out questions, by GRPO step, with 95 % intervals."""
    runs = [read_metrics(folder) for folder in folders]
    rows = []
    for point in pooled_validations(runs):
        by_seed = [f"{validations(run)[int(point.x)]['val/em']:.3f}" for run in runs]
        rows.append([f"{point.x}", f"{point.n}", str(point), *by_seed])
    header = ["validation at step", "n", "all seeds", *(folder.name for folder in folders)]
    return markdown_table(header, rows)
