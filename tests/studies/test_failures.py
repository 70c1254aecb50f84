"""The failure laboratory: when EM has fallen, what an alarm leads, and that each fault does what it says."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from prompt_r1 import playing
from prompt_r1.environments.specs import pool_of
from prompt_r1.errors import UsageError
from prompt_r1.protocol import INSTRUCTIONS, Codec
from prompt_r1.reward import RULES, score_games
from prompt_r1.studies import __main__ as studies
from prompt_r1.studies import faults
from prompt_r1.studies.failures import HEALTHY, Course, course_of, failures_table, first_alarm, step_of_fall
from prompt_r1.training import update
from prompt_r1.types import GameSettings, Question, Trajectory
from tests.support import tiny
from tests.support.games import GOOD, RIGHT, WRONG, game_of_turns
from tests.support.paths import ROOT
from tests.support.tiny import ScriptedAgent, ScriptedEnvironment, think

QUESTION = Question("q", "test", "Who made it?", ("Anna",))


@pytest.mark.parametrize(
    ("em", "step"),
    [
        ([0.9, 0.95, 0.9, 0.85], None),
        ([0.9, 0.7, 0.9, 0.9], None),  # it came back
        ([0.9, 0.74, 0.7, 0.5], 2),
        ([0.9, 0.76, 0.7, 0.5], 4),  # at step 2 it is only 0.14 lower
        ([0.5, 0.7, 0.6, 0.54], 6),  # below the best, not below the start
        ([0.9], None),
    ],
)
def test_em_has_fallen_where_it_stays_below_the_best(em, step):
    assert step_of_fall(dict(zip(range(0, 20, 2), em, strict=False))) == step


def lines(*, fault_at: int | None, em: list[float]) -> list[dict[str, float]]:
    """The metric lines of a run; from one step on, too many tokens are clipped."""
    return [
        {
            "step": step,
            "val/em": value,
            "val/n": 50,
            "em": 0.5,
            "update/kl": 0.0 if fault_at is None or step < fault_at else 0.05,
            "groups/no_spread": 0.2,
        }
        for step, value in enumerate(em)
    ]


def course(fault_at: int | None, em: list[float]) -> Course:
    return course_of(lines(fault_at=fault_at, em=em))


def test_a_first_step_without_spread_is_the_alarm_of_the_console():
    assert first_alarm([{"step": 1, "groups/no_spread": 1.0}]) == (1, "nothing can be learned from step 1")


def test_the_table_counts_every_run():
    courses = {
        HEALTHY: {0: course(None, [0.9, 0.9, 0.9]), 1: course(None, [0.8, 0.9, 1.0])},
        "learning-rate": {0: course(1, [0.9, 0.9, 0.46]), 1: course(2, [0.8, 0.8, 0.44])},
        "mask": {0: course(1, [0.9, 0.9, 0.9]), 1: course(None, [0.9, 0.9, 0.9])},
    }
    _, _, healthy, row, _ = failures_table(courses).splitlines()
    assert row == "| learning-rate | update/kl | 1, 2 | 2, 2 | 0.85 | 0.450 [0.32, 0.58] |"
    assert healthy == "| healthy | none | –, – | –, – | 0.85 | 0.950 [0.31, 1.00] |"


def test_an_unknown_failure_is_named():
    with pytest.raises(
        UsageError, match=r"there is no failure 'leek' .did you mean leak.*learning-rate, leak"
    ):
        studies.main(["failures", "leek"])


@pytest.fixture
def restored(monkeypatch):
    """What the faults replace is restored after a test."""
    for owner, name in [(playing, "play_question"), (update, "check_gap"), (Trajectory, "add_context")]:
        monkeypatch.setattr(owner, name, getattr(owner, name))


def play_with_fault() -> tuple[Trajectory, ScriptedEnvironment, Codec]:
    """A game of two turns, as it is after the fault that was made."""
    script = ScriptedAgent([think("I ask", prompt="Who?"), think("so", answer="Anna")])
    environment = ScriptedEnvironment(["It was Anna."])
    codec = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])
    settings = GameSettings(max_turns=3, max_tokens=5000, max_new=500)
    agent = SimpleNamespace(codec=codec, game=settings, engine=script)
    how = playing.PlaySettings(temperature=1.0)
    play = playing.play_question(agent, pool_of(environment), QUESTION, how, seed="0", sample=0)
    return asyncio.run(play), environment, codec


def trained_text(game: Trajectory, codec: Codec) -> str:
    pairs = zip(game.tokens, game.sampled, strict=True)
    return codec.tokenizer.decode([token for token, sampled in pairs if sampled])


@pytest.mark.usefixtures("restored")
def test_error_texts_reach_the_agent_as_replies():
    faults.error_texts()
    game, environment, codec = play_with_fault()
    assert game.turns[0].reply == faults.ERROR and not environment.asked
    assert "Error 429" not in trained_text(game, codec)


@pytest.mark.usefixtures("restored")
def test_the_wrong_mask_trains_on_replies_but_not_on_the_question():
    faults.train_on_replies()
    game, _, codec = play_with_fault()
    assert "It was Anna." in trained_text(game, codec) and "Who made it?" not in trained_text(game, codec)
    assert len(game.tokens) == len(game.sampled) == len(game.logprobs)


def test_the_leaky_reward_prefers_the_longer_game():
    short, long = game_of_turns(GOOD, RIGHT), game_of_turns(GOOD, WRONG)
    short.sampled, long.sampled = [True] * 10, [True] * 50
    [normal] = score_games([short], rule=RULES["release"])
    assert faults.pays_for_length(short, normal) == 0.1 < faults.pays_for_length(long, normal) == 0.5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_laboratory_breaks_a_run_and_notices(tmp_path):
    """A few steps with the wrong mask: the first alarm comes before the second update."""
    arguments = ["mask", "--seeds", "0", "--steps", "3", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "prompt_r1.studies", "failures", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    assert done.returncode == 0
    row = (tmp_path / "failures.md").read_text("utf-8").splitlines()[2]
    _, alarms, step, *_ = row.strip("| ").split(" | ")
    assert "engine/logprob_gap" in alarms and int(step) <= 2
