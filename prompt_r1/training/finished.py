"""A run that is complete already: the same command says so instead of loading and testing again."""

from dataclasses import replace
from pathlib import Path

from prompt_r1.agent.names import exported_step
from prompt_r1.config.train import TrainConfig
from prompt_r1.config.yaml_files import read_yaml
from prompt_r1.errors import UsageError
from prompt_r1.storage.checkpoint import checkpoints_of
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.training.console import summary

TEST_FILE = "test.md"  # in the run folder: the table of the test, which is played last


def finished_summary(folder: Path, config: TrainConfig) -> str:
    """The summary of a run that these settings have completed; "" if something is left to do.

    Any other setting, such as more steps, is left to the resumed run.
    """
    try:
        stored = TrainConfig(**read_yaml(folder / "config.yaml", TrainConfig))
        lines = read_metrics(folder)
    except (UsageError, OSError, ValueError):
        return ""  # the resumed run reports what is wrong
    same = _values(stored) == _values(replace(config, out=stored.out, resume=stored.resume))
    checkpoints, best = checkpoints_of(folder), exported_step(folder / "agent")
    saved = bool(checkpoints) and checkpoints[-1].name == f"step-{config.steps:06d}"
    logged = bool(lines) and lines[-1]["step"] == config.steps
    tested = not config.test_data or (folder / TEST_FILE).exists()
    if not (same and saved and logged and tested and best >= 0):
        return ""
    done = f"{folder} is finished: step {config.steps} of {config.steps}"
    more = "a larger --steps trains on, and --resume never begins a new run"
    return f"{done}; {more}\n\n{summary(folder, best, config)}"


def _values(config: TrainConfig) -> dict[str, object]:
    """The settings, with tuples for the lists of a command line."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(config).items()}
