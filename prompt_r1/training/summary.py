"""The last lines of a run: what was learned, where the results are, what to type next."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from prompt_r1.cli.command_line import command
from prompt_r1.config.agent import HELD_OUT, AgentConfig
from prompt_r1.config.functions import OBJECT_PREFIX
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.training.validation import TEST_FILE


def summary(folder: Path, best_step: int, config: AgentConfig) -> str:
    """What was learned, where the results are, and the next commands; all numbers are from metrics.jsonl."""
    lines = read_metrics(folder)

    def total(*names: str) -> float:
        return sum(line.get(name, 0.0) for line in lines for name in names)

    totals = [
        f"{len(lines) - 1} steps",
        f"{total('games'):,.0f} games",
        f"{total('env/calls', 'val/calls'):,.0f} calls of {config.env}",
    ]
    if lines and (usd := lines[-1].get("env/usd")):
        totals.append(f"${usd:,.2f}" if usd >= 1 else f"${usd:.4f}")
    phases = {name for line in lines for name in line if name.startswith("time/")}
    totals.append(_duration(total(*phases)))
    mini = config.env == "mini" and set(config.data) <= {"mini"}
    validated = tuple(name for name in config.val_data if name != HELD_OUT)
    other = ("mini:ood",) if mini else config.test_data or validated or config.data
    # A folder names no code to import, so the user's own objects must be named again.
    own = ["--env", config.env] if OBJECT_PREFIX in config.env else []
    text = [
        "The run",
        *_validation_change(lines, best_step),
        f"  took         {', '.join(totals)}",
        "Where it is",
        f"  {folder}/report.html: curves and games, to open in a browser",
        f"  {folder}/agent: the agent of step {best_step}, a Hugging Face folder",
        f"  {folder}/metrics.jsonl: the curves; trajectories/: every game",
        *([f"  {folder}/{TEST_FILE}: the test by dataset"] if config.test_data else []),
        "What to type next",
        f"  {command('ask', '--agent', folder, *own)}",
        f"  {command('evaluate', '--agent', folder, *own, '--data', *other)}",
    ]
    return "\n".join(text)


def _validation_change(lines: Sequence[Mapping[str, float]], best_step: int) -> list[str]:
    """The first validation and that of the best agent; nothing if they are the same."""
    validated = {int(line["step"]): line for line in lines if "val/em" in line}
    if len(validated) < 2 or best_step not in validated:
        return []
    first, best = validated[min(validated)], validated[best_step]
    metrics = {"EM": "val/em", "reward": "val/reward", "format": "val/format"}
    changes = "   ".join(f"{label} {first[name]:.3f} → {best[name]:.3f}" for label, name in metrics.items())
    return [
        f"  validation   {changes}",
        f"               from step {min(validated)} to step {best_step}, the best",
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
