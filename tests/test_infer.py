"""infer.py: what it shows, prints and saves; streamed, piped, interrupted, and under hostile text."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infer
from prompt_r1.cli.dialogue import Dialogue, blocks
from prompt_r1.cli.question_input import read_questions
from prompt_r1.config.yaml_files import GAME_FILE
from prompt_r1.errors import UsageError
from prompt_r1.terminal import printable
from tests import tiny
from tests.paths import ROOT

PIECES = ["<think>", "</think>", "<interaction_prompt>", "</interaction_prompt>", "<answer>", "</answer>",
          "<", "</ans", "\n", "  ", "\r\n", "\x1b[2J", "\ufffd", "a", "Who is it?", "x < y"]  # fmt: skip


def shown(texts: list[str], *, colours: bool = False) -> str:
    """What a turn that arrives as these longer and longer texts writes."""
    written: list[str] = []
    view = Dialogue(written.append, colours=colours)
    for number, text in enumerate(texts, start=1):
        view.turn(text, ended=number == len(texts))
    return "".join(written)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_a_streamed_turn_shows_what_the_whole_turn_shows(text):
    """No letter is written that later turns out to be part of a tag, and none is written twice or never."""
    assert shown([text[:end] for end in range(len(text))] + [text]) == shown([text])


def test_each_block_has_its_label_and_lines_are_indented_under_it():
    text = tiny.think("one\ntwo", prompt="Who is it?")
    assert shown([text]) == "agent thinks one\n             two\nagent asks   Who is it?\n"
    assert shown(["no tags"]) == "agent writes no tags\n" and shown([""]) == ""
    assert blocks("<think>a</think><answer>b <i", ended=False) == [("think", "a"), ("answer", "b")]


def test_colours_are_the_only_difference_that_a_terminal_makes():
    text = tiny.think("a", answer="Anna")
    coloured = shown([text[:20], text], colours=True)
    assert "\x1b[1;32mAnna\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == shown([text])


HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31mred\x00\x08\x7f\ro\u202egnp.exe\u2028line\ud800 ok\ttab\nnext é 漢"


def test_no_text_from_outside_can_move_the_cursor_or_turn_the_direction():
    safe = printable(HOSTILE)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", safe)
    assert safe.startswith("\\x1b[2J\\x1b]0;title\\x07\\x9b31mred")
    assert safe.endswith(" ok\ttab\nnext é 漢")
    written: list[str] = []
    view = Dialogue(written.append, colours=False)
    view.question(HOSTILE), view.reply(HOSTILE), view.turn(HOSTILE, ended=True), view.note("x", HOSTILE)
    assert "\x1b" not in "".join(written) and "\x9b" not in "".join(written)


def test_questions_are_read_from_lines_and_from_json_lines(tmp_path):
    (tmp_path / "q.txt").write_text("Who?\n\n  When? \r\n", "utf-8-sig")
    (tmp_path / "q.jsonl").write_text('{"question": "Who?", "answer": "Anna"}\n\n{"question": " When? "}\n')
    assert read_questions(tmp_path / "q.txt") == read_questions(tmp_path / "q.jsonl") == ["Who?", "When?"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [("q.csv", b"", "only files ending in .txt or .jsonl"), ("q.txt", b"\n \n", "holds no questions"),
     ("q.jsonl", b'{"question": "a"}\n{"text": "b"}', 'row 2: a JSON object with a text "question"'),
     ("q.jsonl", b'{"question": 7}', "row 1"), ("q.txt", b"\xff", "not UTF-8"),
     ("none.txt", None, "No such file")],
)  # fmt: skip
def test_a_bad_file_of_questions_is_named_with_its_row(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        read_questions(tmp_path / name)


@pytest.fixture(scope="module")
def agent(asking_agent, tmp_path_factory) -> Path:
    """The asking agent, with the game that it has learnt."""
    folder = tmp_path_factory.mktemp("infer") / "agent"
    shutil.copytree(asking_agent, folder)
    (folder / GAME_FILE).write_text("instruction: short\nmax_tokens: 900\nmax_new: 80\nmax_turns: 3\n")
    return folder


@pytest.fixture
def ask(agent, tmp_path, monkeypatch, capsys):
    """infer.main with flags, in an empty folder, standard input at its end."""

    def call(*flags: str, typed: str = "") -> str:
        import io

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        infer.main(["--agent", str(agent), "--env", "mini", "--device", "cpu", *flags])
        return capsys.readouterr().out

    return call


def test_several_questions_give_a_json_object_each_with_its_cost(ask, tmp_path):
    lines = ask(
        "--json", "--save", "all.jsonl", "--env-price", "1,2", typed="abc def?\nfed cba?\n"
    ).splitlines()
    told = [json.loads(line) for line in lines]
    assert [game["question"] for game in told] == ["abc def?", "fed cba?"]
    for game in told:
        asked = sum(turn["reply"] is not None for turn in game["turns"])
        assert game["calls"] == asked and game["usd"] == 0.0 and game["seconds"] > 0
    assert (tmp_path / "all.jsonl").read_text().splitlines() == lines


def test_the_saved_text_is_the_dialogue_that_was_shown(ask, tmp_path):
    told = ask("--question", "abc def?", "--save", "dialogue.txt")
    assert (
        told.startswith("question     abc def?\n\nagent ")
        and "\ncost         " in told
        and "\x1b" not in told
    )
    assert (tmp_path / "dialogue.txt").read_text() == told


def test_what_cannot_be_saved_is_said_before_anything_is_asked(ask):
    with pytest.raises(UsageError, match="No such file"):
        ask("--question", "Who?", "--save", "no/such/folder.txt")
    with pytest.raises(UsageError, match="--question or --questions, not both"):
        ask("--question", "Who?", "--questions", "q.txt")


@pytest.mark.slow
def test_ctrl_c_ends_with_what_there_is(agent, tmp_path):
    """The environment hangs; the interrupted game is saved with the turn that was spoken."""
    server = subprocess.Popen(
        [sys.executable, "-m", "prompt_r1.miniworld.serve", "--port", "0", "--latency", "500"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    url = server.stdout.readline().split()[-1]
    line = [sys.executable, str(ROOT / "infer.py"), "--agent", str(agent), "--env", f"mini@{url}",
            "--question", "abc def?", "--temperature", "1", "--seed", "0",
            "--save", str(tmp_path / "cut.jsonl")]  # fmt: skip
    playing = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
                               # A shell starts what runs in its background with Ctrl-C ignored.
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    try:
        while "agent asks" not in playing.stdout.readline():
            assert playing.poll() is None, playing.stderr.read()
        playing.send_signal(signal.SIGINT)
        told, errors = playing.communicate(timeout=20)
    finally:
        playing.kill()
        playing.communicate()
        server.kill()
        server.communicate()
    game = json.loads((tmp_path / "cut.jsonl").read_text())
    assert (
        playing.returncode == 130
        and "Traceback" not in errors
        and "no answer    the game ended: interrupted" in told
    )
    assert game["stop"] == "interrupted" and len(game["turns"]) == 1 and game["turns"][0]["reply"] is None
