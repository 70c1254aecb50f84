"""Print docs/map.md: `python -m tests.map > docs/map.md`.

Rooms and their sentences are written here. The line of a file is the first line of its docstring.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

from tests.paths import ROOT

PACKAGE = ROOT / "prompt_r1"
# The method in one sitting, in this order; then train.py.
METHOD = ("types", "protocol", "rollout", "reward", "grpo")
# Files and folders of prompt_r1/, with a sentence for each folder. A file imports only from its own room and
# from the rooms before it.
ROOMS = {
    "version": "",
    "errors": "",
    "spending": "",
    "types": "",
    "terminal": "",
    "foreign": "",
    "hub": "",
    "metrics": "Scores of answers, and their statistics.",
    "chat_template": "",
    "protocol": "",
    "rollout": "",
    "reward": "",
    "grpo": "",
    "fine_tuning": "",
    "options": "Alternatives to parts of the method: [options](options.md).",
    "tasks": "Questions, verifiers and games of other people's packages: [other worlds](other_worlds.md).",
    "config": "Settings: every field is a flag.",
    "distributed": "Several processes: collectives, sharding, signals.",
    "endpoint": "The HTTP client of OpenAI-compatible endpoints.",
    "cli": "Input and output of the programs.",
    "miniworld": "The embedded world: questions, environment and warm-started agent.",
    "agent": "The model: loading, attention, the generation engine, log-probabilities.",
    "data": "Question files.",
    "environments": "What answers an agent's prompts, with journal and budget.",
    "playing": "",
    "report": "`report.html`, which training writes with its checkpoints.",
    "storage": "Run folders, checkpoints and exported agents.",
    "evaluation": "What `evaluate.py` computes and writes.",
    "training": "What surrounds the loop of `train.py`.",
    "baselines": "The compared methods.",
    "studies": "Experiments in the mini world: [studies](studies.md).",
    "api": "A trained pair from Python.",
    "serving": "A trained pair over HTTP.",
}
EXTRA = ("evaluation", "baselines", "studies", "api", "serving")
HEAD = """# Map of the code

The first line of each file, by `python -m tests.map`. Read the [six files](../README.md#how-it-works) first.
The [rooms](../CONTRIBUTING.md#the-rooms) are in import order. `train.py` imports the *core* rooms; without
the *extra* ones and `benchmarks/`, training still works."""


def the_map() -> str:
    """The text of docs/map.md."""
    files = [name for name in ROOMS if not (PACKAGE / name).is_dir()]
    others = [name for name in files if name not in METHOD]
    sections = [
        HEAD,
        section("The method (core)", "", (PACKAGE / f"{name}.py" for name in METHOD)),
        section("Other files (core)", "", (PACKAGE / f"{name}.py" for name in others)),
    ]
    for name, sentence in ROOMS.items():
        if name not in files:
            kind = "extra" if name in EXTRA else "core"
            sections.append(section(f"{name} ({kind})", sentence, files_of(PACKAGE / name)))
    programs = [ROOT / "train.py", ROOT / "infer.py", ROOT / "evaluate.py", PACKAGE / "__main__.py"]
    sections.append(section("Programs", "", programs))
    return "\n\n".join(sections) + "\n"


def section(title: str, sentence: str, files: Iterable[Path]) -> str:
    """A heading, the sentence of the room, and a line for each file."""
    lines = "\n".join(f"- `{path.name}`: {first_line(path)}" for path in files)
    return "\n\n".join(part for part in (f"## {title}", sentence, lines) if part)


def files_of(folder: Path) -> list[Path]:
    """The files of a room that have a line in the map."""
    return [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]


def first_line(path: Path) -> str:
    """The first line of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring, f"{path}: the first line says what the file does"
    return docstring.split("\n")[0]


if __name__ == "__main__":
    print(the_map(), end="")
