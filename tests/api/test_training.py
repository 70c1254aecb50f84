"""Training from Python, with a callback, one's own environment and one's own metric of answers."""

import asyncio
import sys
import threading

import pytest

import prompt_r1
from prompt_r1.config.functions import import_metric
from prompt_r1.config.train import TrainConfig
from prompt_r1.reward import score
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.types import Question
from tests.played import play_game
from tests.tiny import think

OWN = """
class Oracle:
    def ask(self, messages):
        return "The oracle says " + str(len(messages))

def half(prediction, answers):
    return 0.5

def wrong(prediction, answers):
    return 7
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder with a module of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "own_code.py").write_text(OWN)
    return tmp_path


def test_a_run_in_a_notebook_reports_each_step_and_uses_the_users_own_code(own, asking_agent):
    seen = []

    async def cell():
        return prompt_r1.train(
            "mini",
            agent=asking_agent,
            env="py:own_code:Oracle",
            data=["mini"],
            val_data=["none"],
            test_data=["none"],
            answer_metric="own_code:half",
            steps=2,
            questions=2,
            group_size=2,
            mini_batch=4,
            max_new=64,
            max_tokens=700,
            device="cpu",
            out="run",
            on_step=lambda metrics: seen.append((metrics, threading.current_thread().name)),
        )

    folder = asyncio.run(cell())
    assert str(folder) == "run" and [metrics for metrics, _ in seen] == read_metrics(folder)
    assert [metrics["step"] for metrics, _ in seen] == [0, 1, 2]
    assert {thread for _, thread in seen} == {"prompt-r1-train"}
    games = "".join(path.read_text() for path in folder.glob("trajectories/*"))
    assert "The oracle says 1" in games
    assert "answer_metric: own_code:half" in (folder / "config.yaml").read_text()


def test_the_users_metric_takes_the_place_of_f1_in_the_reward(own):
    question = Question("q", "d", "Who?", answers=("Anna",))
    game = play_game(question, [think("a", prompt="Who?"), think("b", answer="Bob")], ["Anna."])
    assert score(game, rule=TrainConfig(rule="release").reward_rule).total == 0.0
    own_rule = TrainConfig(rule="release", answer_metric="own_code:half").reward_rule
    assert score(game, rule=own_rule).answer == 0.5 and score(game, rule=own_rule).total == 0.5


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own_code", "--answer-metric: give MODULE:NAME"),
        ("no_such_module:f", "--answer-metric: cannot import 'no_such_module:f'"),
        ("own_code:nothing", "--answer-metric: cannot import 'own_code:nothing'"),
        ("own_code:OWN_CODE", "cannot import"),
        ("own_code:__name__", "--answer-metric own_code:__name__: not a function"),
    ],
)
def test_a_metric_that_cannot_be_used_is_refused_before_training(own, name, sentence):
    with pytest.raises(prompt_r1.UsageError, match=sentence):
        prompt_r1.train("mini", answer_metric=name)


def test_a_metric_outside_0_to_1_is_refused(own):
    with pytest.raises(prompt_r1.UsageError, match=r"own_code:wrong returned 7.0 for 'x', not 0 to 1"):
        import_metric("own_code:wrong")("x", ("y",))


def test_a_wrong_setting_raises_instead_of_ending_the_program():
    for settings, sentence in [
        ({"stps": 3}, r"train\(\) has no setting 'stps' \(did you mean steps\?\)"),
        ({"rule": "papr"}, "invalid choice: 'papr'"),
        ({"steps": "many"}, "--steps"),
        ({"lr": -1}, "--lr must be above 0"),
    ]:
        with pytest.raises(prompt_r1.UsageError, match=sentence):
            prompt_r1.train("mini", **settings)
