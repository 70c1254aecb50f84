"""Every kind of file that a program reads, damaged or from a stranger; a resumed run ends bit for bit."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from prompt_r1.data.files import load_questions, write_questions
from tests.fuzz.test_flags import ONE_STEP, SFT
from tests.support.damage import FIXED, RANDOM, Damage, link_the_folder_to, link_to, put_a_pipe_there
from tests.support.sandbox import DONE, Sandbox
from tests.support.tensors import load_tensors

pytestmark = pytest.mark.slow

TRAIN = [*ONE_STEP.split(), "--save-every", "1"]
# Games that ask the environment and differ in their rewards, so that every step changes the weights.
ASKING = [
    *TRAIN,
    *"--max-turns 2 --max-new 60 --max-tokens 700 --group-size 4 --lr 1e-3 --mini-batch 4".split(),
]
EVALUATE = "--agent agent --env mini --data questions.jsonl --method direct prompt-r1 --out out --device cpu"
# What the README tells a user to do with a folder or file, by the damaged file.
READERS: dict[str, tuple[str, ...]] = {
    "questions.jsonl": (
        f"train.py {' '.join(TRAIN)}",
        f"evaluate.py {EVALUATE} --limit 1",
        f"sft.py {SFT}",
        "infer.py --agent agent --env mini --questions questions.jsonl --device cpu",
        "data.py mix --in questions.jsonl --out out.jsonl --per-dataset 2",
        "data.py convert --from questions --in questions.jsonl --out out.parquet",
        "data.py convert --from hotpotqa --in questions.jsonl --out out.jsonl",
        "data.py convert --from squad --in questions.jsonl --out out.jsonl",
    ),
    "questions.parquet": (
        "evaluate.py --agent agent --env mini --data questions.parquet --method direct --out out",
        "data.py convert --from questions --in questions.parquet --out out.jsonl",
    ),
    "questions.txt": ("infer.py --agent agent --env mini --questions questions.txt --device cpu",),
    "own.yaml": (f"train.py {' '.join(TRAIN)} --config own.yaml",),
}


def damages(sandbox: Sandbox) -> list[Damage]:
    """Each kind of damage to a file."""
    links = [link_to(sandbox.folder / "mine" / target) for target in ("notes.txt", "not-there")]
    return [*RANDOM, *FIXED, *links]


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_file_is_explained(sandbox: Sandbox, name: str):
    file, rng = sandbox.folder / name, random.Random(name)
    (sandbox.folder / "questions.txt").write_text("abc?\n\ndef?\n")
    (sandbox.folder / "own.yaml").write_text("data: mini\nlr: 1e-5\nsteps: 1\nval_data: [mini]\nclip: 0.3\n")
    write_questions(sandbox.folder / "questions.parquet", load_questions(sandbox.folder / "questions.jsonl"))
    content = file.read_bytes()
    sandbox.keep_as_it_is()
    for damage in damages(sandbox):
        for reader in READERS[name]:
            if damage is put_a_pipe_there:
                continue  # a user may name a pipe; the program waits for it, as `cat` does
            file.unlink()
            file.write_bytes(content)
            damage(file, rng)
            sandbox.about = damage.__name__
            sandbox.run(*reader.split())
            sandbox.clean()
            if file.is_dir():
                file.rmdir()
                file.touch()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and Adam states of the newest checkpoint of a run."""
    return load_tensors(max((folder / "checkpoints").iterdir()))


def test_a_run_resumes_bit_for_bit_from_a_damaged_folder_or_refuses(sandbox: Sandbox):
    assert sandbox.run("train.py", *ASKING, "--steps", "2") == DONE
    good = sandbox.folder / "out"
    shutil.move(good, sandbox.folder / "two")
    assert sandbox.run("train.py", *ASKING, "--steps", "3") == DONE
    expected = weights(good)
    assert not equal(weights(sandbox.folder / "two"), expected), "the last step changes nothing"
    shutil.move(good, sandbox.folder / "three")
    sandbox.keep_as_it_is()
    rng = random.Random("run")
    names = [path.relative_to(sandbox.folder / "two") for path in sorted((sandbox.folder / "two").rglob("*"))]
    for name in [name for name in names if (sandbox.folder / "two" / name).is_file()]:
        ways = damages(sandbox)
        if len(name.parts) > 1:
            ways.append(link_the_folder_to(sandbox.folder / "mine"))
        for damage in ways:
            shutil.copytree(sandbox.folder / "two", good)
            damage(good / name, rng)
            sandbox.about = f"{damage.__name__} in {name}"
            code = sandbox.run("train.py", *ASKING, "--steps", "3", own=("out",))
            if code == DONE:
                sandbox.check("other weights", equal(weights(good), expected))
            sandbox.clean()


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_programs_that_read_a_damaged_run_or_agent_explain_it(sandbox: Sandbox):
    assert sandbox.run("train.py", *TRAIN) == DONE
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
            for damage in damages(sandbox):
                for reader in [*readers[""], *readers.get(name.parts[0], ())]:
                    shutil.copytree(sandbox.folder / "run", sandbox.folder / "foreign")
                    damage(sandbox.folder / "foreign" / name, rng)
                    sandbox.about = f"{damage.__name__} in {name}"
                    sandbox.run(*reader.split(), own=("foreign",))
                    sandbox.clean()


def test_an_evaluation_goes_on_from_a_damaged_folder_or_refuses(sandbox: Sandbox):
    assert sandbox.run("evaluate.py", *EVALUATE.split()) == DONE
    good = sandbox.folder / "out"
    expected = json.loads((good / "results.json").read_text())
    shutil.move(good, sandbox.folder / "whole")
    sandbox.keep_as_it_is()
    rng = random.Random("evaluation")
    for path in sorted((sandbox.folder / "whole").rglob("*")):
        for damage in damages(sandbox) if path.is_file() else ():
            shutil.copytree(sandbox.folder / "whole", good)
            damage(good / path.relative_to(sandbox.folder / "whole"), rng)
            sandbox.about = f"{damage.__name__} in {path.name}"
            code = sandbox.run("evaluate.py", *EVALUATE.split(), own=("out",))
            if code == DONE:
                results = json.loads((good / "results.json").read_text())
                sandbox.check("other results", results.keys() == expected.keys())
            sandbox.clean()
