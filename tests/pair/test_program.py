"""`python -m prompt_r1.pair` as a program: usage errors, and a real process that drains."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from prompt_r1.errors import UsageError
from prompt_r1.pair.__main__ import KEY, main
from prompt_r1.pair.api import Limits
from prompt_r1.pair.settings import read_pair
from tests.support.exports import save_playable_run
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "--host 0.0.0.0 --agent mini --env mini",
            "set a key in PROMPT_R1_API_KEY to listen beyond this machine",
        ),
        ("--port 0 --agent mini --env mini --request-usd 1", "--request-usd needs --env-price"),
        (
            "--port 0 --agent mini --env mini --request-usd 1 --env-price 1,2",
            "--request-usd needs a limit of each reply",
        ),
        ("--port 0 --agent no/such --env what?@ever:80", "there is no environment"),
    ],
)
def test_a_mistake_in_the_flags_is_reported_before_the_agent_is_loaded(line, sentence, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(UsageError, match=sentence):
        main(line.split())


def test_the_server_has_the_limits_of_its_flags(asking_agent, monkeypatch):
    """Without a flag there is no limit of dollars."""
    server = Mock(side_effect=UsageError("made"))
    monkeypatch.setattr("prompt_r1.pair.server.ChatServer", server)
    monkeypatch.delenv(KEY, raising=False)
    line = f"--port 0 --device cpu --agent {asking_agent} --env mini --env-price 1,2"
    limits = ' --env-args {"max_tokens":64} --request-usd 0.5 --request-seconds 7'
    for flags in ("", f" --model-name m{limits}"):
        with pytest.raises(UsageError, match="made"):
            main((line + flags).split())
    made = [call.kwargs for call in server.call_args_list]
    assert [settings["model_name"] for settings in made] == ["prompt-r1", "m"]
    assert [settings["limits"] for settings in made] == [Limits(None, 300.0), Limits(0.5, 7.0)]
    assert [settings["key"] for settings in made] == ["", ""]


@pytest.mark.parametrize(
    ("host", "hosts"),
    [("127.0.0.2", ["localhost", "127.0.0.2"]), ("::1", ["localhost", "[::1]"]), ("0.0.0.0", ["*"])],
)
def test_at_a_loopback_address_the_server_is_asked_under_this_address_or_localhost(
    host, hosts, asking_agent, monkeypatch
):
    """A bug: only for 127.0.0.1 was the Host header compared, so a web page could ask a server at ::1."""
    server = Mock(side_effect=UsageError("made"))
    monkeypatch.setattr("prompt_r1.pair.server.ChatServer", server)
    monkeypatch.setenv(KEY, "a-key-of-the-server")
    with pytest.raises(UsageError, match="made"):
        main(f"--host {host} --port 0 --device cpu --agent {asking_agent} --env mini".split())
    made = server.call_args.kwargs
    assert (made["key"], made["hosts"]) == ("a-key-of-the-server", hosts)


def test_the_newest_mini_run_that_was_checked_is_served(asking_agent, tmp_path, monkeypatch):
    """A bug: a run that saved its agent while torch was imported was served, and nothing had checked it."""
    monkeypatch.chdir(tmp_path)
    save_playable_run(Path("runs/checked"), asking_agent, saved=1)

    def read(kind, arguments):
        found = read_pair(kind, arguments)
        save_playable_run(Path("runs/later"), asking_agent, saved=2)
        return found

    monkeypatch.setattr("prompt_r1.pair.__main__.read_pair", read)
    server = Mock(side_effect=UsageError("made"))
    monkeypatch.setattr("prompt_r1.pair.server.ChatServer", server)
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(UsageError, match="made"):
        main("--port 0 --device cpu".split())
    assert server.call_args.kwargs["pair"].about.startswith("agent runs/checked, ")


def test_a_port_in_use_is_reported_before_the_agent_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1, port {port}: Address already"):
            main(["--port", str(port), "--agent", "mini", "--env", "mini"])


@pytest.mark.slow
def test_sigterm_lets_running_questions_end(asking_agent: Path):
    line = [sys.executable, "-m", "prompt_r1.pair", "--agent", str(asking_agent), "--env", "mini"]
    line += ["--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            assert str(asking_agent) in lines[0] and "environment mini" in lines[0]
            found = re.fullmatch(r"prompt-r1 at (http://127\.0\.0\.1:\d+/)v1\n", lines[1])
            assert found, lines
            url = found[1]
            assert lines[2] == f"a page to chat with at {url.rstrip('/')}\n"
            body = {"model": "prompt-r1", "messages": [{"role": "user", "content": "Who?"}], "stream": True}
            with httpx.stream("POST", f"{url}v1/chat/completions", json=body, timeout=60) as stream:
                lines = stream.iter_lines()
                next(lines)  # the game runs
                process.send_signal(signal.SIGTERM)
                assert list(lines)[-2] == "data: [DONE]"
            assert process.wait(30) == -signal.SIGTERM
            assert process.stdout.read().startswith("stopped; spent: ")
            with pytest.raises(httpx.ConnectError):
                httpx.get(url)
        finally:
            process.kill()
