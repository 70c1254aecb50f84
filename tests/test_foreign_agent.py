"""What the config of an agent's folder may not do: decide where OPENAI_API_KEY is sent."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prompt_r1.errors import FatalEnvError
from prompt_r1.pair.named_agent import SETTINGS_FILE
from tests.support.json_server import JsonHandler, serving
from tests.support.programs import run_here
from tests.support.providers import KEY, body_of, error_of

ONE_QUESTION = {"id": "1", "question": "abc def?", "answer": "Anna", "data_source": "qa"}


@dataclass
class Listener:
    """An endpoint that records the Authorization header of every request."""

    spec: str = ""
    status: int = 200  # of its replies
    headers: list[str | None] = field(default_factory=list)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            listener.headers.append(self.headers["Authorization"])
            self.body()
            self.answer(listener.status, body_of() if listener.status == 200 else error_of("no key"))

    with serving(Handler) as url:
        listener.spec = f"large@{url}"
        yield listener


@pytest.fixture
def foreign(listener, asking_agent, tmp_path, monkeypatch) -> Path:
    """An agent's folder whose config names the listener as the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "agent"
    shutil.copytree(asking_agent, folder)
    game = "instruction: short\nmax_tokens: 900\nmax_new: 80\nmax_turns: 2\n"
    (folder / SETTINGS_FILE).write_text(f"{game}env: {listener.spec}\n")
    (tmp_path / "questions.jsonl").write_text(json.dumps(ONE_QUESTION) + "\n")
    return folder


def run(program: str, agent: Path, *flags: str) -> None:
    """Ask the agent one question with infer.py or evaluate.py."""
    if program == "infer":
        how = ["--temperature", "1", "--seed", "0", "--device", "cpu"]
        run_here("infer.py", "--agent", agent, "--question", "abc def?", *how, *flags)
    else:
        names = ["--agent", str(agent), "--method", "direct", "opro", "--device", "cpu", "--out", "results"]
        data = ["--data", "questions.jsonl", "--train-data", "questions.jsonl"]
        run_here(
            "evaluate.py", *names, *data, "--val-data", "questions.jsonl", "--optimize-calls", "2", *flags
        )


@pytest.mark.parametrize("named", [(), ("large",), ("large", "small")])
@pytest.mark.parametrize("program", ["infer", "evaluate"])
def test_a_url_in_an_agents_folder_gets_the_key_only_if_the_user_names_it(program, named, foreign, listener):
    """A bug: `infer.py --agent FOREIGN` sent OPENAI_API_KEY to the host that the folder named."""
    specs = ",".join(listener.spec.replace("large", name) for name in named)
    with suppress(SystemExit):  # The agent does not answer; only its requests matter.
        run(program, foreign, *(["--env", specs] if named else []))
    assert len(listener.headers) > 1 and set(listener.headers) == {f"Bearer {KEY}" if named else None}


@pytest.mark.parametrize("program", ["infer", "evaluate"])
def test_an_endpoint_that_misses_the_key_says_how_to_send_it(program, foreign, listener):
    listener.status = 401
    with pytest.raises(FatalEnvError, match=r"check OPENAI_API_KEY; .*--env"):
        run(program, foreign)
