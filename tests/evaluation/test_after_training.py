"""The test after a training: what it asks, what its tables show, and what it holds in memory."""

import asyncio
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from prompt_r1.environments.own import OwnSource
from prompt_r1.errors import EnvError
from prompt_r1.evaluation import after_training
from prompt_r1.evaluation.after_training import ask_alone, compare_on_test, write_test
from prompt_r1.evaluation.predictions import Prediction, System, prediction_of
from prompt_r1.f1 import f1
from prompt_r1.reward import RULES
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.metrics import metrics_of_game
from prompt_r1.training.validation import mean_metrics
from prompt_r1.types import Question, ScoredGame
from tests.support.games import GOOD, HALF, ONE_RANK, RIGHT, WRONG, game_of_turns, score_and_compare
from tests.support.methods import method, priced
from tests.support.predictions import predict, question_of
from tests.support.tiny import ScriptedEnvironment

NO_TEST = SimpleNamespace(test=[])


def shown(folder: Path, predictions: Sequence[Prediction]) -> tuple[list[str], list[str]]:
    """The lines of the table for the terminal and of test.md, with single blanks."""
    run = SimpleNamespace(ranks=ONE_RANK, folder=folder)
    printed = write_test(run, predictions)
    written = (folder / "test.md").read_text("utf-8")
    return lines_of(printed), lines_of(written)


def lines_of(table: str) -> list[str]:
    return re.sub(" +", " ", table).splitlines()


def test_the_table_has_a_row_for_each_dataset_and_the_mean_over_all_questions(tmp_path):
    half = question_of(2, dataset="a", answers=("Lyon Paris Lyon",))
    assert f1("Paris", half.answers) == 0.5
    rows = [
        predict(question=question_of(1, dataset="a")),
        predict(question=half),
        replace(predict(question=question_of(1, dataset="b")), format=1.0),
    ]
    alone = System("direct")
    printed, written = shown(tmp_path, [replace(row, system=alone) for row in rows])
    assert "| direct | a | 2 | 0 | 0.500 | 0.750 | – | – | – |" in written
    assert "| direct | **all** | 3 | 0 | 0.667 | 0.833 | – | 1.000 | – |" in written
    assert printed == ["test n errors EM F1 reward format turns", "direct 3 0 0.667 0.833 – 1.000 –"]


def test_a_table_of_failed_calls_only_has_no_means(tmp_path):
    _, written = shown(tmp_path, [predict(question=question_of(dataset="a"), error="down")])
    assert "| 0 | 1 | – | – |" in written[-1]


def test_the_means_of_games_are_those_of_a_validation(tmp_path):
    """The oracle is `mean_metrics`, by which validations are measured."""
    broken = game_of_turns(GOOD, stop="env_error")
    games = [game_of_turns(GOOD, RIGHT), game_of_turns(GOOD, HALF), game_of_turns(WRONG), broken]
    for number, game in enumerate(games):
        game.question = replace(game.question, id=str(number))
    [scored] = score_and_compare([games], RULES["release"])
    predictions = [prediction_of(System("agent"), game.trajectory, 0, game.reward) for game in scored]
    printed, _ = shown(tmp_path, predictions)
    validated = mean_metrics([metrics_of_game(game) for game in scored])
    expected = [validated[name] for name in ("em", "f1", "reward", "format", "turns")]
    name, n, errors, *means = printed[-1].split()
    assert (name, n, errors) == ("agent", "3", "1")
    assert list(map(float, means)) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("name", ["mini", "large"])
def test_the_test_asks_the_environment_alone_as_the_method_direct_does(name):
    """The test of a training asked every environment for the "Answer only.", and took the whole reply."""
    questions = [Question("1", "a", "Who?", ("Anna",)), Question("2", "a", "Who else?", ("Bob",))]
    reply = "Anna" if name == "mini" else "It is <answer>Anna</answer>."
    environment = ScriptedEnvironment([reply, EnvError("down")])
    finished: list[int] = []
    asking = ask_alone(
        questions, priced(OwnSource(environment, seed=0, name=name)), after_each=lambda: finished.append(1)
    )
    right, failed = asyncio.run(asking)
    evaluated = ScriptedEnvironment([reply])
    direct = method("direct", priced(OwnSource(evaluated, seed=0, name=name)))
    assert asyncio.run(direct(questions[0], 0)).answer == right.answer == "Anna"
    assert environment.asked[0] == evaluated.asked[0]
    assert failed.error == "down" and len(finished) == 2
    assert [caller.question for caller in environment.callers] == [
        "1",
        "2",
    ]  # by which one of several environments is drawn


def test_the_test_holds_one_agent_at_a_time(tmp_path, monkeypatch):
    """A bug would only cost memory: the untrained agent would stay while the trained agent is loaded."""

    class LargeAgent:
        pass

    loaded: list[weakref.ref[LargeAgent]] = []
    alive: list[int] = []

    def load(path: Path, config: TrainConfig, device: object) -> LargeAgent:
        alive.append(sum(reference() is not None for reference in loaded))
        agent = LargeAgent()
        loaded.append(weakref.ref(agent))
        return agent

    monkeypatch.setattr(after_training, "load_agent", load)
    [played] = score_and_compare([[game_of_turns(GOOD, RIGHT)]], RULES["release"])
    monkeypatch.setattr(after_training, "play_share", lambda *positional, **named: played)
    run = SimpleNamespace(
        ranks=ONE_RANK, config=TrainConfig(env="none"), questions=NO_TEST, start=tmp_path, folder=tmp_path
    )
    compare_on_test(run)
    assert alive == [0, 0]


def test_answers_are_sent_to_other_ranks_without_the_columns_that_only_rewards_read(tmp_path, monkeypatch):
    """A function of the user gave its questions a database, which cannot be pickled, and the run ended."""
    game = game_of_turns(GOOD, RIGHT)
    game.question = replace(game.question, extra={"database": (row for row in "abc")})
    [played] = score_and_compare([[game]], RULES["release"])
    sent: list[bytes] = []

    def send(predictions: list[Prediction]) -> list[Prediction]:
        sent.append(pickle.dumps(predictions))
        return predictions

    monkeypatch.setattr(after_training, "load_agent", Mock())
    monkeypatch.setattr(after_training, "play_share", lambda *positional, **named: played)
    ranks = Mock(wraps=ONE_RANK, is_first=True, gather_lists=send)
    run = SimpleNamespace(
        ranks=ranks, config=TrainConfig(env="none"), questions=NO_TEST, start=tmp_path, folder=tmp_path
    )
    assert "untrained agent" in compare_on_test(run)
    assert len(pickle.loads(sent[0])) == 2


@pytest.mark.parametrize(("env", "asked"), [("mini", 6), ("none", 4)])
def test_the_progress_of_the_test_counts_the_questions_of_each_system(
    env, asked, tmp_path, monkeypatch, capsys
):
    def play_share(
        *positional: object, after_each: Callable[[], object], **named: object
    ) -> list[ScoredGame]:
        for _ in range(2):
            after_each()
        return []

    monkeypatch.setattr(after_training, "load_agent", Mock())
    monkeypatch.setattr(after_training, "play_share", play_share)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run = SimpleNamespace(
        ranks=ONE_RANK,
        config=TrainConfig(env=env),
        environment=priced(OwnSource(ScriptedEnvironment(["Anna"] * 2), seed=0)),
        questions=SimpleNamespace(test=[question_of(1), question_of(2)]),
        wait_for=asyncio.run,
        start=tmp_path,
        folder=tmp_path,
    )
    monkeypatch.setattr(after_training, "write_test", lambda *_: "")
    compare_on_test(run)
    assert f" {asked}/{asked} " in capsys.readouterr().err.split("\r")[-1]
