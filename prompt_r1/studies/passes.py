"""`studies passes FOLDER …`: pass@k by kind of question.

FOLDER is of `evaluate.py --temperature 1 --repeats N --out FOLDER`, one for each seed. Where the trained
agent's pass@1 is below the pass@k of the untrained one, training chose among what that could do (Yue et al.
2025, arXiv 2504.13837).
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from prompt_r1.cli.command_line import program_name
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import read_predictions
from prompt_r1.metrics.em_f1 import exact_match
from prompt_r1.metrics.statistics import pass_at_k

KS = (1, 5, 32)


def table(folders: Sequence[Path]) -> str:
    """A row for each kind and method, over all folders. Raises UsageError for too few answers."""
    # method, kind → folder, question → whether each of its answers is right
    right: dict[tuple[str, str], dict[tuple[Path, str], list[bool]]] = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        for one in read_predictions(folder / "predictions.jsonl"):
            if one.error:
                continue
            exact = exact_match(one.answer or "", one.question.answers) == 1
            for kind in (one.question.dataset, "all"):
                right[one.system.method, kind][folder, one.question.id].append(exact)
    fewest = min((len(answers) for questions in right.values() for answers in questions.values()), default=0)
    ks = [k for k in KS if k <= fewest]
    if len(ks) < 2:
        raise UsageError(
            f"{folders[0]}: {fewest} answers to a question: evaluate with --temperature 1 --repeats 32"
        )
    rows = []
    for (method, kind), questions in sorted(
        right.items(), key=lambda row: (row[0][1], row[0][0] == "prompt-r1")
    ):
        means = [fmean(pass_at_k(len(a), sum(a), k) for a in questions.values()) for k in ks]
        rows.append([kind, method, *(f"{mean:.3f}" for mean in means)])
    return markdown_table(["kind", "method", *(f"pass@{k}" for k in ks)], rows, left=2)


def main(arguments: list[str]) -> None:
    """Print the table from a command line."""
    name = program_name("python -m prompt_r1.studies")
    parser = argparse.ArgumentParser(f"{name} passes", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="+", help="of evaluate.py --temperature 1 --repeats N --out FOLDER"
    )
    print(table(parser.parse_args(arguments).folder))
