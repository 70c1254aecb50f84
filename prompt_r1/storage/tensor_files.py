"""Weights and Adam's states as safetensors files (torch.distributed.checkpoint).

Frozen weights, beside adapters, are not written.

Each rank writes its share. Plain tensors and the sharded ones of FSDP2 have the same format, so that any
number of ranks can read the files.
"""

import hashlib
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.optim import Optimizer

from prompt_r1.agent.policy import Policy
from prompt_r1.errors import UsageError, first_line

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's states of the shape of a weight
FILE_BYTES = 2 * 2**30  # DCP builds a whole file in memory before it writes it


def tensors_of(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors to save: weights/NAME and adam/NAME/ENTRY; before its first step an optimiser has none."""
    tensors = {f"weights/{name}": weight for name, weight in _trained(policy).items()}
    for name, weight in policy.named_parameters():
        states = optimizer.state.get(weight, {})
        tensors |= {f"adam/{name}/{entry}": value for entry, value in states.items()}
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], *, ranks: int) -> None:
    """Write this rank's share. Called by every rank. Raises dcp.CheckpointException on all if one fails."""
    _ignore_single_process_warning()
    dcp.save(tensors, storage_writer=_writer(folder, tensors), no_dist=ranks == 1)


def read(folder: Path, policy: Policy, optimizer: Optimizer, *, ranks: int, tensors: int) -> None:
    """Load the `tensors` tensors that `write` wrote on any number of ranks. Called by every rank.

    Raises UsageError if their number, names, shapes or dtypes are not those that `write` would write.
    """
    weights = _trained(policy)
    reader = HuggingFaceStorageReader(str(folder))
    saved = _described_tensors(folder, reader)
    if len(saved) != tensors:
        raise UsageError(f"{folder} has {len(saved)} tensors, not the {tensors} that were saved")
    loaded = {f"weights/{name}": weight for name, weight in weights.items()}
    states: dict[str, dict[str, Tensor]] = {}  # Adam's, by weight
    for name, weight in weights.items():
        moments = {entry: torch.zeros_like(weight) for entry in MOMENTS}  # sharded like the weight
        state = {**moments, "step": torch.zeros(())}
        keys = {f"adam/{name}/{entry}": tensor for entry, tensor in state.items()}
        if not saved.keys().isdisjoint(keys):  # a weight that never had a gradient has no state
            loaded |= keys
            states[name] = state
    _check_tensors(folder, loaded, saved)
    _ignore_single_process_warning()
    dcp.load(loaded, storage_reader=reader, no_dist=ranks == 1)
    # An optimiser numbers its weights in the order of its groups.
    names = {weight: name for name, weight in policy.named_parameters()}
    ordered = [names[weight] for group in optimizer.param_groups for weight in group["params"]]
    numbered = {number: states[name] for number, name in enumerate(ordered) if name in states}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


@torch.no_grad()
def frozen_digest(policy: Policy) -> str:
    """A digest of the weights that do not learn; "" if all learn.

    It sums the bits of each weight in bfloat16, which is quick on the weights' own device, and the same
    whether they are computed in 16 or 32 bits.
    """
    frozen = {name: weight for name, weight in policy.named_parameters() if not weight.requires_grad}
    if not frozen:
        return ""
    sums = [weight.bfloat16().view(torch.int16).sum(dtype=torch.int64) for weight in frozen.values()]
    return hashlib.sha256(repr((list(frozen), torch.stack(sums).tolist())).encode()).hexdigest()


def _described_tensors(folder: Path, reader: HuggingFaceStorageReader) -> dict[str, str]:
    """Shape and dtype of each tensor in the files. Raises UsageError if they are not safetensors files."""
    try:
        saved = reader.read_metadata().state_dict_metadata
    except (SafetensorError, LookupError, ValueError, TypeError) as error:
        raise UsageError(f"{folder} holds no tensors: {first_line(error)}") from None
    tensors = {key: entry for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    assert tensors.keys() == saved.keys(), "a safetensors file holds only tensors"
    return {key: _describe(entry.size, entry.properties.dtype) for key, entry in tensors.items()}


def _describe(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(size)} of {str(dtype).removeprefix('torch.')}"


def _trained(policy: Policy) -> dict[str, Tensor]:
    """The weights that learn, by name: frozen ones are those of the untrained agent."""
    return {name: weight.detach() for name, weight in policy.named_parameters() if weight.requires_grad}


def _writer(folder: Path, tensors: dict[str, Tensor]) -> HuggingFaceStorageWriter:
    """A writer that divides the tensors into files of about FILE_BYTES."""
    files, filled = {}, 0
    for name, tensor in tensors.items():
        filled += tensor.numel() * tensor.element_size()
        files[name] = 1 + filled // FILE_BYTES
    return HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)


def _check_tensors(folder: Path, tensors: dict[str, Tensor], saved: dict[str, str]) -> None:
    """Raise UsageError if the files hold other tensors, shapes or dtypes than those to be loaded."""
    wanted = {key: _describe(tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
    for key in [*wanted, *sorted(saved.keys() - wanted.keys())]:
        if saved.get(key) != wanted.get(key):
            name = key.removeprefix("weights/")
            raise UsageError(
                f"{name[:80]} is {saved.get(key, 'missing')} in {folder} and "
                f"{wanted.get(key, 'missing')} in the agent: give the agent that the run started from"
            )


def _ignore_single_process_warning() -> None:
    """Ignore DCP's warning that there is only one process."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
