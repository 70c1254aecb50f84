"""Sharding of weights, gradients and Adam's states with FSDP2.

The weights of a block are gathered for its forward and its backward pass, and freed afterwards. Therefore
every forward and every backward of a sharded module is called by all ranks or by none.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor


def shard(
    root: nn.Module, blocks: Iterable[nn.Module], *, mesh: DeviceMesh, compute: torch.dtype, offload: bool
) -> None:
    """Shard a module in place over the ranks of `mesh`, on the device of the mesh.

    Shards have the dtype of the module, gathered weights have `compute`, and gradients are summed in float32.
    A mesh of two dimensions replicates over the first and shards over the second. With `offload` the shards
    are in CPU memory, where AdamW updates them.
    """
    stored = next(root.parameters()).dtype
    mixed = MixedPrecisionPolicy(None if stored == compute else compute, reduce_dtype=torch.float32)
    pinned = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    # The root comes last and gets the weights outside the blocks: embedding, last norm and head, tied or not.
    for module in (*blocks, root):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,  # the root too, so that no stale weights stay gathered
            mp_policy=mixed,
            offload_policy=pinned if offload else OffloadPolicy(),
        )
        assert isinstance(module, FSDPModule)  # by `fully_shard`
        # The loss is a weighted sum over all ranks, so gradients are summed, not averaged; and gloo
        # supports no averages.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def sum_over_nodes(root: nn.Module, *, wanted: bool) -> None:
    """Choose whether the next backward sums the gradients over the nodes; otherwise each node keeps its sum.

    Only a module that is sharded over a mesh of two dimensions sums over nodes. Weights in CPU memory always
    do: FSDP2 would keep the nodes' sums on the GPU.
    """
    weight = next(root.parameters())
    if isinstance(root, FSDPModule) and isinstance(weight, DTensor):
        root.set_requires_all_reduce(wanted or weight.device.type != weight.device_mesh.device_type)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all ranks; return any other as it is. Called by every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
