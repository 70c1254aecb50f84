"""Real runs through the mini world's endpoint, with and without faults."""

import asyncio
import json
import random
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import train
from prompt_r1.environments.journal import Journal
from prompt_r1.programs.command_line import run_program
from prompt_r1.training.log import read_metrics
from prompt_r1.training.preflight import read_training
from tests.support.exports import load_tensors, recorded_games
from tests.support.mini_server import BILLED, FAULTS, GAMES, FaultyServer, with_server
from tests.support.paths import ROOT
from tests.support.programs import command
from tests.support.providers import KEY

ERROR_TEXT = "request failed"  # begins every message of the server's faults


@pytest.fixture(scope="module")
def faulty(asking_agent: Path, tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A step of training, and its run folder. The server accepts one key and fails three requests in ten."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "own.jsonl").write_text('{"question": "Who made Silver River?", "answer": "Anna"}\n')
    serve = [sys.executable, "-m", "tests.support.mini_server", "--port", "0", "--fail", "0.3", "--key", KEY]
    serve += ["--faults", "500", "429", "reset", "garbage"]
    with (
        subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server,
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
    ):
        assert server.stdout is not None
        line = [
            *("--agent", str(asking_agent), "--env", f"mini@{server.stdout.readline().split()[-1]}"),
            *GAMES,
            *"--questions 2 --group-size 8 --mini-batch 8 --max-turns 2 --temperature 0.5 --steps 1".split(),
            *("--test-data", "own.jsonl", "--env-price", "1,2", "--out", "run"),
        ]
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setattr("prompt_r1.environments.environment.back_off", lambda failures: 0.01)
        patch.chdir(folder)
        patch.setattr("sys.argv", ["train.py", *line])
        with pytest.raises(SystemExit) as left:
            run_program(train.main, read_training(line))
        server.kill()
    return subprocess.CompletedProcess([], left.value.code, out.getvalue(), err.getvalue()), folder / "run"


def test_no_trajectory_contains_an_error_text(faulty) -> None:
    done, out = faulty
    assert done.returncode == 0, done.stderr
    rows = recorded_games(out, "step-000001")
    replies = [turn["reply"] for row in rows for turn in row["turns"] if turn["reply"] is not None]
    assert len(rows) == 16 and len(replies) > 5  # three calls in ten failed
    for row in rows:
        shown = json.dumps(row["turns"])
        assert ERROR_TEXT not in shown and "html" not in shown and "HTTP" not in shown
        assert (row["reward"] is None) == (row["stop"] == "env_error")


def test_the_key_is_in_no_file_and_no_output(faulty) -> None:
    """The server puts the Authorization header into the text of every error."""
    done, out = faulty
    secret = re.compile(re.escape(KEY), re.IGNORECASE)
    assert not secret.search(done.stdout) and not secret.search(done.stderr)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if KEY.lower().encode() in path.read_bytes().lower()]


@pytest.mark.slow
def test_a_training_with_faults_in_three_calls_of_ten_ends_with_the_weights_of_a_clean_one(
    asking_agent, tmp_path
) -> None:
    """Eight steps. Calls, lost requests and dollars are those that the server counts."""
    faults = [fault for fault in FAULTS if fault != "hang"]
    clean = FaultyServer()
    faulty = FaultyServer(fail=0.3, faults=faults, rng=random.Random(1))

    async def train_with(server: FaultyServer, out: str) -> None:
        settings = ["--agent", asking_agent, "--env", f"mini@{server.base_url}", "--out", out, *GAMES]
        settings += ["--steps", "8", "--save-every", "8", "--test-data", "none"]
        settings += ["--env-price", "1,2", "--temperature", "0.5"]
        line = command("train.py", *settings)
        with (tmp_path / f"{out}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*line, cwd=tmp_path, stdout=log, stderr=log)
            assert await process.wait() == 0, (tmp_path / f"{out}.log").read_text()

    with_server(train_with(clean, "clean"), clean)
    with_server(train_with(faulty, "faulty"), faulty)
    assert not sum(line.get("env/errors", 0) for line in read_metrics(tmp_path / "faulty"))
    weights = [load_tensors(tmp_path / out / "agent") for out in ("clean", "faulty")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for server, out in ((clean, "clean"), (faulty, "faulty")):
        spent, lines = Journal(tmp_path / out / "journal").charged, read_metrics(tmp_path / out)
        # A lost attempt may be charged that the server has not billed.
        attempts = server.counts["replies"] + sum(server.counts[fault] for fault in BILLED)
        assert attempts <= spent.calls <= attempts + sum(line["env/lost"] for line in lines)
        billed = (server.counts["prompt_tokens"] + 2 * server.counts["completion_tokens"]) / 1e6
        assert spent.usd - spent.lost_usd <= billed + 1e-9 and billed <= spent.usd + 1e-9
        if not spent.lost_usd:
            assert spent.usd == pytest.approx(billed) == pytest.approx(lines[-1]["env/usd"], rel=1e-5)
        print(out, spent, dict(server.counts))
