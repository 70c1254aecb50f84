"""A user's folder in which programs run, and the promises that every one of them keeps there."""

import asyncio
import io
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import evaluate
import infer
import train
from prompt_r1.baselines import sft
from prompt_r1.cli.command_line import run_program
from prompt_r1.data import __main__ as data
from prompt_r1.report import __main__ as report
from prompt_r1.serving import __main__ as serving
from tests.support.providers import KEY

PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "train.py": train.main,
    "infer.py": infer.main,
    "evaluate.py": evaluate.main,
    "sft.py": sft.main,
    "data.py": data.main,
    "report.py": report.main,
    "serving": serving.main,
}
DONE, REFUSED, RESUMABLE, INTERRUPTED = 0, 2, 75, 130
QUESTIONS = [
    {"id": str(n), "question": text, "answer": "Anna", "data_source": "qa"}
    for n, text in enumerate(["abc def?", "fed cba?", "cab?", "bad?"])
]
GAME = "instruction: short\nmax_tokens: 600\nmax_new: 60\nmax_turns: 2\nenv: mini\nagent: start\n"


@dataclass
class Broken(Exception):
    """A promise that a program broke."""

    promise: str
    command: list[str]
    output: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.command}\n{self.output[-3000:]}"


class Sandbox:
    """The folder of a user: an agent, questions, and files that no program may touch."""

    def __init__(self, folder: Path, agent: Path) -> None:
        self.folder = folder
        self.broken: list[Broken] = []
        self.about = ""  # what is special about the next run
        shutil.copytree(agent, folder / "agent")
        (folder / "agent/prompt_r1.yaml").write_text(GAME)
        (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
        (folder / "mine").mkdir()
        for name in ("notes.txt", "results.md", "metrics.jsonl", "config.yaml", ".agent.tmp"):
            (folder / "mine" / name).write_text(f"{name} of the user\n")
        self.keep_as_it_is()

    def run(
        self, *command: str, seconds: float = 20.0, own: tuple[str, ...] = (), ended: tuple[int, ...] = ()
    ) -> int:
        """Run a program; returns its exit code. What it may write is in the folders `own`.

        `ended` are exit codes of this program besides those of all. After some seconds it gets Ctrl-C. A
        broken promise is recorded in `broken`.
        """
        before = self._state(own)
        code, output = self._ended(list(command), seconds)
        promise = ""
        if code not in (DONE, REFUSED, RESUMABLE, INTERRUPTED, *ended):
            promise = f"exit code {code}"
        elif "Traceback" in output:
            promise = "a traceback"
        elif code == REFUSED and not output.strip():
            promise = "no explanation"
        elif KEY in output or any(_has_key(self.folder / path) for path in self._files() - before.keys()):
            promise = "a key"
        elif changed := before.items() - self._state(own=()).items():
            promise = f"changed {', '.join(sorted(str(path) for path, _ in changed))}"
        if promise:
            self.broken.append(Broken(promise, [*command, self.about], output))
        return code

    def check(self, promise: str, kept: bool) -> None:
        """Record a promise of the last run that the test itself has checked."""
        if not kept:
            self.broken.append(Broken(promise, [self.about], ""))

    def keep_as_it_is(self) -> None:
        """From now on everything in the folder belongs to the user."""
        self._users = {path.name for path in self.folder.iterdir()}

    def clean(self) -> None:
        """Remove what programs wrote."""
        for path in self.folder.iterdir():
            if path.name in self._users:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _ended(self, command: list[str], seconds: float) -> tuple[int, str]:
        output = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        reports: list[str] = []
        with (
            patch.object(sys, "argv", command),
            patch.dict(os.environ, {"OPENAI_API_KEY": KEY}),
            patch.object(sys, "stdin", io.StringIO()),
            redirect_stdout(output),
            redirect_stderr(output),
            warnings.catch_warnings(),
            _in_folder(self.folder),
            _ctrl_c_after(seconds),
        ):
            warnings.simplefilter("ignore")  # a user sees them once; the tests would fail on them
            try:
                run_program(PROGRAMS[command[0]])
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else 1
            except BaseException as error:
                code = 1
                reports.append(repr(error))
        text = output.buffer.getvalue().decode("utf-8", "replace")
        return code, "\n".join([text, *reports])

    def _state(self, own: tuple[str, ...]) -> dict[Path, tuple[int, ...]]:
        """Size, time and inode of every file outside the folders `own`."""
        state = {}
        for path in self._files():
            if path.parts[0] not in own:
                about = (self.folder / path).lstat()
                state[path] = (about.st_size, about.st_mtime_ns, about.st_ino)
        return state

    def _files(self) -> set[Path]:
        paths = self.folder.rglob("*")
        return {path.relative_to(self.folder) for path in paths if path.is_file() or path.is_symlink()}


def _has_key(path: Path) -> bool:
    return path.is_file() and KEY.encode() in path.read_bytes()


@contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _ctrl_c_after(seconds: float) -> Iterator[None]:
    """Press Ctrl-C after some seconds, and every two seconds from then on."""

    def press(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    changed = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)  # the last by the server
    handlers = {number: signal.getsignal(number) for number in changed}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, seconds, 2.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        asyncio.set_event_loop(None)
