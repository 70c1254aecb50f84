"""Reads the tensors of a folder."""

from pathlib import Path

import torch
from safetensors.torch import load_file


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a folder, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors
