"""Products of few rows with a large matrix on a CPU.

A decode step multiplies a few rows, one for each game, with every weight of the model. For 4 to 48 rows MKL
computes (W @ x.T).T faster than x @ W.T.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = range(4, 49)
LARGE_MATRIX = 2**18  # entries: for smaller matrices the transposes cost more than they save


def speed_up_linear_layers(model: nn.Module) -> None:
    """Let the large linear layers of a model on a CPU compute few rows by `linear`."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.numel() >= LARGE_MATRIX:
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same as `F.linear`: (…, K) and (N, K) → contiguous (…, N)."""
    rows = x.reshape(-1, x.shape[-1])
    is_faster = x.device.type == "cpu" and len(rows) in FEW_ROWS and weight.numel() >= LARGE_MATRIX
    if not is_faster or not torch.backends.mkl.is_available():
        return F.linear(x, weight, bias)
    # Contiguous, or SDPA computes attention without its fast kernel.
    out = (weight @ rows.T.contiguous()).T.contiguous().view(*x.shape[:-1], -1)
    return out if bias is None else out + bias
