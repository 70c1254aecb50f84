"""Find the agent that a user names."""

from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name

from prompt_r1.data.files import load_questions
from prompt_r1.errors import UsageError
from prompt_r1.model.gguf import gguf_file, gguf_folder
from prompt_r1.programs.files import LFS_ADVICE, LFS_POINTER, is_finite_number, json_object
from prompt_r1.settings.agent import HELD_OUT, MINI_AGENT, MINI_WORLD, STEP_FILE, is_mini_data
from prompt_r1.settings.functions import OBJECT_PREFIX

RUNS = Path("runs")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def find_agent(name: str, seed: int) -> str | Path:
    """The folder or hub id of the model that a user calls `name`.

    Mini agents are built, and GGUF files converted, if necessary.
    """
    if name == MINI_AGENT:
        return Path(resolve_name(f"{MINI_WORLD}.agent:mini_agent")(seed, RUNS / "cache"))
    if file := gguf_file(name):
        return gguf_folder(file)
    if "@http" in name:
        raise UsageError(
            f"--agent {name}: an agent plays in this process: give the folder or hub id of its weights "
            "(a model behind an endpoint can be the environment: --env)"
        )
    folder = Path(name)
    if (folder / "agent" / "config.json").exists():
        folder /= "agent"
    elif not folder.exists():
        if name.count("/") > 1 or name.startswith((".", "/", "~")):
            raise UsageError(f"--agent {name}: there is no such folder, and it is no name of the Hub")
        return name
    _check_agent_folder(folder)
    return folder


def _check_agent_folder(folder: Path) -> None:
    """Raise UsageError for a folder that holds no model or no tokenizer."""
    if not folder.is_dir():
        raise UsageError(f"--agent {folder} is a file: give the folder of a model")
    if (folder / "predictions.jsonl").exists():
        raise UsageError(f"--agent {folder} is a folder of evaluate.py: give the agent that it evaluated")
    if (folder / "adapter_config.json").exists():
        raise UsageError(
            f"--agent {folder} holds an adapter of peft: merge it into its model (merge_and_unload), and "
            "give the folder of the merged model"
        )
    if (folder / "metrics.jsonl").exists() and not (folder / "config.json").exists():
        raise UsageError(f"--agent {folder}: this run has saved no agent yet")
    if not (folder / "config.json").exists():
        raise UsageError(f"--agent {folder} is no model: there is no config.json in it")
    for file in filter(Path.is_file, folder.iterdir()):
        with file.open("rb") as content:
            if content.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UsageError(f"{file} is {LFS_ADVICE}")
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UsageError(f"--agent {folder} has no tokenizer: there is no tokenizer.json in it")
    if not any(folder.glob("*.safetensors")):
        raise UsageError(f"--agent {folder} has no weights: there is no model.safetensors in it")


def exported_step(folder: Path) -> int:
    """The step of the agent in a folder; -1 if it was not trained here, or if its file is damaged."""
    file = folder / STEP_FILE
    step = json_object(file.read_bytes()).get("step") if file.is_file() else None
    return int(step) if is_finite_number(step) else -1


def check_agent(name: str) -> str | Path:
    """The folder or hub id of an agent (its name, if it must be made). Raises UsageError if there is none."""
    is_made = name == MINI_AGENT or gguf_file(name)  # building and converting import torch
    return name if is_made else find_agent(name, seed=0)


def check_data(names: Iterable[str]) -> None:
    """Raise UsageError for a file of questions that cannot be read, and for an unknown mini:SPLIT."""
    for name in names:
        if is_mini_data(name):
            resolve_name(f"{MINI_WORLD}.world:check_part")(name.partition(":")[2])
        elif not name.startswith(("hf:", OBJECT_PREFIX)) and name not in (HELD_OUT, "none"):
            load_questions(name)


def check_device(name: str) -> None:
    """Raise UsageError for what names no device. Whether there is a GPU, torch knows."""
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise UsageError(f"--device {name}: no such device; choose auto, cpu or cuda")
