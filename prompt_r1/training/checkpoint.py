"""Save a run, and load it again bit for bit.

A checkpoint is a folder such as `checkpoints/step-000040/`. It holds the weights that learn and Adam's states
(safetensors files, written by torch.distributed.checkpoint), `state.json` and `config.yaml`. Its last file,
`manifest.json`, lists the others with their sizes; a folder that does not match its list is skipped.

Nothing else has to be saved. Sampling and the order of questions are seeded by (seed, step, number of the
game), so there is no random state; the journal has the spending; the alarms follow from metrics.jsonl.

Each rank writes its share of sharded weights. Any number of ranks can read the files.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
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
from prompt_r1.programs.folders import begin_folder, complete_folder, remove_leftovers, write_manifest
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.settings.fields import write_yaml
from prompt_r1.training.best import Candidate
from prompt_r1.training.run_folder import FORMAT, checkpoint_of, checkpoints_of, step_of

KEEP_CHECKPOINTS = 2  # how many of the newest checkpoints are kept, beside the best one
# A file of tensors has about this many bytes. DCP builds a whole file in memory before it writes it.
FILE_BYTES = 2**27
# What torch and safetensors raise for files that do not hold the tensors of this agent.
NOT_THESE_TENSORS = (SafetensorError, LookupError, ValueError, TypeError, dcp.CheckpointException)


@dataclass(frozen=True)
class State:
    """The state of a run besides weights and optimiser, as state.json holds it."""

    # The metrics of the last step whose update is in the weights. A resumed run writes this line of
    # metrics.jsonl again. The metrics of a validation are missing if it was interrupted.
    metrics: dict[str, float] = field(default_factory=lambda: {"step": 0})
    best: Candidate | None = None  # the best agent so far
    questions: str = ""  # digest of the training questions
    validation: str = ""  # digest of the validation questions
    start: str = ""  # digest of the agent that the run started from
    format: int = FORMAT

    @property
    def trained_step(self) -> int:
        """The last step whose update is in the weights."""
        return int(self.metrics["step"])

    @property
    def is_validated(self) -> bool:
        """Whether the agent of this step was validated."""
        return "val/n" in self.metrics


def save_checkpoint(
    run: Path, state: State, policy: Policy, optimizer: Optimizer, config: AgentConfig, ranks: Ranks
) -> None:
    """Write the checkpoint of `state.trained_step`, and remove old ones.

    Each rank writes its share. If one rank fails, every rank raises Resumable.
    """
    folder = checkpoint_of(run, state.trained_step)
    tensors = tensors_of(policy, optimizer)
    with resumable_writes(folder, ranks):
        temporary = ranks.on_first_rank(lambda: begin_folder(folder))
        writer = HuggingFaceStorageWriter(
            str(temporary), fqn_to_index_mapping=_file_numbers(tensors, ranks), save_distributed=True
        )
        with _no_warning_of_one_process():
            dcp.save(tensors, storage_writer=writer)

        def finish() -> None:
            (temporary / "state.json").write_text(json.dumps(asdict(state)), "utf-8")
            write_yaml(config, temporary / "config.yaml")
            write_manifest(temporary)
            complete_folder(folder)
            _remove_old(run, best=state.best)

        ranks.on_first_rank(finish)


def _file_numbers(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, int]:
    """Return the file number of each tensor, from 1. A file has about FILE_BYTES.

    If tensors are sharded, each rank writes a file of its own for each file number. `nbytes` counts the
    shards of all ranks, so FILE_BYTES is multiplied by the number of ranks.
    """
    writers = 1 if ranks.mesh is None else ranks.count
    numbers = {}
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        numbers[name] = 1 + size // (FILE_BYTES * writers)
    return numbers


def _remove_old(run: Path, *, best: Candidate | None) -> None:
    """Remove all checkpoints but the KEEP_CHECKPOINTS newest ones and the one of the best agent."""
    for checkpoint in checkpoints_of(run)[:-KEEP_CHECKPOINTS]:
        if best is None or step_of(checkpoint) != best.step:
            shutil.rmtree(checkpoint)


def read_state(checkpoint: Path) -> State:
    """Read the state of a checkpoint."""
    values = json.loads((checkpoint / "state.json").read_text("utf-8"))
    best = values.pop("best")
    return State(**values, best=None if best is None else Candidate(**best))


def load_tensors(checkpoint: Path, policy: Policy, optimizer: Optimizer) -> None:
    """Load the tensors of a checkpoint into policy and optimizer, in place.

    The checkpoint must be from a run with the same settings and the same start, so that it has the same
    tensors. Raises UsageError if its files do not hold them.
    """
    tensors = tensors_of(policy, optimizer)
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        with _no_warning_of_one_process():
            dcp.load(tensors, storage_reader=reader)
    except NOT_THESE_TENSORS as error:
        reason = first_line(_cause(error))
        raise UsageError(
            f"{checkpoint} cannot be loaded ({reason}): remove this checkpoint, and the run resumes from the "
            "one before"
        ) from None


def tensors_of(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, not copied: weights/NAME and adam/NAME/ENTRY of trained weights.

    Frozen weights are left out, because the agent that the run started from has them.
    """
    tensors = {}
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            assert optimizer.state[weight], f"{name} has no Adam state: call begin_states"
            tensors[f"weights/{name}"] = weight.detach()
            for entry, value in optimizer.state[weight].items():
                tensors[f"adam/{name}/{entry}"] = value
    return tensors


def begin_states(optimizer: Optimizer) -> None:
    """Give Adam its states before its first step: zeros, the same that Adam makes in its first step.

    They must exist before the first step, for two reasons: the KV cache takes a share of the memory that they
    leave free, and a checkpoint is loaded into them. torch's `get_optimizer_state_dict` would make them by an
    empty step, but Adam's bias correction would count this step.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            # Unless Adam is fused, torch keeps the number of the step on the CPU.
            device = weight.device if group["fused"] else torch.device("cpu")
            optimizer.state[weight] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(weight.detach()),
                "exp_avg_sq": torch.zeros_like(weight.detach()),
            }


@contextmanager
def resumable_writes(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Raise Resumable if a folder cannot be written, and remove the part that was written.

    It exchanges no data, so a single rank may enter it.
    """
    try:
        yield
    except (OSError, SafetensorError, dcp.CheckpointException) as error:
        if ranks.is_first:
            remove_leftovers(folder.parent)
        cause = _cause(error)
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else first_line(cause)
        raise Resumable(
            f"{folder} could not be written: {reason}: make room, and the same command goes on from the last "
            "checkpoint, if there is one"
        ) from None


@contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    """Silence DCP, which warns in every call that without a process group it saves or loads alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _cause(error: BaseException) -> BaseException:
    """The error on the first rank that failed in DCP; any other error as it is."""
    if isinstance(error, dcp.CheckpointException):
        failures = list(error.failures.values())
        exception, _traceback = failures[0]
        return exception
    return error
