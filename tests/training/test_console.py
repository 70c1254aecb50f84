"""The console output of a training: its rows, progress line, summary and help."""

import asyncio
import fcntl
import json
import os
import re
import struct
import termios
import time
from contextlib import contextmanager, redirect_stderr
from dataclasses import fields

import pytest

from infer import InferConfig
from prompt_r1.cli.command_line import run_program
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.fields import flag_of
from prompt_r1.config.train import TrainConfig
from prompt_r1.storage.run_log import Clock, Log
from prompt_r1.training import console as console_module
from prompt_r1.training.console import COLUMNS, Console, count_calls, header, nothing_to_learn, row, summary
from prompt_r1.types import Question, Reward, ScoredGame
from tests.support.played import play_game
from tests.support.programs import MAINS

STEP = {
    "step": 12,
    "reward/mean": 0.5,
    "em": 0.25,
    "format": 1.0,
    "turns": 2.5,
    "kl": 0.0123,
    "games/s": 40.0,
    "env/usd": 1.5,
    "env/lost_usd": 0.001,
    "val/em": 0.75,
    "val/reward": -0.25,
    "val/format": 0.5,
    "time/rollout": 60.0,
}


def ends_of_words(line: str) -> list[int]:
    """The columns where the labels or numbers of a line end."""
    return [match.end() for match in re.finditer(r"[^\s|:]+", line.replace("| val ", "|     "))]


def test_a_row_shows_rates_with_three_digits_and_the_kl_with_four():
    assert row(STEP, priced=True).split() == (
        "12 0.500 0.250 1.000 2.50 0.0123 $1.50 $0.0010 | 0.750 -0.250 0.500".split()
    )


@pytest.mark.parametrize("priced", [False, True])
def test_numbers_are_right_aligned_with_their_labels(priced):
    labels, numbers = header(priced=priced), row(STEP, priced=priced)
    assert ends_of_words(labels) == ends_of_words(numbers)
    assert len(ends_of_words(labels)) == len(COLUMNS) + 1 + 3 + priced
    assert labels.index("|") == numbers.index("|") and len(labels) <= 80


def test_a_step_without_games_leaves_its_cells_blank():
    line = row({"step": 0, "val/em": 0.5, "val/reward": 0.5, "val/format": 1.0}, priced=False)
    assert line.split() == ["0", "|", "0.500", "0.500", "1.000"]


@contextmanager
def terminal(columns=120):
    """Replace stderr by a pseudo-terminal; calling the result reads its output."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    os.set_blocking(ours, False)
    with os.fdopen(theirs, "w", encoding="utf-8") as stream, redirect_stderr(stream):
        yield lambda: os.read(ours, 65536).decode()
    os.close(ours)


def test_the_progress_line_shows_phase_games_and_the_step(tmp_path):
    console = Console(Log(tmp_path, quiet=False), steps=20, priced=True)
    clock = Clock(console.phase)

    async def play(question: str) -> str:
        return question

    with terminal() as shown_by, console.bar(18):
        for step in (19, 20):
            with clock.phase("rollout"):
                assert asyncio.run(console.counted(play, 5)("Who?")) == "Who?"
                time.sleep(0.11)  # it is drawn ten times a second
                asyncio.run(console.counted(play, 5)("Why?"))
            console.row({**STEP, "step": step})
            console.at(step)
        shown = shown_by()
    assert "rollout 1/5" in shown and "step 19/20" in shown and "left" in shown and "\n" not in shown


def test_the_summary_shows_the_first_and_the_best_validation_and_the_cost(tmp_path):
    lines = [{"step": 0, "val/em": 0.1, "val/reward": 0.2, "val/format": 0.9, "time/validation": 30.0}]
    constant = {"format": 1.0, "games": 8.0, "env/paid": 9.0, "time/rollout": 60.0}
    for n in range(1, 11):
        lines.append({"step": n, "em": n / 10, "reward/mean": n / 20, "env/usd": n * 0.25, **constant})
    lines[6] |= {"val/em": 0.8, "val/reward": 0.7, "val/format": 1.0}
    lines[10] |= {"val/em": 0.3, "val/reward": 0.7, "val/format": 1.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = summary(tmp_path, 6, TrainConfig(env="gpt-4o-mini", test_data=("test.jsonl",)))
    assert shown.index("report.html: ") < shown.index("/agent: ")
    assert shown.startswith("The run\n  validation   EM 0.100")
    assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= 80
    best = "EM 0.100 → 0.800   reward 0.200 → 0.700   format 0.900 → 1.000\n"
    assert f"{best}               from step 0 to step 6, the best" in shown
    assert "10 steps, 80 games, 90 calls of gpt-4o-mini, $2.50, 10 min" in shown
    assert f"python infer.py --agent {tmp_path}\n" in shown
    assert f"python evaluate.py --agent {tmp_path} --data test.jsonl" in shown


def test_the_whole_summary_of_a_run_with_lost_attempts(tmp_path):
    """Every line, with commands that can be typed as they stand."""
    lines = [
        {"step": 0, "val/em": 0.1, "val/reward": 0.2, "val/format": 0.9, "val/calls": 5.0, "env/paid": 5.0}
    ]
    games = {"reward/mean": 0.5, "em": 0.5, "format": 1.0, "games": 800.0, "time/rollout": 3600.0}
    for step in (1, 2):
        line = {"step": step, "env/calls": 1500.0, "env/paid": 1000.0, "env/reused": 500.0, "env/usd": 0.5}
        lines.append({**line, **games, "env/lost_usd": 0.25})
    lines[2] |= {"val/em": 0.9, "val/reward": 0.8, "val/format": 1.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = summary(tmp_path, 2, TrainConfig(env="mini", test_data=("mini",)))
    assert shown.splitlines() == [
        "The run",
        "  validation   EM 0.100 → 0.900   reward 0.200 → 0.800   format 0.900 → 1.000",
        "               from step 0 to step 2, the best",
        "  took         2 steps, 1,600 games, 3,005 calls of mini, "
        "$0.5000 ($0.2500 of it estimated, for lost attempts), 2.0 h",
        "  calls        3,000 in training + 5 in validation",
        "               = 2,005 sent + 1,000 from the journal",
        "Where it is",
        f"  {tmp_path}/report.html: curves and games, to open in a browser",
        f"  {tmp_path}/agent: the agent of step 2, a Hugging Face folder",
        f"  {tmp_path}/metrics.jsonl: the curves; trajectories/: every game",
        f"  {tmp_path}/test.md: the test by dataset",
        "What to type next",
        f"  python infer.py --agent {tmp_path}",
        f"  python evaluate.py --agent {tmp_path} --data mini:ood",
    ]
    (tmp_path / "metrics.jsonl").write_text("")
    empty = summary(tmp_path, 0, TrainConfig(env="model"))
    assert "calls        " not in empty and "test.md" not in empty and empty.endswith("--data FILE")
    assert "validation  " not in empty
    own = summary(tmp_path, 0, TrainConfig(env="py:my_llm:Oracle"))
    assert own.endswith(f"evaluate.py --agent {tmp_path} --env py:my_llm:Oracle --data FILE")
    assert f"infer.py --agent {tmp_path} --env py:my_llm:Oracle" in own


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(119.4, "119 s"), (120, "2 min"), (150.1, "3 min"), (7169, "119 min"), (7170.1, "2.0 h")],
)
def test_a_duration_is_in_the_unit_that_suits_it(seconds, shown):
    assert console_module._duration(seconds) == shown


@pytest.mark.parametrize(("usd", "shown"), [(0.99994, "$0.9999"), (1, "$1.00"), (1234.567, "$1,234.57")])
def test_less_than_a_dollar_has_four_digits(usd, shown):
    assert console_module._as_dollars(usd) == shown


def test_the_labels_are_repeated_every_25_rows(tmp_path, capsys):
    console = Console(Log(tmp_path, quiet=False), steps=60, priced=False)
    for step in range(51):
        console.row({"step": step})
    printed = capsys.readouterr().out.splitlines()
    assert [number for number, line in enumerate(printed) if line.startswith("step")] == [0, 26, 52]
    assert len(printed) == 54 and printed[1] == "   0"


def test_a_run_that_lost_no_attempt_shows_no_lost_dollars():
    assert row({"step": 3, "env/lost_usd": 0.0}, priced=True).split() == ["3", "$0.0000"]


def test_validations_are_compared_from_two_on():
    validated = [{"step": n, "val/em": 0.1, "val/reward": 0.1, "val/format": 0.1} for n in range(2)]
    assert console_module._validation_change(validated[:1], 0) == ""
    assert console_module._validation_change(validated, 5) == ""
    assert "from step 0 to step 1, the best" in console_module._validation_change(validated, 1)


def test_a_count_that_is_not_finite_is_left_out():
    calls = count_calls(
        [{"env/calls": float("nan"), "env/paid": 2.0}, {"env/calls": 3.0, "env/paid": float("inf")}]
    )
    assert (calls.training, calls.sent, calls.total) == (3, 2, 2)


def test_the_alarm_shows_every_turn_of_its_game_and_the_likely_cause():
    question = Question("q", "maths", "Who is it?", ("Anna",))
    game = play_game(question, ["<interaction_prompt>Who?</interaction_prompt>", ""], ["Bob."])
    metrics = {"groups/dropped": 0.0, "groups/no_spread": 1.0, "em": 0.5, "format": 0.5, "reward/mean": 0.5}
    *alarm, asked, first, reply, last, end = nothing_to_learn(
        ScoredGame(game, None, None), metrics
    ).splitlines()
    assert asked == "  question     Who is it?" and reply == "  environment  Bob."
    assert first == "  agent        <interaction_prompt>Who?</interaction_prompt>"
    assert (last, end) == ("  agent        (nothing)", "  ended        malformed, no reward")
    assert "0.50 on average" in " ".join(alarm) and "its games are alike" in " ".join(alarm)


def test_the_calls_of_a_run_add_up_by_game_and_by_answer():
    """The console said 9,600, the report 10,338 and metrics.jsonl both, for the same run."""
    lines = [
        {"step": 0, "val/calls": 10.0, "val/errors": 1.0, "env/paid": 9.0},
        {
            "step": 1,
            "env/calls": 20.0,
            "val/calls": 5.0,
            "env/paid": 15.0,
            "env/reused": 8.0,
            "env/errors": 2.0,
        },
    ]
    calls = count_calls(lines)
    assert calls.total == calls.training + calls.validation == 35
    assert str(calls).split("= ") == [
        "20 in training + 15 in validation\n               ",
        "24 sent + 8 from the journal + 3 failed",
    ]


def scored(text: str, *, reward: float) -> ScoredGame:
    question = Question("q", "maths", "Who is it? \x1b[2J" + "long " * 99, ("Anna",))
    return ScoredGame(play_game(question, [text], []), Reward(0.0, 0.0, reward), 0.0)


def test_a_step_without_any_spread_is_an_alarm_with_one_game():
    """An untrained model never wrote the format, and its run ended like a success."""
    metrics = {"groups/dropped": 0.0, "groups/no_spread": 1.0, "em": 0.0, "format": 0.0, "reward/mean": -1.0}
    shown = nothing_to_learn(scored("I am a language model. " * 9, reward=-1.0), metrics)
    assert "nothing can be learned" in shown and "not to know the format" in shown
    assert "I am a language model." in shown and "malformed, reward -1.00" in shown
    assert max(map(len, shown.splitlines())) <= 80
    game = scored("x", reward=1.0)
    assert "right already" in nothing_to_learn(game, metrics | {"em": 1.0, "reward/mean": 1.0})
    assert nothing_to_learn(game, metrics | {"groups/no_spread": 0.9}) == ""
    assert nothing_to_learn(game, metrics | {"groups/dropped": 1.0}) == ""  # the environment's fault


@pytest.mark.parametrize(
    ("program", "kind"),
    [("train.py", TrainConfig), ("infer.py", InferConfig), ("evaluate.py", EvaluateConfig)],
)
def test_help_fits_one_screen_and_help_all_has_every_flag(program, kind, monkeypatch, capsys):
    shown = {}
    for flag in ("--help", "--help-all"):
        monkeypatch.setattr("sys.argv", [program, flag])
        with pytest.raises(SystemExit) as left:
            run_program(MAINS[program])
        assert left.value.code == 0
        shown[flag] = capsys.readouterr().out
    lines = shown["--help"].splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 80 and "--help-all" in shown["--help"]
    for field in fields(kind):
        line = re.compile(f"^  {flag_of(field.name)}( |$)", re.MULTILINE)
        assert line.search(shown["--help-all"])
        assert bool(line.search(shown["--help"])) == field.metadata["everyday"]
