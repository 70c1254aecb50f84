"""What a user names on the command line: agents and questions."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from prompt_r1.data.files import load_questions
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.questions import check_part
from prompt_r1.model.gguf import gguf_file, gguf_folder, is_gguf
from prompt_r1.programs.files import LFS_ADVICE, LFS_POINTER, is_finite_number, json_object
from prompt_r1.settings.agent import HELD_OUT, MINI_AGENT, SMOLLM2, STEP_FILE, is_mini_data
from prompt_r1.settings.functions import OBJECT_PREFIX

RUNS = Path("runs")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def find_agent(name: str, seed: int) -> str | Path:
    """The folder or hub id of the model that a user calls `name`. Raises UsageError if there is none.

    Mini agents are built, and GGUF files converted, if necessary.
    """
    if name == MINI_AGENT:
        from prompt_r1.miniworld.agent import mini_agent  # it imports torch, which takes seconds

        return mini_agent(seed, RUNS / "cache")
    if is_gguf(name):
        return gguf_folder(gguf_file(name))
    return find_weights(name)


def check_agent(name: str) -> str | Path:
    """Check an agent's name without torch, and make nothing. Raises UsageError if there is no such agent.

    Returns the folder or hub id or, for an agent that must first be built or converted, its name.
    """
    if name == MINI_AGENT:
        return name
    if is_gguf(name):
        gguf_file(name)  # This raises UsageError if the file cannot be used.
        return name
    return find_weights(name)


def find_weights(name: str) -> str | Path:
    """The folder of an agent's weights, or `name` where it may be a hub id. Raises UsageError."""
    if "@http" in name:
        raise UsageError(
            f"--agent {name}: an agent plays in this process: give the folder or hub id of its weights "
            "(a model behind an endpoint can be the environment: --env)"
        )
    folder = Path(name)
    if (folder / "agent" / "config.json").exists():
        folder /= "agent"
    if folder.exists():
        _check_agent_folder(folder)
        return folder
    # A hub id is NAME or ORGANISATION/NAME.
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.startswith(f"{RUNS}/")
    similar = _similar_agent(name)
    if is_path or similar:
        raise UsageError(f"--agent {name}: {_no_such_folder(similar)}")
    return name


def _similar_agent(name: str) -> str:
    """The agent whose name is most like `name`; "" if no name is like it."""
    known = {MINI_AGENT: MINI_AGENT, SMOLLM2: SMOLLM2}
    for run in _runs_with_agents():
        known |= {run.name: str(run), str(run): str(run)}
    matches = difflib.get_close_matches(name.rstrip("/"), known, n=1, cutoff=0.85)
    return known[matches[0]] if matches else ""


def _no_such_folder(similar: str) -> str:
    """Say that an agent does not exist, and name the `similar` agent or, without one, the newest agents."""
    if similar:
        return f"there is no such folder; did you mean {similar}?"
    runs = _runs_with_agents()
    if not runs:
        return "there is no such folder, and it is no name of the Hub"
    newest = ", ".join(str(run) for run in runs[:5])
    return f"there is no such folder; there are agents in {newest}"


def _runs_with_agents() -> list[Path]:
    """The runs in this folder that have an agent, the newest first."""
    agents = RUNS.glob("*/agent/config.json")
    newest = sorted(agents, key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent.parent for file in newest]


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
    for file in folder.iterdir():
        if file.is_file() and _is_lfs_pointer(file):
            raise UsageError(f"{file} is {LFS_ADVICE}")
    needs = {
        "config.json": (folder / "config.json").exists(),
        "a tokenizer": any((folder / name).exists() for name in TOKENIZER_FILES),
        "*.safetensors": any(folder.glob("*.safetensors")),
    }
    missing = [name for name, is_there in needs.items() if not is_there]
    if missing:
        raise UsageError(
            f"--agent {folder} is no model: it needs {', '.join(needs)}; missing: {', '.join(missing)}"
        )


def _is_lfs_pointer(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(len(LFS_POINTER)) == LFS_POINTER


def exported_step(folder: Path) -> int:
    """The step of the agent in a folder; -1 if it was not trained here, or if STEP_FILE is damaged."""
    file = folder / STEP_FILE
    step = json_object(file.read_bytes()).get("step") if file.is_file() else None
    return int(step) if is_finite_number(step) else -1


def check_data(names: Iterable[str]) -> None:
    """Raise UsageError for a file of questions that cannot be read, and for an unknown mini:SPLIT."""
    for name in names:
        if is_mini_data(name):
            check_part(name.partition(":")[2])
        elif not name.startswith(("hf:", OBJECT_PREFIX)) and name not in (HELD_OUT, "none"):
            load_questions(name)
