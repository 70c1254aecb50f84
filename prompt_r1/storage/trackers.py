"""Metrics in TensorBoard or Weights & Biases."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from prompt_r1.errors import UsageError


@dataclass(frozen=True)
class Tracker:
    """An open tracker: `add` records a line of metrics.jsonl, `close` writes what is left."""

    add: Callable[[dict[str, float]], object]
    close: Callable[[], object]


def check_tracker(name: str) -> None:
    """Raise UsageError if the package of the tracker none, tensorboard or wandb is missing."""
    if name != "none" and find_spec(name) is None:
        raise UsageError(
            f"--track {name}: the package is not installed; `pip install {name}`, or omit --track: "
            "metrics.jsonl has the same numbers"
        )


def open_tracker(name: str, folder: Path, step: int) -> Tracker:
    """Open the tracker tensorboard or wandb of a run folder, before the line of `step` is added."""
    return _open_tensorboard(folder, step) if name == "tensorboard" else _open_wandb(folder)


def _open_tensorboard(folder: Path, step: int) -> Tracker:
    """Event files in tensorboard/. A resumed run replaces the steps that it trains again."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def add(metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, int(metrics["step"]))

    return Tracker(add, writer.close)


def _open_wandb(folder: Path) -> Tracker:
    """A run of the project prompt-r1 in the account that is logged in (none with WANDB_MODE=offline).

    The id of the run is stored in the run folder, so that a resumed training continues the same W&B run.
    Steps that W&B already has are not overwritten.
    """
    import wandb

    file = folder / "wandb" / "run-id"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(uuid.uuid4().hex, "utf-8")
    identity = file.read_text("utf-8").strip()
    try:
        run = wandb.init(project="prompt-r1", name=folder.name, dir=str(folder), id=identity, resume="allow")
    except wandb.Error as error:
        raise UsageError(f"--track wandb: {error}; log in, or set WANDB_MODE=offline") from None
    return Tracker(lambda metrics: run.log(metrics, step=int(metrics["step"])), run.finish)
