"""The README and the manuals in docs/ are correct: commands, flags, links, equations and numbers."""

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.run import get_args_parser

import examples.exercises
import examples.minimal
import prompt_r1.data.__main__
import prompt_r1.miniworld.neural.train
import prompt_r1.miniworld.serve
import prompt_r1.report.__main__
import prompt_r1.studies.__main__
import prompt_r1.studies.comparison
from infer import InferConfig
from prompt_r1.cli.command_line import Parser, parse_arguments, train_config
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.methods import SftConfig
from prompt_r1.config.serve import ServeConfig
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.training.dry_run import estimate
from tests import tiny
from tests.paths import ROOT

README = (ROOT / "README.md").read_text("utf-8")
PAPER = (ROOT / "docs/paper.md").read_text("utf-8")
MANUALS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = [
    *MANUALS,
    *(
        ROOT / name
        for name in ("CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "examples/exercises.md")
    ),
]
CONFIGS = {
    "infer.py": InferConfig,
    "evaluate.py": EvaluateConfig,
    "prompt_r1.baselines.sft": SftConfig,
    "prompt_r1.serving": ServeConfig,
}
MAINS = {
    "prompt_r1.data": prompt_r1.data.__main__.main,
    "prompt_r1.report": prompt_r1.report.__main__.main,
    "prompt_r1.studies": prompt_r1.studies.__main__.main,
    "prompt_r1.miniworld.neural.train": prompt_r1.miniworld.neural.train.main,
    "prompt_r1.studies.comparison": prompt_r1.studies.comparison.main,
    "examples.minimal": examples.minimal.main,
    "examples.exercises": examples.exercises.main,
}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def table_rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first line begins with `heading`."""
    lines = text.split(heading, 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


# --- Equations ------------------------------------------------------------------------------------


def test_every_equation_has_functions_and_tests_that_exist():
    table = table_rows(PAPER, "| equation | what |")
    numbers = [part for equation, *_ in table for part in equation.split(", ")]
    assert numbers == [*map(str, range(1, 20)), "Prop. 1", "Prop. 2", "Prop. 3"]
    for _, _, functions, tests in table:
        names = re.findall(r"`([^`]+)`", functions)
        links = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)", tests)
        assert names and links
        for name in names:
            assert find(name) is not None
        for name, file in links:
            assert f"\ndef {name}(" in (ROOT / file).read_text("utf-8"), name


def find(name: str) -> object:
    """The function or method that a dotted name of the table stands for, such as `rollout.play`."""
    script = name.startswith("train.")
    parts = name.split(".")
    module_parts = 1
    while not script and not (ROOT / "prompt_r1" / Path(*parts[:module_parts])).with_suffix(".py").exists():
        module_parts += 1
        assert module_parts < len(parts), f"{name}: there is no such file"
    module = ".".join(parts[:module_parts])
    found: object = importlib.import_module(module if script else f"prompt_r1.{module}")
    for part in parts[module_parts:]:
        found = getattr(found, part)
    return found


# --- Commands, flags and links --------------------------------------------------------------------


def test_every_flag_in_the_text_exists():
    configs = (TrainConfig, *CONFIGS.values())
    flags = {f"--{f.name.replace('_', '-')}" for config in configs for f in fields(config)}
    programs = ("data/__main__.py", "storage/push.py", "miniworld/neural/train.py")
    for file in [
        *(ROOT / "prompt_r1" / name for name in programs),
        *(ROOT / "prompt_r1/studies").glob("*.py"),
    ]:
        flags |= set(re.findall(r'"(--[a-z-]+)"', file.read_text("utf-8")))
    torchrun = vars(get_args_parser().parse_args(["x"]))
    flags |= {f"--{name.replace('_', '-')}" for name in torchrun}
    slurm = "--cpus-per-task --minutes --kill-on-bad-exit --gpus-per-task --gpu-bind --time --signal"
    others = "--config --help --help-all --version --port --fail --no-deps --served-model-name"
    flags |= {*slurm.split(), *others.split()}
    text = "\n".join(page.read_text("utf-8") for page in MANUALS)
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert not used - flags


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a page, from its code blocks and from complete inline commands."""
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if re.search(r"\b(python3?|torchrun|prompt-r1)\b", line)]
    # An inline `python -m MODULE` without arguments only names the program.
    lines += re.findall(r"`(?!python -m [\w.]+`)((?:python|torchrun) [^`…]+)`", text)
    for line in lines:
        yield from split_commands(shlex.split(line.removeprefix("$ "), comments=True))


def split_commands(words: list[str]) -> Iterator[list[str]]:
    """The single commands of a shell line, including those inside `bash -c '…'`."""
    command: list[str] = []
    for word in [*words, "&&"]:
        if " python " in word:
            yield from split_commands(shlex.split(word))
        if word in ("&&", "&", "|", ";"):
            yield command
            command = []
        else:
            command.append(word)


def program_and_arguments(words: list[str]) -> tuple[str, list[str]]:
    """The script or module that a command runs, and its arguments; "" for a command of another kind."""
    if words[:1] == ["prompt-r1"]:
        name = {"ask": "infer", "serve": "prompt_r1.serving"}.get(words[1], words[1])
        name = f"{name}.py" if (ROOT / f"{name}.py").exists() else name
        return name if "." in name else f"prompt_r1.{name}", words[2:]
    if "-m" in words:
        place = words.index("-m") + 1
        return words[place], words[place + 1 :]
    for place, word in enumerate(words):
        if word == "train.py" or word in CONFIGS:
            return word, words[place + 1 :]
    return "", []


class Parsed(Exception):
    """Raised once the parser has accepted the flags, to stop the program there."""


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_is_accepted_by_the_parser_of_its_program(page, monkeypatch):
    # docs/using.md writes these files.
    monkeypatch.setitem(sys.modules, "my_metric", SimpleNamespace(starts_right=lambda _, __: 1.0))
    monkeypatch.setitem(sys.modules, "my_price", SimpleNamespace(thrifty=lambda _, __: 1.0))

    def stopping(parse):
        def parse_and_stop(parser, arguments):
            parse(parser, arguments)
            raise Parsed

        return parse_and_stop

    for words in commands(page.read_text("utf-8")):
        program, arguments = program_and_arguments(words)
        if words[:1] == ["torchrun"]:
            get_args_parser().parse_args(words[1:])
        if program == "train.py":
            train_config(arguments)
        elif program in CONFIGS:
            parse_arguments(CONFIGS[program], program, "", arguments)
        elif program in MAINS:
            with monkeypatch.context() as patch, pytest.raises(Parsed):
                for parser in (argparse.ArgumentParser, Parser):
                    patch.setattr(parser, "parse_args", stopping(parser.parse_args))
                MAINS[program](arguments)
        else:
            known = (
                "pytest",
                "venv",
                "prompt_r1.miniworld.serve",
                "tests.mini_server",
                "tests.map",
                "pip",
                "",
            )
            assert program in known or program.startswith(("benchmarks.", "examples.")), words


def test_commands_are_found_in_blocks_in_bash_c_and_inline():
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


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_and_picture_inside_the_repository_exists(page):
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if file.suffix == ".md" and anchor:
            assert anchor in anchors(file.read_text("utf-8")), target


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_python_file_that_the_text_names_exists(page):
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text("utf-8")):
        assert (ROOT / name).exists() or (ROOT / "prompt_r1" / name).exists(), name


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_two_commands_are_in_the_readme():
    assert "pip install -r requirements.txt && python train.py" in README
    assert "pip install -r requirements-dev.txt && python -m pytest" in README


def test_the_readme_is_short():
    assert len(README.split()) <= 1500


# --- Numbers --------------------------------------------------------------------------------------


def test_the_cost_table_is_what_the_dry_run_prints(tmp_path):
    tiny.qwen3_4b_config().save_pretrained(tmp_path)
    questions = tmp_path / "questions.jsonl"
    lines = [f'{{"question": "{number}?", "answers": ["x"]}}\n' for number in range(256)]
    questions.write_text("".join(lines), "utf-8")
    config = TrainConfig(
        **PRESETS["paper"],
        agent=str(tmp_path),
        data=(str(questions),),
        val_data=(str(questions),),
        env_price=("0.15,0.60",),
    )
    printed = estimate(config).splitlines()
    for label, games, calls, dollars in table_rows(PAPER, "| paper preset, 320 steps |"):
        line = next(line for line in printed if line.startswith(label.split(",")[0]))
        assert all(number in line for number in (games, calls, dollars)), line


def test_the_run_of_the_readme_is_that_of_the_results():
    results = (ROOT / "docs/results/seeds.txt").read_text("utf-8")
    shown = re.findall(r"\n.+ 320  .+", README)
    assert len(shown) == 3 and all(line in results for line in shown)
