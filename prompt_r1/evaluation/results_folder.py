"""The results in an evaluation folder.

tables.md       every system and dataset, and the paper's Tables 2 to 5
results.json    means, intervals and costs of each system
"""

import json
from collections.abc import Mapping
from pathlib import Path

from prompt_r1.evaluation.predictions import short_names
from prompt_r1.evaluation.scores import Results, means_of
from prompt_r1.evaluation.tables import datasets_table, paper_tables
from prompt_r1.programs.files import replace_file

TABLES, RESULTS = "tables.md", "results.json"


def write_results(folder: Path, results: Results, trained_with: Mapping[str, str]) -> None:
    """Write tables.md and results.json.

    `trained_with`: agent → the environment of its training.
    """
    means = {}
    for system, name in short_names(results.systems).items():
        means[name] = means_of(results, system, list(results.kinds)).as_json()
    replace_file(folder / RESULTS, (json.dumps(means, indent=1) + "\n").encode())

    parts = [datasets_table(results)]
    if "text" in results.kinds.values() and "ssim" not in results.labels:
        parts.append("SSim was not measured: `--ssim-model DIR` names its encoder.")
    parts += paper_tables(results, trained_with)
    replace_file(folder / TABLES, ("\n\n".join(parts) + "\n").encode())
