"""Low-rank adapters (LoRA, Hu et al. 2022) on linear layers.

    y = W x + (alpha / rank) · B A x        W frozen, A (rank, in) and B (out, rank) trained in float32

While the agent plays and learns, the product is not merged into W, because 16-bit weights would round small
changes away. Only linear layers get adapters. Embeddings, norms, and experts that are stored as one tensor
stay unchanged.

This file replaces peft, which is a larger dependency.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from prompt_r1.errors import UsageError

ADAPTER_ALPHA = 32.0


class LoRA(nn.Module):
    """A frozen linear layer and its adapter. B starts at zero, so the output is W x before training."""

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        a = torch.empty(rank, base.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        self.a = nn.Parameter(a.to(base.weight.device))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.base(x)
        adapter = F.linear(self.scale * F.linear(x, self.a), self.b)
        return frozen + adapter

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W' = W + (alpha / rank) B A, in float32."""
        return self.base.weight.float() + self.scale * self.b @ self.a


def add_lora(model: PreTrainedModel, *, rank: int, alpha: float, seed: int = 0) -> None:
    """Freeze a model, and add adapters to its linear layers except the head.

    Then only the adapters require gradients. Raises UsageError for a model without linear layers, and for a
    rank above the size of every layer.
    """
    head = model.get_output_embeddings()
    layers = {
        name: layer
        for name, layer in model.named_modules()
        # A subclass of nn.Linear may compute something else.
        if type(layer) is nn.Linear and layer is not head
    }
    if not layers:
        raise UsageError(f"models of type {model.config.model_type!r} have no linear layers for adapters")
    largest_rank = max(min(layer.weight.shape) for layer in layers.values())
    if rank > largest_rank:
        raise UsageError(
            f"adapters of rank {rank} do not fit the model: give a rank of at most {largest_rank}"
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, layer in layers.items():
        model.set_submodule(name, LoRA(layer, rank=rank, alpha=alpha, generator=generator))


def adapters_of(model: nn.Module) -> dict[str, LoRA]:
    """The adapted layers of a model, by the names of the layers."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRA)}


@contextmanager
def adapters_removed(model: nn.Module) -> Iterator[dict[str, LoRA]]:
    """Take the adapters out of the model inside the context. Yields the adapted layers by name."""
    adapted = adapters_of(model)
    for name, layer in adapted.items():
        model.set_submodule(name, layer.base)
    try:
        yield adapted
    finally:
        for name, layer in adapted.items():
            model.set_submodule(name, layer)
