"""Every command that a program prints can be pasted: it is quoted, and its program takes it."""

import ast
import re
import shlex
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from prompt_r1.data.__main__ import main as data_main
from prompt_r1.evaluation.preflight import read_evaluation
from prompt_r1.pair.named_agent import SETTINGS_FILE, teaching_command
from prompt_r1.pair.settings import InferConfig, read_pair
from prompt_r1.programs.command_line import command
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training import warm_start
from prompt_r1.training.preflight import read_training
from prompt_r1.training.settings import read_warm_start_config
from prompt_r1.training.summary import summary
from tests.support.paths import ROOT
from tests.support.programs import run_here

FOLDER = "Anna's runs"  # needs quotes
TAKES = {
    "train.py": read_training,
    "infer.py": partial(read_pair, InferConfig),
    "evaluate.py": read_evaluation,
    "prompt_r1.training.warm_start": read_warm_start_config,
    "prompt_r1.data": data_main,
}


def after_training() -> None:
    """Of a run in the mini world, and of a run on a file, which has no other questions."""
    print(summary(Path(FOLDER), 0, TrainConfig(env="mini", data=("mini",))))
    file = Path(FOLDER, "my rows.jsonl")
    file.write_text("".join(f'{{"question": "Who is {n}?", "answer": "Anna"}}\n' for n in range(9)))
    own = summary(Path(FOLDER), 0, TrainConfig(env="mini", data=(str(file),)))
    print(own.splitlines()[-1])


def after_a_warm_start() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "learn_games", lambda *_: Path(FOLDER))
        run_here("warm_start.py", "--agent", FOLDER, "--games", "mini")


# The file whose command names the user's files → what prints it.
PRINTING: dict[str, Callable[[], None]] = {
    "prompt_r1/training/summary.py": after_training,
    "prompt_r1/training/warm_start.py": after_a_warm_start,
    "prompt_r1/pair/named_agent.py": lambda: print(teaching_command(FOLDER)),
}


@cache
def calls_of_command() -> list[tuple[str, ast.Call]]:
    """Where the package and the programs call `command`, with the file."""
    files = [*ROOT.glob("*.py"), *(ROOT / "prompt_r1").rglob("*.py")]
    return [
        (str(file.relative_to(ROOT)), node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command"
    ]


def is_fixed(call: ast.Call) -> bool:
    return all(isinstance(argument, ast.Constant) for argument in call.args)


@pytest.fixture
def folder(tmp_path, asking_agent, monkeypatch) -> Path:
    """The current folder, which holds an agent in FOLDER."""
    monkeypatch.chdir(tmp_path)
    Path(FOLDER).mkdir()
    for file in asking_agent.iterdir():
        Path(FOLDER, file.name).symlink_to(file)
    Path(FOLDER, SETTINGS_FILE).write_text("env: mini\n")  # as a training exports it
    return tmp_path


def assert_taken(line: str) -> None:
    """Its program takes the command; the one that asks gets a question, as if typed."""
    words = shlex.split(line)
    assert words[0] == "python"
    program, *arguments = words[2:] if words[1] == "-m" else words[1:]
    TAKES[program]([*arguments, "--question", "Who?"] if program == "infer.py" else arguments)


def test_no_command_is_printed_that_the_tests_below_do_not_try():
    assert {file for file, call in calls_of_command() if not is_fixed(call)} == set(PRINTING)


@pytest.mark.parametrize("file", PRINTING)
def test_a_command_with_the_files_of_the_user_can_be_pasted(folder, file, capfd):
    PRINTING[file]()
    shown = "".join(capfd.readouterr())
    lines = re.findall(r"`(python .*?)`|^\s*(python .*)$", shown, re.MULTILINE)
    assert len(lines) == sum(place == file and not is_fixed(call) for place, call in calls_of_command())
    assert all(FOLDER.split()[1] in "".join(found) for found in lines)
    for found in lines:
        assert_taken("".join(found))


def test_a_command_that_is_always_the_same_can_be_pasted(folder):
    fixed = [call for _, call in calls_of_command() if is_fixed(call)]
    assert len(fixed) >= 2
    for call in fixed:
        assert_taken(command(*(ast.literal_eval(argument) for argument in call.args)))
