"""Optional trackers: metrics in TensorBoard or Weights & Biases. The packages are imported on use."""

import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prompt_r1.errors import UsageError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from wandb import Run


class Tracker(Protocol):
    """Receives each line of metrics.jsonl."""

    def add(self, metrics: dict[str, float]) -> None:
        """Record the metrics of one step."""

    def close(self) -> None:
        """Flush and close."""


def make_tracker(name: str, folder: Path) -> Tracker | None:
    """Make the tracker called none, tensorboard or wandb. Raises UsageError if its package is missing."""
    if name == "none":
        return None
    if find_spec(name) is None:
        raise UsageError(
            f"--track {name}: the package is not installed; `pip install {name}`, or omit --track: "
            "metrics.jsonl has the same numbers"
        )
    return TensorBoard(folder) if name == "tensorboard" else WeightsAndBiases(folder)


class TensorBoard:
    """Event files in the run folder's tensorboard/. A resumed run replaces the steps that it trains again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: SummaryWriter | None = None

    def add(self, metrics: dict[str, float]) -> None:
        """Write one scalar per metric."""
        step = int(metrics["step"])
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of the project prompt-r1 in the account that is logged in (none with WANDB_MODE=offline).

    The id of the run is stored in the run folder, so that a resumed training continues the same W&B run.
    Steps that W&B already has are not overwritten.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Run | None = None

    def add(self, metrics: dict[str, float]) -> None:
        """Log one step to the history of the run."""
        if self._run is None:
            self._run = self._open()
        self._run.log(metrics, step=int(metrics["step"]))

    def _open(self) -> "Run":
        import wandb

        file = self._folder / "wandb" / "run-id"
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_text(uuid.uuid4().hex, "utf-8")
        try:
            return wandb.init(
                project="prompt-r1",
                name=self._folder.name,
                dir=str(self._folder),
                id=file.read_text("utf-8").strip(),
                resume="allow",
            )
        except wandb.Error as error:
            raise UsageError(f"--track wandb: {error}; log in, or set WANDB_MODE=offline") from None

    def close(self) -> None:
        """Upload what is left and finish the run."""
        if self._run is not None:
            self._run.finish()
