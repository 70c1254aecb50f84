"""A run folder or an agent that is damaged, or from a stranger: refused in a sentence, or resumed exactly."""

import json
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.damage import FIXED, RANDOM, flip_a_bit, replace_a_value
from tests.support.exports import newest_tensors
from tests.support.programs import CallHere
from tests.support.providers import KEY

# A user sees warnings once; the tests would fail on them.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# Games that ask the environment and differ in their rewards, so that every step changes the weights.
TRAIN = (
    "--config mini --agent agent --env mini --data questions.jsonl --val-data none --test-data none "
    "--instruction short --questions 2 --group-size 4 --mini-batch 4 --max-turns 2 --max-new 60 "
    "--max-tokens 700 --lr 1e-3 --save-every 1 --device cpu --out out"
).split()


DONE, REFUSED, NO_ANSWER, RESUMABLE, INTERRUPTED = 0, 2, 3, 75, 130
SECONDS = 20.0  # after which a program gets Ctrl-C
QUESTIONS = [
    {"id": str(n), "question": text, "answer": "Anna", "data_source": "qa"}
    for n, text in enumerate(["abc def?", "fed cba?", "cab?", "bad?"])
]
GAME = "instruction: short\nmax_tokens: 600\nmax_new: 60\nmax_turns: 2\nenv: mini\nagent: start\n"


class Sandbox:
    """The folder of a user: an agent, questions, and files that no program may touch."""

    def __init__(self, folder: Path, agent: Path, call_here: CallHere) -> None:
        self.folder = folder
        self.call_here = call_here
        self.about = ""  # what is special about the next run
        shutil.copytree(agent, folder / "agent")
        (folder / "agent/prompt_r1.yaml").write_text(GAME)
        (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
        (folder / "notes.txt").write_text("notes of the user\n")
        self.keep_as_it_is()

    def run(self, *command: str, own: tuple[str, ...] = ()) -> int:
        """Run a program, and return its exit code. What it may change is in the folders `own`."""
        before = self._state(own)
        with _ctrl_c_after(SECONDS):
            ended = self.call_here(self.folder, *command)
        code, output = ended.returncode, ended.stdout + ended.stderr
        what = f"{command} {self.about}\n{output[-3000:]}"
        assert code in (DONE, REFUSED, NO_ANSWER, RESUMABLE, INTERRUPTED), f"exit code {code}: {what}"
        assert "Traceback" not in output, what
        assert code != REFUSED or output.strip(), f"no explanation: {what}"
        new = [path for path in self._files() - before.keys() if (self.folder / path).is_file()]
        texts = [output.encode(), *((self.folder / path).read_bytes() for path in new)]
        assert not any(KEY.encode() in text for text in texts), f"a key: {what}"
        changed = before.items() - self._state(own=()).items()
        assert not changed, f"changed {changed}: {what}"
        return int(code)

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


@contextmanager
def _ctrl_c_after(seconds: float) -> Iterator[None]:
    """Press Ctrl-C after some seconds, and every two seconds from then on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 2.0)  # before: that of pytest-timeout
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, alarm)


@pytest.fixture
def sandbox(tmp_path, asking_agent, call_here, monkeypatch) -> Sandbox:
    """A user's folder. The test fails when a program breaks a promise in it."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return Sandbox(tmp_path, asking_agent, call_here)


def test_a_run_resumes_bit_for_bit_from_a_damaged_folder_or_refuses(sandbox: Sandbox):
    assert sandbox.run("train.py", *TRAIN, "--steps", "2") == DONE
    good = sandbox.folder / "out"
    shutil.move(good, sandbox.folder / "two")
    assert sandbox.run("train.py", *TRAIN, "--steps", "3") == DONE
    expected = newest_tensors(good)
    assert not equal(newest_tensors(sandbox.folder / "two"), expected), "the last step changes nothing"
    shutil.move(good, sandbox.folder / "three")
    sandbox.keep_as_it_is()
    rng = random.Random("run")
    whole = sandbox.folder / "two"
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    for name in names:
        for damage in (*RANDOM, *FIXED):
            # Checkpoints have no digests, so nothing can notice another weight or number.
            is_state = name.name == "state.json" or name.suffix == ".safetensors"
            if damage is flip_a_bit and name.parts[0] == "checkpoints" and is_state:
                continue
            # The values of the metrics are believed too.
            if damage is replace_a_value and name.name == "metrics.jsonl":
                continue
            shutil.copytree(whole, good)
            damage(good / name, rng)
            sandbox.about = f"{damage.__name__} in {name}"
            code = sandbox.run("train.py", *TRAIN, "--steps", "3", own=("out",))
            if code == DONE:
                assert equal(newest_tensors(good), expected), f"other weights: {sandbox.about}"
            sandbox.clean()


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_programs_that_read_a_damaged_run_or_agent_explain_it(sandbox: Sandbox):
    assert sandbox.run("train.py", *TRAIN, "--steps", "1") == DONE
    shutil.move(sandbox.folder / "out", sandbox.folder / "run")
    sandbox.keep_as_it_is()
    rng = random.Random("agent")
    readers = {
        "agent": (
            "infer.py --agent foreign --env mini --question abc? --device cpu",
            "evaluate.py --agent foreign --data questions.jsonl --limit 1 --method prompt-r1 --out out",
        ),
        "": ("report.py foreign",),
    }
    for path in sorted((sandbox.folder / "run").rglob("*")):
        name = path.relative_to(sandbox.folder / "run")
        if path.is_file() and name.parts[0] != "checkpoints":
            for damage in (*RANDOM, *FIXED):
                for reader in [*readers[""], *readers.get(name.parts[0], ())]:
                    shutil.copytree(sandbox.folder / "run", sandbox.folder / "foreign")
                    damage(sandbox.folder / "foreign" / name, rng)
                    sandbox.about = f"{damage.__name__} in {name}"
                    sandbox.run(*reader.split(), own=("foreign",))
                    sandbox.clean()
