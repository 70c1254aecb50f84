"""One sentence about a run: did the agent learn?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

from prompt_r1.foreign import is_finite_number
from prompt_r1.metrics.statistics import mean_interval, wilson

WINDOW = 5  # steps at each end of a curve, where nothing was validated
Columns = Mapping[str, Sequence[float | None]]


def columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The metric lines as one list per metric (None: not in a line), with Wilson intervals of validation."""
    lines = [
        {name: number if is_finite_number(number) else None for name, number in line.items()}
        for line in lines
    ]
    names = sorted({name for line in lines for name in line})
    table = {name: [line.get(name) for line in lines] for name in names}
    for name in ("val/em", "val/format"):
        if name in table and "val/n" in table and f"{name}_low" not in table:
            bounds = [_wilson(line.get(name), line.get("val/n")) for line in lines]
            table[f"{name}_low"] = [low for low, _ in bounds]
            table[f"{name}_high"] = [high for _, high in bounds]
    return table


def _wilson(rate: float | None, n: float | None) -> tuple[float | None, float | None]:
    return wilson(min(round(rate * n), n), int(n)) if rate is not None and n else (None, None)


@dataclass(frozen=True)
class Verdict:
    """What became of a run. `unclear`: nothing was measured, or the difference may be chance."""

    kind: Literal["learned", "lost", "not", "unclear"]
    text: str


@dataclass(frozen=True)
class _Measured:
    """A mean at a step (or over some steps) and its 95 % interval."""

    where: str
    mean: float
    low: float
    high: float
    reward: float = 0.0  # which decides between steps of the same mean, as in the choice of the best agent


def verdict(metrics: Columns) -> Verdict:
    """Judge the columns of metrics.jsonl.

    `learned` means that the 95 % interval of the best validation EM lies above that of the first one, and
    `lost` that the last one fell below the best again. Without validations, the EM of the sampled games of
    the first and the last steps is compared.
    """
    if not any(_known(metrics, "reward/mean")):
        return Verdict("unclear", "No step has been trained yet.")
    name, points = "validation EM", _validations(metrics)
    if len(points) < 2:
        name, points = "EM of the sampled games", _windows(metrics)
    if len(points) < 2:
        return Verdict("unclear", "It is too early to say whether the agent learns.")
    first, last = points[0], points[-1]
    best = max(points[1:], key=lambda point: (point.mean, point.reward))
    change = f"{name} {first.mean:.2f} → {best.mean:.2f} {best.where}"
    if best.low > first.high:
        if last.high < best.low:
            return Verdict(
                "lost", f"Learned, then lost it again: {change}, but {last.mean:.2f} {last.where}."
            )
        return Verdict("learned", f"Learned: {change}.")
    if best.mean == 0 and any(value and value > 0 for value in metrics.get("f1", ())):
        f1 = _known(metrics, "val/f1") or _known(metrics, "f1")
        return Verdict(
            "unclear",
            f"Unclear: no answer equals its gold answer word by word; F1 {f1[0]:.2f} → {f1[-1]:.2f}.",
        )
    if last.high < first.low:
        return Verdict("not", f"Did not learn: {name} fell, {first.mean:.2f} → {last.mean:.2f} {last.where}.")
    if best.mean > first.mean and not _stuck(metrics):
        return Verdict("unclear", f"Unclear: {change}; the difference may be chance.")
    return Verdict(
        "not", f"Did not learn: {name} {first.mean:.2f} → {last.mean:.2f} {last.where}{_reason(metrics)}."
    )


def _validations(metrics: Columns) -> list[_Measured]:
    columns = [metrics.get(name, ()) for name in ("step", "val/em", "val/n")]
    rewards = metrics.get("val/reward") or [None] * len(columns[0])
    points = []
    for step, em, n, reward in zip(*columns, rewards, strict=False):
        if step is not None and em is not None and n:
            interval = wilson(min(round(em * n), int(n)), int(n))
            points.append(_Measured(f"at step {step:.0f} ({n:.0f} questions)", em, *interval, reward or 0.0))
    return points


def _windows(metrics: Columns) -> list[_Measured]:
    """The EM of the first and the last WINDOW trained steps; each step counts as one observation."""
    values = _known(metrics, "em")
    if len(values) < 2 * WINDOW:
        return []
    parts = {"first": values[:WINDOW], "last": values[-WINDOW:]}
    return [
        _Measured(f"in the {name} {WINDOW} steps", mean(part), *mean_interval(part))
        for name, part in parts.items()
    ]


def best_step(metrics: Columns) -> int:
    """The step with the best validation, as the choice of the exported agent; 0 if nothing was validated."""
    rewards = metrics.get("val/reward") or metrics.get("val/em", ())
    steps = zip(metrics.get("step", ()), metrics.get("val/em", ()), rewards, strict=False)
    judged = [(em, reward or 0.0, step) for step, em, reward in steps if step is not None and em is not None]
    return int(max(judged, key=lambda point: point[:2])[2]) if judged else 0


def _known(metrics: Columns, name: str) -> list[float]:
    return [value for value in metrics.get(name, ()) if value is not None]


def _stuck(metrics: Columns) -> bool:
    """Whether no group of the last steps had games with different rewards."""
    values = _known(metrics, "groups/no_spread")[-WINDOW:]
    return bool(values) and min(values) == 1


def _reason(metrics: Columns) -> str:
    """Why nothing could be learned, if that is known."""
    if not _stuck(metrics):
        return ""
    formed = _known(metrics, "format")[-WINDOW:]
    why = "; all games of each question had the same reward, so there was nothing to learn from"
    return f"{why}, because almost no game has the required format" if formed and mean(formed) < 0.05 else why
