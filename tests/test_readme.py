"""What the README and the manuals in docs/ say of files, lines, functions, flags and links is true."""

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import prompt_r1.data.__main__
import prompt_r1.miniworld.serve
import prompt_r1.report.__main__
import prompt_r1.studies.__main__
from infer import InferConfig
from prompt_r1.cli.command_line import parse_arguments, train_config
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.fields import SftConfig
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.training.cost_estimate import estimate
from tests import tiny
from tests.paths import ROOT

README = (ROOT / "README.md").read_text("utf-8")
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md"]
PAGES = {path: path.read_text("utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
CONFIGS = {"infer.py": InferConfig, "evaluate.py": EvaluateConfig, "prompt_r1.baselines.sft": SftConfig}
MAINS = {
    "prompt_r1.data": prompt_r1.data.__main__.main,
    "prompt_r1.report": prompt_r1.report.__main__.main,
    "prompt_r1.studies": prompt_r1.studies.__main__.main,
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the README's table whose first line begins with `heading`."""
    lines = README.split(heading, 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_file_of_the_tables_exists_and_every_module_is_in_them():
    cells = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([\w/]+\.py|prompt_r1/\w+/)`", cell)}
    paths = {name if "/" in name or (ROOT / name).exists() else f"prompt_r1/{name}" for name in named}
    assert not [path for path in paths if not (ROOT / path).exists()]
    rooms = {f"prompt_r1/{path.name}{'/' if path.is_dir() else ''}" for path in (ROOT / "prompt_r1").iterdir()
             if path.name[0] != "_"}  # fmt: skip
    assert rooms <= paths


def test_the_line_counts_are_those_of_the_files():
    said = {names(file)[0]: int(count) for file, count, _ in rows("| file | lines |")}
    counted = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in said}
    assert said == counted, f"write these into the README's reading order: {counted}"


def test_every_equation_has_its_functions_and_tests():
    table = rows("| equation | what |")
    numbers = [part for equation, *_ in table for part in equation.split(", ")]
    assert numbers == [*map(str, range(1, 20)), "Prop. 1", "Prop. 2", "Prop. 3"]
    for _, _, functions, tests in table:
        linked = re.findall(r"\[([\w ]+)\]\((tests/\w+\.py)\)", tests)
        assert names(functions) and linked
        for function in names(functions):
            find(function)
        for words, file in linked:
            assert f"\ndef test_{words.replace(' ', '_')}(" in (ROOT / file).read_text("utf-8"), words


def find(dotted: str) -> object:
    """The function `rollout.play` of prompt_r1/rollout.py, or `train.…` of train.py."""
    parts = dotted.split(".")
    for split in range(len(parts) - 1, 0, -1):
        path = Path(*parts[:split]).with_suffix(".py")
        home = "prompt_r1." if (ROOT / "prompt_r1" / path).exists() else ""
        if home or (ROOT / path).exists():
            found: object = importlib.import_module(home + ".".join(parts[:split]))
            for part in parts[split:]:
                found = getattr(found, part)
            return found
    raise AssertionError(f"{dotted} is no function of a file here")


def test_every_flag_in_the_text_is_a_flag():
    flags = {f"--{f.name.replace('_', '-')}" for kind in (TrainConfig, *CONFIGS.values())
             for f in fields(kind)}  # fmt: skip
    data_flags = set(re.findall(r'"(--[a-z-]+)"', (ROOT / "prompt_r1/data/__main__.py").read_text("utf-8")))
    torchrun = {f"--{name.replace('_', '-')}" for name in vars(get_args_parser().parse_args(["x"]))}
    slurm = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--time", "--signal", "--requeue",
             "--open-mode"}  # fmt: skip
    others = {"--config", "--help", "--help-all", "--port", "--fail", "--no-deps", "--served-model-name"}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(PAGES.values())))
    assert used <= flags | data_flags | torchrun | slurm | others


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a page: those of the blocks, and whole ones between back quotes."""
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    # A bare `python -m MODULE` in the text is its name.
    inline = re.findall(r"`(?!python -m [\w.]+`)((?:python|torchrun) [^`…]+)`", text)
    for line in [*(line for line in lines if re.search(r"\b(python3?|torchrun)\b", line)), *inline]:
        yield from pieces(shlex.split(line.removeprefix("$ "), comments=True))


def pieces(words: list[str]) -> Iterator[list[str]]:
    """The single commands of a line, and those within `bash -c '…'`."""
    piece: list[str] = []
    for word in [*words, "&&"]:
        if " python " in word:
            yield from pieces(shlex.split(word))
        if word in ("&&", "&", "|", ";"):
            yield piece
            piece = []
        else:
            piece.append(word)


class Parsed(Exception):
    """The parser took the flags: nothing more is wanted of the program."""


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_is_taken_by_the_parser_of_its_program(page, monkeypatch):
    taken = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, arguments):
        taken(parser, arguments)
        raise Parsed

    for words in commands(page.read_text("utf-8")):
        at = next((place for place, word in enumerate(words) if word == "train.py" or word in CONFIGS), 0)
        if "-m" in words:
            at = words.index("-m") + 1
        program, arguments = (words[at], words[at + 1 :]) if at else ("", [])
        if words[:1] == ["torchrun"]:
            get_args_parser().parse_args(words[1:])
        if program == "train.py":
            train_config(arguments)
        elif program in CONFIGS:
            parse_arguments(CONFIGS[program], program, "", arguments)
        elif program in MAINS:
            with monkeypatch.context() as patch, pytest.raises(Parsed):
                patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
                MAINS[program](arguments)
        else:
            known = ("pytest", "venv", "prompt_r1.miniworld.serve", "pip", "")
            assert program in known or program.startswith("benchmarks."), words


def test_commands_are_found_in_every_shape_in_which_they_are_written():
    text = """```bash
export A=b && python train.py --steps 3 \\
  --lr 1   # why
srun bash -c 'X=$Y exec python train.py --resume never'
```
and `python infer.py --json`."""
    assert [words for words in commands(text) if "python" in words] == [
        ["python", "train.py", "--steps", "3", "--lr", "1"],
        ["X=$Y", "exec", "python", "train.py", "--resume", "never"],
        ["python", "infer.py", "--json"],
    ]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_and_picture_of_the_repository_is_there(page):
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text("utf-8")), target


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to headings."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_cost_is_what_the_dry_run_says(tmp_path):
    tiny.qwen3_4b_config().save_pretrained(tmp_path)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"question": "{n}?", "answers": ["x"]}}\n' for n in range(256)), "utf-8")
    told = estimate(TrainConfig(**PRESETS["paper"], agent=str(tmp_path), data=(str(questions),),
                                val_data=(str(questions),), env_price=("0.15,0.60",)))  # fmt: skip
    for label, games, calls, dollars in rows("| paper preset, 320 steps |"):
        line = next(line for line in told.splitlines() if line.startswith(label.split(",")[0]))
        assert all(number in line for number in (games, calls, dollars)), line


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
