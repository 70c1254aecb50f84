"""Low-rank adapters (Hu et al. 2022) on every linear layer but the head, by hand."""

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class LoRA(nn.Module):
    """W' = W + (alpha / rank) B A: the frozen layer plus a product of two thin matrices in float32.

    A begins random and B at zero, so that W' begins as W.
    """

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        device = base.weight.device
        self.a = nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32, device=device))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32, device=device))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return out + (self.scale * (x.to(self.a.dtype) @ self.a.T @ self.b.T)).to(out.dtype)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The layer alone, with W' as its weight."""
        self.base.weight += (self.scale * self.b @ self.a).to(self.base.weight.dtype)
        return self.base


def add_lora(model: PreTrainedModel, *, rank: int, alpha: float) -> list[nn.Parameter]:
    """Freeze the model and put adapters on its linear layers; what is left to train."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    for name, layer in layers:
        if layer is not head:
            model.set_submodule(name, LoRA(layer, rank=rank, alpha=alpha))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def merge_lora(model: PreTrainedModel) -> None:
    """Add the adapters to the weights and take them away: a model as it came, with other weights."""
    for name, layer in [pair for pair in model.named_modules() if isinstance(pair[1], LoRA)]:
        model.set_submodule(name, layer.merged())
