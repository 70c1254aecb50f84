"""Paired comparisons of the full method with the others, on the same questions.

Pairs are formed by question, and the datasets have equal weights: the mean difference and its bootstrap
interval (10,000 resamples), which is not corrected for the number of methods.
"""

from collections.abc import Sequence
from math import isfinite

import numpy as np

from prompt_r1.cli.tables import markdown_table
from prompt_r1.evaluation.aggregate import EXTRACTED, REPORTED_METRICS, Results
from prompt_r1.evaluation.predictions import System
from prompt_r1.metrics.statistics import bounds_text, difference_interval, macro_interval

FULL = "prompt-r1"  # the method that the others are compared with
HEADER = ("second", "metric", "n", "first", "second", "difference [95 %]", "verdict")


def compare_systems(results: Results, first: System, second: System, *, metric: str = "") -> Sequence[str]:
    """Compare two systems by a metric, or by the main metric of each dataset's kind; cells below `HEADER`.

    n is the number of questions that both answered, beside that of questions for which a call failed. The
    difference, in points, is significant if its interval excludes 0.
    """
    pairs, asked = {}, 0
    for dataset, kind in results.kinds.items():
        wanted = metric or REPORTED_METRICS[kind][0]
        scores_1, scores_2 = (results.scores(system, dataset, wanted) for system in (first, second))
        both = [(scores_1[name], scores_2[name]) for name in scores_1 if name in scores_2]
        if both:
            pairs[dataset] = np.array(both)  # (n, 2)
            asked += len({one.question.id for one in results.predictions(first, [dataset])})
    if not pairs:
        return "0", "–", "–", "–", "no common question"
    n = sum(map(len, pairs.values()))
    differences = {name: pair[:, 0] - pair[:, 1] for name, pair in pairs.items()}
    low, high = (100 * end for end in macro_interval(differences, difference_interval))
    mean_1, mean_2 = 100 * np.mean([pair.mean(0) for pair in pairs.values()], axis=0)
    if not isfinite(high):
        verdict = "too few questions"
    elif low > 0 or high < 0:
        verdict = "significant"
    else:
        verdict = f"within ±{min(100.0, max(-low, high)):.1f}"
    counted = f"{n} ({asked - n} failed)" if asked > n else str(n)
    difference = f"{mean_1 - mean_2:+.1f} {bounds_text(low, high, '+.1f')}"
    return counted, f"{mean_1:.1f}", f"{mean_2:.1f}", difference, verdict


def comparison_tables(results: Results) -> list[str]:
    """The full method against the other systems of its environment, by main metric and by EM read."""
    texts = []
    for full in (system for system in results.systems if system.method == FULL):
        rivals = [one for one in results.systems if one.method != FULL]
        rivals = [one for one in rivals if one.environment in (full.environment, "")]
        for metric in ("", EXTRACTED):
            metrics = [metric or REPORTED_METRICS[kind][0] for kind in results.kinds.values()]
            label = " and ".join(dict.fromkeys(results.labels.get(name, name) for name in metrics))
            rows = [
                (str(rival), label, *compare_systems(results, full, rival, metric=metric)) for rival in rivals
            ]
            title = f"### {full} (first) against the others (second), all datasets"
            texts += [f"{title}\n\n{markdown_table(HEADER, rows, left=2)}"] if rows else []
    return texts
