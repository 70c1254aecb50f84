"""A run folder or an agent that is damaged, or from a stranger: refused in a sentence, or resumed exactly."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.damage import FIXED, RANDOM
from tests.support.providers import KEY
from tests.support.sandbox import DONE, Sandbox
from tests.support.tensors import load_tensors

# A user sees warnings once; the tests would fail on them.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# Games that ask the environment and differ in their rewards, so that every step changes the weights.
TRAIN = (
    "--config mini --agent agent --env mini --data questions.jsonl --val-data none --test-data none "
    "--instruction short --questions 2 --group-size 4 --mini-batch 4 --max-turns 2 --max-new 60 "
    "--max-tokens 700 --lr 1e-3 --save-every 1 --device cpu --out out"
).split()


@pytest.fixture
def sandbox(tmp_path, asking_agent, call_here, monkeypatch) -> Sandbox:
    """A user's folder. The test fails when a program breaks a promise in it."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return Sandbox(tmp_path, asking_agent, call_here)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and Adam states of the newest checkpoint of a run."""
    return load_tensors(max((folder / "checkpoints").iterdir()))


def test_a_run_resumes_bit_for_bit_from_a_damaged_folder_or_refuses(sandbox: Sandbox):
    assert sandbox.run("train.py", *TRAIN, "--steps", "2") == DONE
    good = sandbox.folder / "out"
    shutil.move(good, sandbox.folder / "two")
    assert sandbox.run("train.py", *TRAIN, "--steps", "3") == DONE
    expected = weights(good)
    assert not equal(weights(sandbox.folder / "two"), expected), "the last step changes nothing"
    shutil.move(good, sandbox.folder / "three")
    sandbox.keep_as_it_is()
    rng = random.Random("run")
    names = [path.relative_to(sandbox.folder / "two") for path in sorted((sandbox.folder / "two").rglob("*"))]
    for name in [name for name in names if (sandbox.folder / "two" / name).is_file()]:
        for damage in (*RANDOM, *FIXED):
            shutil.copytree(sandbox.folder / "two", good)
            damage(good / name, rng)
            sandbox.about = f"{damage.__name__} in {name}"
            code = sandbox.run("train.py", *TRAIN, "--steps", "3", own=("out",))
            if code == DONE:
                assert equal(weights(good), expected), f"other weights: {sandbox.about}"
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
