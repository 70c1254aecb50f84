"""infer.py: its output when streamed, piped, saved and interrupted, and with hostile text."""

import asyncio
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infer
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.own import OwnSource
from prompt_r1.environments.sources import Busy, Reply
from prompt_r1.errors import EnvError, Resumable, UsageError
from prompt_r1.pair.dialogue import DialoguePrinter, DialogueSplitter
from prompt_r1.pair.named_agent import SETTINGS_FILE, NamedAgent
from prompt_r1.pair.settings import InferConfig, choose_pair
from prompt_r1.protocol import parse
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.types import Question, Trajectory, Turn
from tests.support.echo_agent import paid_environment
from tests.support.exports import save_playable_run
from tests.support.pair_server import echo_pair
from tests.support.paths import ROOT
from tests.support.programs import PROGRAMS, run_here

TAGS = ["<think>", "</think>", "<interaction_prompt>", "</interaction_prompt>", "<answer>", "</answer>"]
PIECES = [*TAGS, "<", "</ans", "\n", "  ", "\r\n", "\x1b[2J", "\ufffd", "a", "Who is it?", "x < y"]


def shown(parts: list[str]) -> str:
    """The output for a turn that arrives in these parts."""
    written: list[str] = []
    splitter = DialogueSplitter("".join, DialoguePrinter(written.append).piece)  # its tokens are texts
    for part in parts:
        splitter.add_token(part)
    splitter.end_turn()
    return "".join(written)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_streaming_a_turn_shows_the_same_as_the_complete_turn(text):
    """No part of a tag is shown as text, and every character is shown once."""
    assert shown(list(text)) == shown([text])


@pytest.fixture(scope="module")
def agent(asking_agent, tmp_path_factory) -> Path:
    """The asking agent, with the settings of its game."""
    folder = tmp_path_factory.mktemp("infer") / "agent"
    shutil.copytree(asking_agent, folder)
    (folder / SETTINGS_FILE).write_text("instruction: short\nmax_tokens: 900\nmax_new: 80\nmax_turns: 3\n")
    return folder


@pytest.fixture
def ask(agent, tmp_path, monkeypatch, capsys):
    """Run infer.main with flags in an empty folder; `typed` is its standard input."""

    def call(*flags: str, typed: str | io.TextIOWrapper = "") -> str:
        monkeypatch.chdir(tmp_path)
        if isinstance(typed, str):
            content = io.BytesIO(typed.encode("utf-8", "surrogateescape"))
            typed = io.TextIOWrapper(content, "utf-8", "surrogateescape")
        monkeypatch.setattr("sys.stdin", typed)
        with suppress(SystemExit):  # an agent of a few training steps, which does not always answer
            run_here("infer.py", "--agent", agent, "--env", "mini", "--device", "cpu", *flags)
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("lost", [0, 1])  # requests of each call
def test_json_output_has_one_object_per_question_with_its_own_cost(ask, monkeypatch, lost):
    """Without that of the questions before it, and with that of lost requests."""
    attempt, attempts = OwnSource.attempt, itertools.count(1)

    async def lose_some(source, messages, caller):
        if next(attempts) % (1 + lost):
            raise Busy("reset", wait=0.0, may_be_billed=True)
        return await attempt(source, messages, caller)

    monkeypatch.setattr(OwnSource, "attempt", lose_some)
    flags = ["--json", "--env-price", "1,2", "--temperature", "1", "--seed", "0"]
    lines = ask(*flags, typed="abc def?\nabc def?\n").splitlines()
    games = [json.loads(line) for line in lines]
    assert [game["question"] for game in games] == ["abc def?"] * 2
    for game in games:
        asked = sum(turn["reply"] is not None for turn in game["turns"])
        assert game["calls"] == asked * (1 + lost) > 0 and game["seconds"] > 0
        assert (game["lost_usd"] > 0) == bool(lost)
        price = (game["tokens_in"] + 2 * game["tokens_out"]) / 1e6
        assert game["usd"] == pytest.approx(price) and price > 0


def test_input_that_is_no_text_is_refused(ask):
    """Standard input may give half characters for bytes that are not UTF-8."""
    with pytest.raises(UsageError, match="holds JSON"):
        ask(typed='{"question": "Who?", "answer": "Ada"}\n')
    with pytest.raises(UsageError, match=r"standard input .*UTF-8"):
        ask(typed="who?\nwho \udcff?\n")
    with pytest.raises(UsageError, match=r"standard input .*UTF-8"):
        ask(typed=io.TextIOWrapper(io.BytesIO(b"who \xff?\n"), "utf-8"))


def test_an_agent_without_the_format_is_named_with_what_teaches_it(ask):
    """A bug: a real model showed nothing for minutes, and no flag shortened its turns."""
    shown = ask("--question", "abc def?", "--max-new", "1", "--max-turns", "1")
    assert "`python -m prompt_r1.training.warm_start" in shown
    cut = ask("--question", "Who is the star of Silent Valley?", "--max-new", "12", "--max-turns", "1")
    assert "the game ended" in cut and "warm_start" not in cut


def test_an_agent_that_knows_the_format_is_not_said_to_lack_it_after_one_malformed_turn():
    written: list[str] = []
    game = Trajectory(Question("q", "asked", "Who?", ()), stop="malformed")
    for text in ("<think>a</think><interaction_prompt>Who?</interaction_prompt>", "Hm."):
        game.turns.append(Turn(text, parse(text), None))

    async def play(text, **options):
        return game

    pair = SimpleNamespace(play=play, path="agent", environment=paid_environment())
    asyncio.run(infer.ask_and_show("Who?", pair, DialoguePrinter(written.append), "agent"))
    assert "the game ended: malformed" in "".join(written) and "format;" not in "".join(written)


def test_only_a_dialogue_that_is_shown_is_decoded_token_by_token():
    """A bug would only cost time."""
    watching = []

    async def play(text, *, on_piece):
        watching.append(on_piece is not None)
        return Trajectory(Question("q", "asked", text, ()), stop="malformed")

    pair = SimpleNamespace(play=play, path="agent", environment=paid_environment())
    asyncio.run(infer.ask("Who?", pair))
    asyncio.run(infer.ask_and_show("Who?", pair, DialoguePrinter(str), "agent"))
    assert watching == [False, True]


def test_the_exit_code_says_whether_there_is_an_answer(agent, capsys):
    """A bug: a game that ended without an answer exited with 0, so a script took the empty answer for one."""
    common = ["infer.py", "--agent", agent, "--env", "mini", "--device", "cpu", "--question"]
    with pytest.raises(SystemExit) as ended:
        run_here(*common, "Who is the star of Silent Valley?", "--max-new", "1", "--max-turns", "1")
    assert ended.value.code == 3 and "1 of 1 questions got no answer" in capsys.readouterr().err
    run_here(*common, "Who is the star of Silent Valley?")


def test_a_question_that_is_too_long_does_not_end_the_questions_after_it(agent, monkeypatch, capsys):
    """A bug: the questions after it were not asked, and at the keyboard the session ended."""
    line = "Who is the star of Silent Valley?"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\n{'long ' * 9999}\n{line}\n"))
    with pytest.raises(SystemExit):
        run_here("infer.py", "--agent", agent, "--env", "mini", "--device", "cpu", "--json")
    shown = capsys.readouterr()
    assert shown.err.endswith("1 of 3 questions got no answer\n")
    first, long, last = map(json.loads, shown.out.splitlines())
    assert first["answer"] == last["answer"] is not None
    assert (long["answer"], long["stop"], long["turns"]) == (None, "max_tokens", [])
    assert "shorten it" in long["error"]


def test_several_questions_end_with_their_total_cost(ask):
    shown = ask("--env-price", "1,2", typed="abc def?\nfed cba?\n")
    assert shown.count("question     ") == shown.count("\ncost         ") == 2
    assert shown.endswith("\ntotal        2 questions, 0 calls\n")


def test_questions_that_end_with_an_error_end_with_their_total_and_closed_connections(monkeypatch, capsys):
    environment = paid_environment(max_usd=0.06)  # enough for two calls
    close = AsyncMock()
    monkeypatch.setattr(environment.clients[0].source, "close", close)
    monkeypatch.setattr(infer, "open_pair", AsyncMock(return_value=echo_pair(environment=environment)))
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\nWhen?\nWhere?\n"))
    with pytest.raises(Resumable, match="larger limit"):
        infer.main(choose_pair(InferConfig(env="mini"), ["env"], NamedAgent("agent", AgentConfig(), "agent")))
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == "total        2 questions, 2 calls, 20 + 20 tokens, $0.0400"
    close.assert_awaited_once()


def test_an_environment_that_fails_in_one_of_two_games_ends_with_a_resumable_error(ask, monkeypatch, capsys):
    outcomes = chain([EnvError("HTTP 500")], repeat(Reply("Anna")))
    monkeypatch.setattr(Environment, "ask", AsyncMock(side_effect=outcomes))
    with pytest.raises(Resumable, match=r"1 of 2 dialogues.*: HTTP 500.*try again"):
        ask("--json", "--temperature", "1", "--seed", "0", typed="abc def?\nabc def?\n")
    game, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert (game["stop"], game["error"], game["answer"]) == ("env_error", "HTTP 500", None)


def test_questions_can_be_typed_in_a_python_without_readline(monkeypatch):
    """A bug: the missing module was reported as a bug of this program."""
    monkeypatch.setitem(sys.modules, "readline", None)  # The import raises ImportError.
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n\n"))
    assert list(infer.typed_questions()) == ["Who?"]


def test_the_newest_mini_run_that_was_checked_plays(asking_agent, tmp_path, monkeypatch, capsys):
    """A bug: a run that saved its agent while torch was imported played, and nothing had checked it."""
    monkeypatch.chdir(tmp_path)
    save_playable_run(Path("runs/checked"), asking_agent, saved=1)
    read, main = PROGRAMS["infer.py"]
    settings = read(["--question", "Who is the star of Silent Valley?", "--device", "cpu"])
    save_playable_run(Path("runs/later"), asking_agent, saved=2)
    main(settings)
    assert capsys.readouterr().err.startswith("agent runs/checked, ")


@pytest.mark.slow
def test_ctrl_c_shows_the_interrupted_game(agent, tmp_path):
    """The environment hangs when the signal comes, after the agent's first turn."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.mini_server", "--port", "0", "--fail", "1", "--faults", "hang"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    url = server.stdout.readline().split()[-1]
    line = [sys.executable, str(ROOT / "infer.py"), "--agent", str(agent), "--env", f"mini@{url}"]
    line += ["--question", "abc def?", "--temperature", "1", "--seed", "0"]
    playing = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell starts its background processes with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        seen = ""
        while "agent asks" not in seen:
            letter = playing.stdout.read(1)
            assert letter, playing.stderr.read()
            seen += letter
        playing.send_signal(signal.SIGINT)
        shown, errors = playing.communicate(timeout=20)
    finally:
        playing.kill()
        playing.communicate()
        server.kill()
        server.communicate()
    assert playing.returncode == 130 and "Traceback" not in errors
    assert "no answer    interrupted" in shown
