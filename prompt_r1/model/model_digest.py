"""A digest of a model that reads little of its weights."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from prompt_r1.errors import UsageError, first_line
from prompt_r1.model.loading import model_folder

FIRST_NUMBERS = 256  # how many numbers of each tensor the digest covers
# The digest covers these files whole: they shape the model, and the text that it reads and writes.
SHAPING_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def digest_of_model(path: Path | str) -> str:
    """Identify the model of a folder or hub id. Raises UsageError if a file of weights cannot be read.

    The digest covers the name, type, shape and first numbers of every tensor, and the SHAPING_FILES. If
    another model replaces the model of a folder, or its configuration or tokenizer, the digest changes.
    """
    folder = model_folder(path)
    digest = hashlib.sha256()
    for name in SHAPING_FILES:
        if (folder / name).is_file():
            digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    for weights in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(weights, framework="pt") as file:  # It maps the file, so little of it is read.
                for name in sorted(file.keys()):
                    tensor = file.get_tensor(name)
                    digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                    first = tensor.flatten()[:FIRST_NUMBERS]
                    digest.update(first.view(torch.uint8).numpy().tobytes())
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{weights} cannot be read: {first_line(error)}") from None
    return digest.hexdigest()[:16]
