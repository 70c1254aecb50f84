"""Low-rank adapters (Hu et al. 2022) on every linear layer except the head.

Why not peft: this is shorter than a dependency, and the outputs are equal (tests/baselines/test_sft.py).
"""

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class LoRA(nn.Module):
    """A frozen linear layer plus a trained low-rank product in float32: W' = W + (alpha / rank) B A.

    A starts random and B at zero, so W' = W before training.
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
        """The linear layer with the weight W'."""
        self.base.weight += (self.scale * self.b @ self.a).to(self.base.weight.dtype)
        return self.base


def add_lora(model: PreTrainedModel, *, rank: int, alpha: float) -> list[nn.Parameter]:
    """Freeze the model and add adapters to its linear layers; returns the parameters to train."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    for name, layer in layers:
        if layer is not head:
            model.set_submodule(name, LoRA(layer, rank=rank, alpha=alpha))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def merge_lora(model: PreTrainedModel) -> None:
    """Merge the adapters into the weights, which restores the original modules."""
    adapted = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRA)}
    for name, layer in adapted.items():
        model.set_submodule(name, layer.merged())
