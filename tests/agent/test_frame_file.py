"""The frame of a chat template is kept for the whole run, whatever the template writes on another day."""

import json
from pathlib import Path

import pytest
import torch

import train
from prompt_r1.agent.agent import codec_of, open_agent
from prompt_r1.agent.frame_file import FRAME_FILE, LARGEST_FRAME, keep_frame, kept_frame
from prompt_r1.agent.names import resolve_agent
from prompt_r1.chat_template import Frame, text_of
from prompt_r1.errors import UsageError
from tests.support import tiny

FRAME = Frame("<|im_start|>user\n", "<|im_end|>\n", "é\u2028")
RUN = (
    "--config mini --env mini --data own.jsonl --val-data own.jsonl --test-data own.jsonl --questions 1 "
    "--group-size 2 --mini-batch 2 --max-turns 1 --max-new 4 --max-tokens 900 --device cpu --out run"
).split()


def write_day(folder: Path, day: str) -> None:
    """Let a folder's chat template write this day, as one that writes today's date does."""
    template = "<|im_start|>system\nIt is " + day + ".<|im_end|>\n" + tiny.QWEN3_LIKE_TEMPLATE
    (folder / "chat_template.jinja").write_text(template)


def days_of_games(run: Path) -> set[str]:
    """The days in the openings of all games of a run: of training, validation and test."""
    days = set()
    for file in (run / "trajectories").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            days.add(text_of(tiny.tokenizer(), json.loads(line)["tokens"]).split(".")[0])
    return days


def test_a_run_that_resumes_tomorrow_and_its_agent_keep_todays_prompts(tmp_path, monkeypatch):
    """A bug: templates that write today's date (SmolLM3, Llama 3.2) changed the prompts of a resumed run."""
    monkeypatch.chdir(tmp_path)
    agent = tiny.save_agent(tmp_path / "agent")
    row = {"id": "1", "question": "Who?", "answer": "Anna"}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
    write_day(agent, "Monday")
    train.main(["--agent", str(agent), *RUN, "--steps", "1"])
    write_day(agent, "Tuesday")
    train.main(["--agent", str(agent), *RUN, "--steps", "2"])
    assert days_of_games(tmp_path / "run") == {"<|im_start|>system\nIt is Monday"}
    trained = tmp_path / "run/agent"
    write_day(trained, "Wednesday")
    spec = resolve_agent("run", kv_tokens=0)
    for codec in (codec_of(spec), open_agent(spec, torch.device("cpu")).codec):  # of infer.py and evaluate.py
        assert "It is Monday" in text_of(codec.tokenizer, codec.opening("Who?"))


def test_a_run_that_was_refused_leaves_no_frame_to_the_next_one(tmp_path, monkeypatch):
    """A bug: a second command with another agent and the same --out played with the first agent's prompts."""
    monkeypatch.chdir(tmp_path)
    agent = tiny.save_agent(tmp_path / "agent")
    (tmp_path / "own.jsonl").write_text('{"question": "Who?", "answer": "Anna"}\n')
    write_day(agent, "Monday")
    (tmp_path / "run").mkdir()
    keep_frame(FRAME, tmp_path / "run")
    (tmp_path / "run/.lock").touch()
    train.main(["--agent", str(agent), *RUN, "--steps", "1"])
    assert days_of_games(tmp_path / "run") == {"<|im_start|>system\nIt is Monday"}


def test_a_frame_is_read_as_it_was_written(tmp_path):
    assert kept_frame(tmp_path) is None and kept_frame("Qwen/Qwen3-4B") is None
    keep_frame(FRAME, tmp_path)
    assert kept_frame(tmp_path) == FRAME


HALF_A_CHARACTER = '{"before_user": "\\ud800", "between": "", "generation": ""}'
ENDLESS = '{"before_user": "' + "x" * LARGEST_FRAME + '", "between": "", "generation": ""}'


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "[" * 100_000, '{"before_user": 1}', "\udc80", HALF_A_CHARACTER, ENDLESS],
    ids=lambda content: content[:20],
)
def test_a_file_that_is_no_frame_is_refused(content, tmp_path):
    (tmp_path / FRAME_FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match="does not hold the texts before_user, between, generation"):
        kept_frame(tmp_path)


def test_a_frame_whose_text_has_changed_is_refused(tmp_path):
    """A bug: a run with a flipped bit in this file went on with other prompts, without a word."""
    keep_frame(FRAME, tmp_path)
    file = tmp_path / FRAME_FILE
    file.write_text(file.read_text().replace("im_start", "im_stort", 1))
    with pytest.raises(UsageError, match="as they were written: restore it, or delete it"):
        kept_frame(tmp_path)
