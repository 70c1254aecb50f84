"""What the README says of files and flags is true."""

import re
from dataclasses import fields
from pathlib import Path

from infer import InferConfig
from prompt_r1.config import EvaluateConfig, TrainConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = {path: path.read_text("utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}


def test_every_file_of_the_tables_exists_and_every_module_is_in_them():
    cells = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([\w/]+\.py|prompt_r1/\w+/)`", cell)}
    paths = {name if "/" in name or (ROOT / name).exists() else f"prompt_r1/{name}" for name in named}
    assert not [path for path in paths if not (ROOT / path).exists()]
    rooms = {f"prompt_r1/{path.name}{'/' if path.is_dir() else ''}" for path in (ROOT / "prompt_r1").iterdir()
             if path.name[0] != "_"}  # fmt: skip
    assert rooms <= paths


def test_every_flag_in_the_commands_is_a_flag():
    flags = {f"--{f.name.replace('_', '-')}" for kind in (TrainConfig, InferConfig, EvaluateConfig)
             for f in fields(kind)}  # fmt: skip
    data_flags = set(re.findall(r'"(--[a-z-]+)"', (ROOT / "prompt_r1/data/__main__.py").read_text("utf-8")))
    torchrun = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id",
                "--signals-to-handle"}  # fmt: skip
    slurm = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--time", "--signal", "--requeue",
             "--open-mode"}  # fmt: skip
    known = (
        flags
        | data_flags
        | torchrun
        | slurm
        | {"--config", "--help", "--help-all", "--port", "--fail", "--no-deps"}
    )
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(PAGES.values())))
    assert used <= known


def test_the_two_commands_name_files_that_are_there():
    for name in (
        "requirements.txt",
        "requirements-dev.txt",
        "train.py",
        "infer.py",
        "evaluate.py",
        "LICENSE",
    ):
        assert (ROOT / name).exists()
    assert "pip install -r requirements.txt && python train.py" in README
    assert "pip install -r requirements-dev.txt && python -m pytest" in README
