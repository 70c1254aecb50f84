"""Tiny models with adapters."""

import torch

from prompt_r1.model.lora import adapters_of, add_lora
from tests.support import tiny

TOKENS = torch.tensor([tiny.random_tokens(30, seed=1)])


def with_random_adapters(model, *, rank: int = 8, alpha: float = 16):
    """Add adapters whose B is not zero."""
    add_lora(model, rank=rank, alpha=alpha)
    generator = torch.Generator().manual_seed(1)
    for layer in adapters_of(model).values():
        torch.nn.init.normal_(layer.b, std=0.1, generator=generator)
    return model
