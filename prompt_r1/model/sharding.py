"""Weights that are sharded over the ranks (FSDP2).

With `--parallel fsdp` or `hsdp` each rank learns with a shard of the weights, and plays with a whole copy.
After each update `Policy.copy_weights_from` gathers the shards into this copy, one weight at a time.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(
    root: nn.Module,
    layers: Iterable[nn.Module],
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    offload: bool,
) -> None:
    """Shard a module in place over the ranks of `mesh` (FSDP2), on the device of the mesh.

    The weights of a layer are gathered for its forward and its backward, and freed afterwards. Every forward
    and backward is therefore called by all ranks or by none. Shards have the dtype of the module, gathered
    weights have `compute_dtype`, and gradients are summed in float32. With `offload` the shards are in CPU
    memory, where AdamW updates them.
    """
    stored = next(root.parameters()).dtype
    precision = MixedPrecisionPolicy(
        param_dtype=None if stored == compute_dtype else compute_dtype, reduce_dtype=torch.float32
    )
    offload_policy = OffloadPolicy()
    if offload:
        offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    # The root comes last. It gets the weights outside the layers: embedding, last norm, and head.
    for module in (*layers, root):
        sharded = fully_shard(
            module,
            mesh=mesh,
            # Otherwise the root would keep its gathered weights after a forward, and compute its next
            # forward with them, although an update has changed the shards.
            reshard_after_forward=True,
            mp_policy=precision,
            offload_policy=offload_policy,
        )
        # The loss is a weighted sum over all ranks, so gradients are summed, not averaged. Gloo cannot
        # average anyway.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all ranks; return any other tensor unchanged. Called by every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def weight_norm(module: nn.Module) -> float:
    """The norm of all weights of a module; not finite if any weight is not. Called by every rank."""
    return full_tensor(nn.utils.get_total_norm(module.parameters())).item()
