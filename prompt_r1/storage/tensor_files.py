"""Weights and Adam's states as safetensors files, each rank its share (torch.distributed.checkpoint).

Plain tensors and the sharded ones of FSDP2 are written alike, and any number of ranks can read the files.
"""

import warnings
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.optim import Optimizer

from prompt_r1.agent.policy import Policy
from prompt_r1.errors import UsageError

FILE_BYTES = 2 * 2**30  # a file is put together in memory before it is written


def write(folder: Path, policy: Policy, optimizer: Optimizer, *, ranks: int) -> None:
    """Write this rank's share. Called by all ranks; raises dcp.CheckpointException on all if one fails."""
    tensors = _tensors(policy, optimizer)
    _hush()
    dcp.save(tensors, storage_writer=_writer(folder, tensors), no_dist=ranks == 1)


def write_later(
    folder: Path, policy: Policy, optimizer: Optimizer, *, group: ProcessGroup | None
) -> "Future[object]":
    """The same, but return when the tensors are copied; the future ends when they are written. `group`: all
    ranks, on the CPU; None for one rank.
    """
    tensors = _tensors(policy, optimizer)
    _hush()
    saved = dcp.async_save(tensors, storage_writer=_writer(folder, tensors), process_group=group)
    assert isinstance(saved, Future)
    return saved


def read(folder: Path, policy: Policy, optimizer: Optimizer, *, ranks: int) -> None:
    """Load what `write` wrote, by any number of ranks. Raises UsageError when the weights are others."""
    weights = {name: weight.detach() for name, weight in policy.named_parameters()}
    reader = HuggingFaceStorageReader(str(folder))
    try:
        saved = reader.read_metadata().state_dict_metadata
    except SafetensorError as error:
        raise UsageError(f"{folder} holds no tensors: {error}") from None
    sizes = {key: entry.size for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    assert sizes.keys() == saved.keys(), "a file of safetensors holds nothing else"
    _check(folder, weights, {key: list(size) for key, size in sizes.items()})
    tensors = {f"weights/{name}": weight for name, weight in weights.items()}
    states: dict[str, dict[str, Tensor]] = {}
    for key in sizes.keys() - tensors.keys():
        _, name, entry = key.split("/")
        like_weight = sizes[key] == weights[name].shape
        tensors[key] = torch.zeros_like(weights[name]) if like_weight else torch.zeros(sizes[key])
        states.setdefault(name, {})[entry] = tensors[key]
    _hush()
    dcp.load(tensors, storage_reader=reader, no_dist=ranks == 1)
    names = {weight: name for name, weight in policy.named_parameters()}
    ordered = [names[weight] for group in optimizer.param_groups for weight in group["params"]]
    numbered = {number: states[name] for number, name in enumerate(ordered) if name in states}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


def _tensors(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """weights/NAME and adam/NAME/ENTRY. Before its first step an optimiser has no states."""
    tensors = {f"weights/{name}": weight.detach() for name, weight in policy.named_parameters()}
    for name, weight in policy.named_parameters():
        states = optimizer.state.get(weight, {})
        tensors |= {f"adam/{name}/{entry}": value for entry, value in states.items()}
    return tensors


def _writer(folder: Path, tensors: dict[str, Tensor]) -> HuggingFaceStorageWriter:
    files, filled = {}, 0
    for name, tensor in tensors.items():
        filled += tensor.numel() * tensor.element_size()
        files[name] = 1 + filled // FILE_BYTES
    return HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)


def _check(folder: Path, weights: dict[str, Tensor], saved: dict[str, list[int]]) -> None:
    """The same weights of the same shapes."""
    there = {key.split("/")[1]: shape for key, shape in saved.items() if key.startswith("weights/")}
    wanted = {name: list(weight.shape) for name, weight in weights.items()}
    for name in [name for name in sorted(there.keys() | wanted) if there.get(name) != wanted.get(name)]:
        shapes = [str(shapes.get(name, "missing")) for shapes in (there, wanted)]
        raise UsageError(f"the weight {name} is {shapes[0]} in {folder} and {shapes[1]} in the agent: "
                         "give the agent that the run began with")  # fmt: skip


def _hush() -> None:
    """DCP warns that a single process is a single process, also from its thread: no context manager helps."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
