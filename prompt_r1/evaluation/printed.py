"""The results of an evaluation as evaluate.py prints them: a row for each method, fitted to the terminal."""

from collections.abc import Mapping, Sequence

from prompt_r1.cli.fitted_table import fitted_table
from prompt_r1.evaluation.aggregate import Rate, Results
from prompt_r1.evaluation.comparison import Comparison, p_text
from prompt_r1.evaluation.predictions import System


def printed_results(
    results: Results, names: Mapping[System, str], means: Mapping[str, Mapping[str, float]]
) -> str:
    """A row for each system, over all datasets; `means` by name. Columns without any value are left out."""
    rows = []
    for system, name in names.items():
        own = means[name]
        rates = [results.pooled(system, list(results.kinds), metric) for metric in results.labels]
        texts = [_rate_text(rates[0]), *("" if rate is None else f"{rate.mean:.3f}" for rate in rates[1:])]
        plain = [f"{own[key]:.2f}" if key in own else "" for key in ("format", "turns", "calls")]
        tokens = own.get("tokens_in", 0.0) + own.get("tokens_out", 0.0)
        usd = own.get("usd", 0.0)
        errors = f"{own['errors']:.0f}" if own["errors"] else ""
        spent = [f"{tokens:,.0f}" if tokens else "", f"{usd:.2g}" if usd else ""]
        rows.append([name, f"{own['n']:.0f}", errors, *texts, *plain, *spent])
    header = ["method", "n", "errors", *results.labels.values(), "format", "turns", "calls", "tokens", "$"]
    kept = [place for place in range(len(header)) if any(row[place] for row in rows)]
    table = [[row[place] for place in kept] for row in (header, *rows)]
    return fitted_table(table[0], table[1:], drop=["SM", "tokens", "turns", "format", "n", "F1", "SSim"])


def printed_comparisons(full: System, pooled: Sequence[Comparison]) -> str:
    """The difference of a system to each other one, in points; `dataset` of each names the other system."""
    rows = []
    for one in pooled:
        rows.append([one.dataset, str(one.n), one.points, p_text(one.corrected_p), one.verdict])
    header = [f"{full} against", "n", "points [95 %]", "p", "verdict"]
    return fitted_table(header, rows, drop=["n", "p"])


def printed_pair(comparisons: Sequence[Comparison], label: str) -> str:
    """The differences of system A to system B by one metric: a row for each dataset, and the pooled one."""
    rows = []
    for one in comparisons:
        rates = [f"{100 * one.first:.1f}", f"{100 * one.second:.1f}"]
        p = p_text(one.corrected_p)
        rows.append([one.dataset, one.questions, *rates, one.points, p, one.short_verdict])
    header = [label, "n", "A", "B", "A - B [95 %]", "p", "verdict"]
    return fitted_table(header, rows, drop=["p", "n"])


def _rate_text(rate: Rate | None) -> str:
    return "" if rate is None else f"{rate.mean:.3f} [{rate.low:.2f}, {rate.high:.2f}]"
