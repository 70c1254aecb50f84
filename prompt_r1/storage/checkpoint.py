"""Save and resume a run bit for bit.

`checkpoints/step-000040/` holds the weights that learn and Adam's states (safetensors files, written by
torch.distributed.checkpoint), `state.json`, `config.yaml` and the checksums; a folder without valid checksums
is ignored. Nothing else needs to be saved: sampling and the order of questions are seeded by (seed, step,
number of the game), so there is no random state; spending is in the journal; the state of the alarms follows
from the metric lines.

Each rank writes its share of sharded weights. Any number of ranks can read the files.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.optim import Optimizer

from prompt_r1.agent.policy import Policy
from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.fields import identifying_values, read_mapping, write_yaml
from prompt_r1.distributed import Ranks
from prompt_r1.errors import Resumable, UsageError, first_line
from prompt_r1.foreign import json_object
from prompt_r1.storage import atomic_folder
from prompt_r1.storage.run_folder import checkpoints_of, step_of

FORMAT = 3  # of checkpoints: increased with every change of state.json, of the tensors or the settings
KEPT = 2  # newest checkpoints, beside the best one
FILE_BYTES = 2**27  # DCP builds a whole file in memory before it writes it


@dataclass
class State:
    """The state of a run besides weights and optimiser."""

    step: int = 0  # the last one whose update is in the weights
    line: dict[str, float] = field(default_factory=dict)  # metrics of `step` that are not logged yet
    best_step: int = -1
    best_em: float = -1.0
    best_reward: float = 0.0
    questions: str = ""  # digest of the training questions


class Checkpoints:
    """The checkpoints of a run. `save` and `load` are called by every rank or by none."""

    def __init__(
        self,
        run: Path,
        policy: Policy,
        optimizer: Optimizer,
        config: AgentConfig,
        ranks: Ranks,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.folder = run / "checkpoints"
        self._policy, self._optimizer = policy, optimizer
        self._config, self._ranks = config, ranks
        self._say = say
        self._saved_state = ""  # state.json of the checkpoint that was written or loaded last
        _begin_states(optimizer)
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")

    def save(self, state: State) -> None:
        """Write the checkpoint of `state.step`, and remove old ones. Raises Resumable if that fails."""
        folder = self.folder / f"step-{state.step:06d}"
        text = json.dumps({"format": FORMAT, **asdict(state)})
        if text == self._saved_state:
            return

        def finish() -> None:
            (temporary / "state.json").write_text(text, "utf-8")
            write_yaml(self._config, temporary / "config.yaml")
            atomic_folder.seal(temporary, folder)
            for old in checkpoints_of(self.folder.parent)[:-KEPT]:
                if step_of(old) != state.best_step:
                    shutil.rmtree(old)

        with resumable_writes(folder, self._ranks, then="resumes from the checkpoint before it"):
            temporary = self._ranks.from_first(lambda: atomic_folder.new_temporary(folder))
            self._write_tensors(temporary)
            self._ranks.from_first(finish)
        self._saved_state = text

    def _write_tensors(self, folder: Path) -> None:
        """Write this rank's share, in files of about FILE_BYTES."""
        tensors, files, size = tensors_of(self._policy, self._optimizer), {}, 0
        for name, tensor in tensors.items():
            size += tensor.nbytes
            files[name] = 1 + size // FILE_BYTES
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=self._ranks.count == 1)

    def newest(self) -> Path | None:
        """The newest valid checkpoint, or None if there is no checkpoint at all.

        Reports each damaged checkpoint that it skips. Raises UsageError if all are damaged. For rank 0 alone.
        """
        atomic_folder.remove_leftovers(self.folder)
        found = checkpoints_of(self.folder.parent)
        for folder in reversed(found):
            damage = atomic_folder.find_damage(folder)
            if not damage:
                return folder
            self._say(f"Skipping {folder}: {damage}")
        if found:
            raise UsageError(
                f"none of the {len(found)} checkpoints in {self.folder} is valid: repair them, or start a "
                "new run with another --out"
            )
        return None

    def load(self, folder: Path) -> State:
        """Load a checkpoint into policy and optimiser.

        Raises UsageError if a setting that identifies the run differs, or the checkpoint's version.
        """
        text = (folder / "state.json").read_text("utf-8")
        values = json_object(text)
        if values.pop("format", None) != FORMAT:
            raise UsageError(
                f"{folder} was written by another version: its agent can play, but its training cannot be "
                "resumed; start a new run with another --out"
            )
        _check_settings(folder, self._config)
        tensors, reader = tensors_of(self._policy, self._optimizer), HuggingFaceStorageReader(str(folder))
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=self._ranks.count == 1)  # in place
        except (SafetensorError, LookupError, ValueError, TypeError, dcp.CheckpointException) as error:
            raise UsageError(
                f"{folder} does not fit the agent ({first_line(_cause(error))}): give the agent that the run "
                "started from"
            ) from None
        self._saved_state = text
        return State(**values)


def tensors_of(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors to save: weights/NAME and adam/NAME/ENTRY, of the weights that learn.

    Frozen weights are those of the untrained agent.
    """
    tensors = {}
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            tensors[f"weights/{name}"] = weight.detach()
            tensors |= {f"adam/{name}/{entry}": value for entry, value in optimizer.state[weight].items()}
    return tensors


def _begin_states(optimizer: Optimizer) -> None:
    """Give Adam the states that its first step would begin with, so that others can be loaded into them.

    PyTorch's `get_state_dict` would take an empty step instead, which changes Adam's bias correction.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            step = torch.zeros((), device=weight.device if group["fused"] else "cpu")
            moments = {name: torch.zeros_like(weight.detach()) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[weight] = {"step": step, **moments}


@contextmanager
def resumable_writes(folder: Path, ranks: Ranks, *, then: str) -> Iterator[None]:
    """Raise Resumable if a folder cannot be written, and free the room that its part takes.

    `then`: what the same command does when there is room.
    """
    try:
        yield
    except (OSError, SafetensorError, dcp.CheckpointException) as error:
        if ranks.first:
            atomic_folder.remove_leftovers(folder.parent)
        cause = _cause(error)
        raise Resumable(
            f"{folder} could not be written: {getattr(cause, 'strerror', None) or first_line(cause)}: "
            f"make room, and the same command {then}"
        ) from None


def _cause(error: BaseException) -> BaseException:
    """The error of the rank where DCP failed."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def _check_settings(folder: Path, config: AgentConfig) -> None:
    """Raise UsageError if a setting that identifies the run differs from the checkpoint's.

    Other settings may differ: a run may be resumed with more steps or on another machine.
    """
    before = read_mapping(folder / "config.yaml")
    for name, now in identifying_values(config).items():
        now = list(now) if isinstance(now, tuple) else now
        if before.get(name) != now:
            raise UsageError(
                f"{folder} was made with {name} = {before.get(name)!r}, not {now!r}: "
                "resume with the same value, or start a new run with another --out"
            )
