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

from prompt_r1.errors import Resumable, UsageError, first_line
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.policy import Policy
from prompt_r1.programs import files
from prompt_r1.programs.files import json_object
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.settings.fields import write_yaml
from prompt_r1.training.run_folder import FORMAT, check_settings, checkpoints_of

KEPT = 2  # newest checkpoints, beside the best one
FILE_BYTES = 2**27  # DCP builds a whole file in memory before it writes it


@dataclass
class State:
    """The state of a run besides weights and optimiser."""

    trained_step: int = 0  # the last step whose update is in the weights
    logged_step: int = -1  # the last step whose metrics are in metrics.jsonl
    # The metrics of `trained_step`, while they are not in metrics.jsonl.
    unlogged_metrics: dict[str, float] = field(default_factory=dict)
    best_step: int = -1
    best_em: float = -1.0
    best_reward: float = 0.0
    questions: str = ""  # digest of the training questions
    format: int = FORMAT


def save_checkpoint(
    run: Path, state: State, policy: Policy, optimizer: Optimizer, config: AgentConfig, ranks: Ranks
) -> None:
    """Write the checkpoint of `state.trained_step` in files of about FILE_BYTES, and remove old ones.

    Called by every rank, which writes its share. Raises Resumable if that fails.
    """
    folder = run / "checkpoints" / f"step-{state.trained_step:06d}"
    tensors, file_of, size = tensors_of(policy, optimizer), {}, 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        file_of[name] = 1 + size // FILE_BYTES

    def finish() -> None:
        (temporary / "state.json").write_text(json.dumps(asdict(state)), "utf-8")
        write_yaml(config, temporary / "config.yaml")
        files.seal(temporary, folder)
        for old in checkpoints_of(run)[:-KEPT]:
            if old.name != f"step-{state.best_step:06d}":
                shutil.rmtree(old)

    with resumable_writes(folder, ranks):
        temporary = ranks.from_first(lambda: files.new_temporary(folder))
        writer = HuggingFaceStorageWriter(str(temporary), fqn_to_index_mapping=file_of, save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=ranks.count == 1)
        ranks.from_first(finish)


def newest_checkpoint(run: Path, *, say: Callable[[str], None]) -> Path | None:
    """The newest valid checkpoint, or None if there is no checkpoint at all. For rank 0 alone.

    Reports each damaged checkpoint that it skips. Raises UsageError if all are damaged.
    """
    for parent in (run, run / "checkpoints"):
        files.remove_leftovers(parent)
    found = checkpoints_of(run)
    for folder in reversed(found):
        damage = files.find_damage(folder)
        if not damage:
            return folder
        say(f"Skipping {folder}: {damage}")
    if found:
        raise UsageError(
            f"none of the {len(found)} checkpoints in {run}/checkpoints is valid: repair them, or start a "
            "new run with another --out"
        )
    return None


def load_checkpoint(
    folder: Path, policy: Policy, optimizer: Optimizer, config: AgentConfig, ranks: Ranks
) -> State:
    """Load a checkpoint into policy and optimiser. Called by every rank.

    Raises UsageError if a setting that identifies the run differs, or the checkpoint's version.
    """
    check_settings(folder, config)
    tensors, reader = tensors_of(policy, optimizer), HuggingFaceStorageReader(str(folder))
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=ranks.count == 1)  # in place
    except (SafetensorError, LookupError, ValueError, TypeError, dcp.CheckpointException) as error:
        raise UsageError(
            f"{folder} does not fit the agent ({first_line(_cause(error))}): give the agent that the run "
            "started from"
        ) from None
    return State(**json_object((folder / "state.json").read_text("utf-8")))


def tensors_of(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors to save: weights/NAME and adam/NAME/ENTRY, of the weights that learn.

    Frozen weights are those of the untrained agent.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    begin_states(optimizer)
    tensors = {}
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            tensors[f"weights/{name}"] = weight.detach()
            tensors |= {f"adam/{name}/{entry}": value for entry, value in optimizer.state[weight].items()}
    return tensors


def begin_states(optimizer: Optimizer) -> None:
    """Give Adam the states that its first step would begin with, so that others can be loaded into them.

    Keeps those that it has. PyTorch's `get_state_dict` would take an empty step instead, which changes Adam's
    bias correction.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight not in optimizer.state:
                step = torch.zeros((), device=weight.device if group["fused"] else "cpu")
                moments = {name: torch.zeros_like(weight.detach()) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[weight] = {"step": step, **moments}


@contextmanager
def resumable_writes(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Raise Resumable if a folder cannot be written, and free the room that its part takes."""
    try:
        yield
    except (OSError, SafetensorError, dcp.CheckpointException) as error:
        if ranks.first:
            files.remove_leftovers(folder.parent)
        cause = _cause(error)
        raise Resumable(
            f"{folder} could not be written: {getattr(cause, 'strerror', None) or first_line(cause)}: "
            "make room, and the same command goes on from the last checkpoint, if there is one"
        ) from None


def _cause(error: BaseException) -> BaseException:
    """The error of the rank where DCP failed."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error
