"""Sharding (FSDP2): each rank keeps a slice of every weight, of its gradient and of Adam's states.

A block is gathered when the forward or the backward pass comes to it, and dropped after it. So every forward
and every backward of a sharded module is called by all ranks or by none.
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

    The weights that are kept have the module's dtype; gathered ones have `compute`, and gradients are added
    up in float32. A mesh of two dimensions replicates over the first and shards over the second. `offload`:
    what a rank keeps lies in CPU memory, and AdamW steps there.
    """
    kept = next(root.parameters()).dtype
    mixed = MixedPrecisionPolicy(None if kept == compute else compute, reduce_dtype=torch.float32)
    pinned = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    # The root comes last and takes what no block has: embedding, last norm and head, tied or not.
    for module in (*blocks, root):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,  # the root too: no old weights stay gathered after a last forward
            mp_policy=mixed,
            offload_policy=pinned if offload else OffloadPolicy(),
        )
        assert isinstance(module, FSDPModule)  # what `fully_shard` made of it
        # The loss is a weighted sum over all ranks: gradients are added, not averaged (and gloo knows no
        # other way).
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all ranks, called by all of them; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
