"""When a run saves, stops and goes back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prompt_r1.config.train import TrainConfig
from prompt_r1.data import QuestionSampler
from prompt_r1.distributed.signals import Interrupt
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.storage.checkpoint import State, checkpoints_of
from prompt_r1.storage.export import exported_step
from prompt_r1.storage.run_log import Clock, Log, read_metrics
from prompt_r1.training.console import Console
from prompt_r1.training.lifecycle import IDLE_STEPS, MAX_ROLLBACKS, Lifecycle
from prompt_r1.types import Question
from tests import tiny
from tests.games import ONE_RANK

CONFIG = TrainConfig(
    agent="tiny", data=("own.jsonl",), val_data=("own.jsonl",), lr=1e-2, steps=99, save_every=4
)
WELL = {"format": 1.0, "reward/mean": 0.5, "entropy": 0.2, "grad_norm": 0.3, "turns": 2.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_agent(tmp_path_factory.mktemp("base"))


class Run:
    """A keeper whose steps are ours: each one moves the weights, and has the metrics that we give."""

    def __init__(self, folder: Path, base: Path, **options) -> None:
        config = replace(CONFIG, **options)
        self.policy = tiny.policy()
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=config.lr)
        log = Log(folder, quiet=False)
        self.sampler = QuestionSampler([Question("q", "own", "Who?", ("Anna",))] * 50, seed=0)
        self.refreshed: list[float] = []  # the first weight, whenever the copy that plays is renewed
        console = Console(log, steps=99, priced=False)
        self.lifecycle = Lifecycle(
            config, ONE_RANK, log, console, Clock(), Interrupt(), self.policy, optimizer, self.sampler, base,
            refresh=lambda: self.refreshed.append(self.weight()),
        )  # fmt: skip
        self.state = self.lifecycle.begin()

    def weight(self) -> float:
        return next(self.policy.parameters())[0, 0].item()

    def step(self, **metrics: float) -> None:
        """Do the next step; its number goes into a weight."""
        number = self.state.step + 1
        self.sampler.take(2)
        with torch.no_grad():
            next(self.policy.parameters())[0, 0] = number
        metrics = {
            "step": number,
            **WELL,
            **{name.replace("_", "/"): value for name, value in metrics.items()},
        }
        self.state.step, self.state.sampler, self.state.line = number, self.sampler.state(), metrics
        self.state = self.lifecycle.complete(self.state, dict(metrics))

    def collapse(self) -> None:
        """Steps that are lost to the format gate, until the watchdog sees it."""
        for _ in range(4):
            self.step(format=0.0)


def test_what_validates_better_is_saved_and_exported_at_once(base, tmp_path):
    run = Run(tmp_path, base)
    for em in (0.2, 0.5, 0.4):
        run.step(val_em=em, val_reward=0.0)
    assert run.state.best_step == 1 == exported_step(tmp_path / "agent")
    assert [int(folder.name[5:]) for folder in checkpoints_of(tmp_path)] == [0, 1]


def test_equal_answers_are_told_apart_by_the_reward(base, tmp_path):
    run = Run(tmp_path, base)
    for reward in (0.2, 0.5, 0.4, 0.5):
        run.step(val_em=0.0, val_reward=reward)
    assert run.state.best_step == 1  # of equals the first


def test_without_validation_the_newest_agent_is_kept(base, tmp_path):
    run = Run(tmp_path, base, val_data=(), steps=6)
    run.step()
    assert checkpoints_of(tmp_path) == []  # nothing has been trained yet
    for _ in range(5):
        run.step()
    assert run.state.best_step == 4 == exported_step(tmp_path / "agent")
    run.step()  # the last one
    assert run.state.best_step == 6 == exported_step(tmp_path / "agent")
    assert [int(folder.name[5:]) for folder in checkpoints_of(tmp_path)] == [4, 6]


def test_an_export_that_fails_is_told_and_the_best_step_stays(base, tmp_path, capsys):
    """Else the run would never try again, and the folder would hold an older agent than it says."""
    run = Run(tmp_path, base)
    run.step(val_em=0.2, val_reward=0.1)
    in_the_way = tmp_path / ".agent.tmp"
    in_the_way.touch()  # the agent is written to a folder of this name first
    run.step(val_em=0.5, val_reward=0.3)
    assert (run.state.best_step, run.state.best_em, run.state.best_reward) == (0, 0.2, 0.1)
    assert exported_step(tmp_path / "agent") == 0
    assert f"{tmp_path / 'agent'} could not be written: File exists. The older one" in capsys.readouterr().out
    in_the_way.unlink()
    run.step(val_em=0.4, val_reward=0.3)
    assert run.state.best_step == 2 == exported_step(tmp_path / "agent")


def test_a_resumed_run_plays_with_the_weights_of_its_checkpoint(base, tmp_path):
    begun(base, tmp_path)
    assert Run(tmp_path, base).refreshed == [4.0]


def test_a_resumed_run_goes_on_with_the_next_questions(base, tmp_path):
    begun(base, tmp_path)
    again = Run(tmp_path, base)
    assert again.sampler.state() == again.state.sampler == {"epoch": 0, "position": 10}


def test_a_checkpoint_that_fails_is_told_and_the_second_in_a_row_stops_the_run(base, tmp_path, capsys):
    run = Run(tmp_path, base, save_every=1)
    folder = tmp_path / "checkpoints"
    in_the_way = [folder / f".step-{step:06d}.tmp" for step in (2, 4, 5)]
    run.step()
    run.step()
    for path in in_the_way:
        path.touch()  # a checkpoint is written to a folder of this name first
    run.step()
    told = f"{folder / 'step-000002'} could not be written: File exists. The older one stays"
    assert told in capsys.readouterr().out
    run.step()
    run.step()  # step 3 has been saved in between: the second failure, but not in a row
    with pytest.raises(Resumable, match=r"step-000005 could not be written: .* for the second time in a row"):
        run.step()
    assert [int(path.name[5:]) for path in checkpoints_of(tmp_path)] == [1, 3]


def test_a_last_save_that_fails_says_that_the_step_is_not_saved(base, tmp_path):
    run = begun(base, tmp_path)
    (tmp_path / "checkpoints/.step-000006.tmp").touch()
    with pytest.raises(Resumable, match="step 6 is not saved: make room"):
        run.lifecycle.save(run.state, wait=True)


def test_a_signal_during_a_step_ends_the_run_when_the_step_is_done(base, tmp_path):
    run = Run(tmp_path, base)
    assert run.lifecycle.interrupt.deferred  # there is something to save
    run.lifecycle.interrupt.name = "SIGTERM"
    with pytest.raises(Resumable, match="SIGTERM was received"):
        run.step()
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]


def test_each_checkpoint_comes_with_a_report_of_the_run_so_far(base, tmp_path):
    run = Run(tmp_path, base)
    for _ in range(4):
        run.step()
    assert not (tmp_path / "report.html").exists()
    run.step()
    assert (tmp_path / "report.html").exists()


def begun(base: Path, folder: Path, **options) -> Run:
    """A run that validated best at step 1, and has gone on to step 6."""
    run = Run(folder, base, **options)
    run.step(val_em=0.2, val_reward=0.0)
    run.step(val_em=0.5, val_reward=0.0)
    for _ in range(5):
        run.step()
    return run


def test_a_collapse_is_told_and_the_run_goes_on(base, tmp_path, capsys):
    run = begun(base, tmp_path)
    run.collapse()
    assert run.state.step == 10
    assert "Collapse at step 9: format is 0" in capsys.readouterr().out


def test_a_collapse_stops_the_run_until_it_is_told_to_go_on(base, tmp_path):
    run = begun(base, tmp_path, on_collapse="stop")
    with pytest.raises(Resumable, match="training has collapsed: format is 0"):
        run.collapse()
    run.lifecycle.save(run.state, wait=True)
    for _ in range(2):  # a queue may start it again and again
        with pytest.raises(UsageError, match=r"collapsed at step 9 \(format\); .* --on-collapse warn"):
            Run(tmp_path, base, on_collapse="stop")
    again = Run(tmp_path, base, on_collapse="warn")
    assert again.state.step == 9
    again.step(format=0.0)  # the alarm was given before the stop
    assert again.state.step == 10


def test_a_rollback_goes_back_to_the_best_agent_with_half_the_learning_rate(base, tmp_path):
    run = begun(base, tmp_path, on_collapse="rollback")
    for _ in range(3):
        run.step(format=0.0)
    assert run.state == State(1, {"epoch": 0, "position": 4}, {}, 1, 0.5, 0.0, rollbacks=1)
    assert run.weight() == 1 and run.refreshed == [1.0] and run.sampler.state() == run.state.sampler
    assert run.lifecycle.optimizer.param_groups[0]["lr"] == CONFIG.lr / 2
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]
    assert run.lifecycle.watchdog.recent["format"] == [1.0, 1.0]  # the undone lines are forgotten
    undone = (tmp_path / "metrics-before-rollback-1.jsonl").read_text().splitlines()
    assert [json.loads(text)["step"] for text in undone] == [2, 3, 4, 5, 6, 7, 8, 9]
    for _ in range(3):
        run.step()
    resumed = Run(tmp_path, base, on_collapse="rollback")
    assert resumed.state.step == 4 and resumed.state.rollbacks == 1
    assert resumed.lifecycle.optimizer.param_groups[0]["lr"] == CONFIG.lr / 2


def test_rollbacks_come_to_an_end(base, tmp_path):
    run = begun(base, tmp_path, on_collapse="rollback")
    run.state.rollbacks = MAX_ROLLBACKS
    with pytest.raises(Resumable, match=f"after {MAX_ROLLBACKS} rollbacks"):
        run.collapse()


def test_a_run_that_never_validated_has_nothing_to_go_back_to(base, tmp_path):
    run = Run(tmp_path, base, on_collapse="rollback")
    for _ in range(7):
        run.step()
    with pytest.raises(Resumable, match="after 0 rollbacks"):
        run.collapse()
    assert [int(folder.name[5:]) for folder in checkpoints_of(tmp_path)] == [4, 8]


def test_steps_without_a_game_to_train_on_end_the_run(base, tmp_path):
    run = Run(tmp_path, base)
    lost = {"groups_dropped": 1.0}
    for _ in range(IDLE_STEPS - 1):
        run.step(**lost)
    run.step()
    for _ in range(IDLE_STEPS - 1):
        run.step(**lost)
    with pytest.raises(Resumable, match="broke every group of 3 steps"):
        run.step(**lost)


def test_a_kill_between_an_export_and_its_checkpoint_is_mended(base, tmp_path):
    run = begun(base, tmp_path)
    (tmp_path / "agent/training.json").write_text('{"step": 6}')  # as if step 6 had validated better
    again = Run(tmp_path, base)
    assert again.state.step == 4 and again.weight() == 4 and again.refreshed == [4.0]
    assert exported_step(tmp_path / "agent") == 1 == run.state.best_step


def test_a_step_whose_validation_was_interrupted_is_completed_first(base, tmp_path):
    run = begun(base, tmp_path)
    run.state.line = {"step": 6, "em": 0.25}  # its update is done, its line is not the one that counts
    run.lifecycle.save(run.state, wait=True)
    again = Run(tmp_path, base)
    assert again.state.step == 6 and again.state.line == {"step": 6, "em": 0.25}
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]
