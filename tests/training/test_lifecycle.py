"""When a run saves, exports, stops and resumes."""

import asyncio
import json
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prompt_r1.agent.names import exported_step
from prompt_r1.config.train import TrainConfig
from prompt_r1.data.sampler import digest_of
from prompt_r1.distributed import Interrupt
from prompt_r1.environments.environment import environment_of
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.storage import atomic_folder
from prompt_r1.storage.checkpoint import State, checkpoints_of
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.training import lifecycle
from prompt_r1.training.lifecycle import IDLE_STEPS, Lifecycle
from prompt_r1.training.parts import Parts
from prompt_r1.training.run import Run
from prompt_r1.types import Question
from tests.support import tiny
from tests.support.games import ONE_RANK
from tests.support.tensors import load_tensors

CONFIG = TrainConfig(
    agent="tiny", data=("own.jsonl",), val_data=("own.jsonl",), val_every=1, lr=1e-2, steps=99, save_every=4
)
QUESTIONS = [Question("q", "own", "Who?", ("Anna",))] * 50
HEALTHY = {"format": 1.0, "reward/mean": 0.5, "entropy": 0.2, "grad_norm": 0.3, "turns": 2.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_agent(tmp_path_factory.mktemp("base"))


@pytest.fixture(autouse=True)
def scripted_validation(monkeypatch):
    """A validation has the metrics of the scripted step."""
    monkeypatch.setattr(lifecycle, "validation_metrics", lambda run, parts, *, step: parts.models.validation)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class ScriptedRun:
    """A `Lifecycle` with scripted steps: each writes its number into a weight, and has the given metrics."""

    def __init__(
        self, folder: Path, base: Path, *, questions_of_the_data: list[Question] = QUESTIONS, **options
    ) -> None:
        config = replace(CONFIG, **options)
        self.policy = tiny.policy()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=config.lr)
        self.refreshed: list[float] = []  # the first weight at each refresh of the engine
        self.models = SimpleNamespace(
            start=base,
            policy=self.policy,
            refresh=lambda: self.refreshed.append(self.weight()),
            validation={},  # metrics of the step that is being completed
        )
        parts = Parts(
            environment=environment_of(tiny.ScriptedEnvironment([])),
            models=self.models,
            questions=SimpleNamespace(digest=digest_of(questions_of_the_data)),
            optimizer=self.optimizer,
            update=SimpleNamespace(check_finite=lambda: None),
        )
        self.run = Run(config, folder, ONE_RANK, asyncio.Runner(), Interrupt())
        self.lifecycle = Lifecycle(self.run, parts)

    @property
    def state(self) -> State:
        return self.lifecycle.state

    def weight(self) -> float:
        return next(self.policy.parameters())[0, 0].item()

    def step(self, **metrics: float) -> None:
        """Take the next step and complete it with metrics; `val_em` stands for "val/em"."""
        number = self.state.step + 1
        with torch.no_grad():
            next(self.policy.parameters())[0, 0] = number
        line, self.models.validation = {"step": number, **HEALTHY}, {}
        for name, value in metrics.items():
            if name.startswith("val_"):
                self.models.validation[name.replace("_", "/")] = value
            else:
                line[name if "/" in name or name == "clip_frac" else name.replace("_", "/")] = value
        self.state.step, self.state.line = number, line
        self.lifecycle._complete()

    def collapse(self) -> None:
        """Take steps with few well-formed games, until the watchdog raises the alarm."""
        for _ in range(4):
            self.step(format=0.3)


def test_an_agent_that_validates_better_is_saved_and_exported_at_once(base, tmp_path):
    run = ScriptedRun(tmp_path, base)
    for em in (0.2, 0.5, 0.4):
        run.step(val_em=em, val_reward=0.0)
    assert run.state.best_step == 1 == exported_step(tmp_path / "agent")
    assert [int(folder.name[5:]) for folder in checkpoints_of(tmp_path)] == [0, 1]


def test_the_reward_decides_between_agents_with_equal_em(base, tmp_path):
    run = ScriptedRun(tmp_path, base)
    for reward in (0.2, 0.5, 0.4, 0.5):
        run.step(val_em=0.0, val_reward=reward)
    assert run.state.best_step == 1  # the first of two equal rewards


def test_without_validation_the_newest_agent_is_exported(base, tmp_path):
    run = ScriptedRun(tmp_path, base, val_data=(), steps=6)
    run.step()
    assert checkpoints_of(tmp_path) == []  # nothing has been trained yet
    for _ in range(5):
        run.step()
    assert run.state.best_step == 4 == exported_step(tmp_path / "agent")
    run.step()  # the last one
    assert run.state.best_step == 6 == exported_step(tmp_path / "agent")
    assert [int(folder.name[5:]) for folder in checkpoints_of(tmp_path)] == [4, 6]


@pytest.mark.parametrize(("settings", "best"), [({}, 1), ({"reward": "my_code:reward"}, 2)])
def test_the_best_agent_is_the_best_by_em_or_by_the_users_own_reward(base, tmp_path, settings, best):
    run = ScriptedRun(tmp_path, base, **settings)
    for em, mean in ((0.2, -0.9), (0.5, -0.5), (0.4, -0.1), (0.4, -0.1)):
        run.step(val_em=em, val_reward=mean)
    assert run.state.best_step == best == exported_step(tmp_path / "agent")


def test_a_failed_export_is_reported_and_made_up_for_at_the_next_save(base, tmp_path, capsys):
    """The best agent was lost where no later one was better."""
    run = ScriptedRun(tmp_path, base)
    run.step(val_em=0.2, val_reward=0.1)
    obstacle = tmp_path / ".agent.tmp"
    obstacle.touch()  # the agent is first written to a folder of this name
    run.step(val_em=0.5, val_reward=0.3)
    assert exported_step(tmp_path / "agent") == 0
    assert f"{tmp_path / 'agent'} could not be written: File exists. The older one" in capsys.readouterr().out
    obstacle.unlink()
    while run.state.step % CONFIG.save_every:
        run.step(val_em=0.4, val_reward=0.3)
    assert run.state.best_step == 1 == exported_step(tmp_path / "agent")
    weights = load_tensors(tmp_path / "agent")
    assert weights["model.embed_tokens.weight"][0, 0] == 1 and run.weight() == run.state.step


def test_a_full_disk_in_an_export_is_reported_and_the_second_in_a_row_stops_the_run(base, tmp_path, capsys):
    """The error of the safetensors library ended the run with a traceback. The resumed run validates and
    exports the step again.
    """
    run = ScriptedRun(tmp_path, base)
    run.step(val_em=0.2, val_reward=0.1)
    with file_size_limit(20_000):
        run.step(val_em=0.5, val_reward=0.3)
        assert "File too large" in capsys.readouterr().out
        assert not (tmp_path / ".agent.tmp").exists()  # the room that it took is free again
        with pytest.raises(Resumable, match=r"agent could not be written: .*, for the second time in a row"):
            run.step(val_em=0.6, val_reward=0.3)
    assert exported_step(tmp_path / "agent") == 0
    run.lifecycle.save(last=True)
    resumed = ScriptedRun(tmp_path, base)
    assert resumed.state.step == 2 and resumed.state.line["step"] == 2
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]


def test_two_failed_exports_with_one_that_succeeds_between_them_do_not_stop_the_run(base, tmp_path):
    run = ScriptedRun(tmp_path, base)
    obstacle = tmp_path / ".agent.tmp"
    for number, fails in enumerate((True, False, True)):
        if fails:
            obstacle.touch()
        run.step(val_em=0.2 * number, val_reward=0.1)
        obstacle.unlink(missing_ok=True)
    assert run.state.step == 2 and exported_step(tmp_path / "agent") == 1


def test_an_agent_of_the_last_step_that_is_not_exported_stops_the_run(base, tmp_path):
    """There is no later save: the run would end as a success, without the agent."""
    run = ScriptedRun(tmp_path, base, val_data=(), steps=1)
    run.step()
    with file_size_limit(20_000), pytest.raises(Resumable, match=r"agent could not be written: .*make room"):
        run.step()
    assert run.state.line  # completed again when the run is resumed


def test_resuming_refreshes_the_engine_with_the_weights_of_the_checkpoint(base, tmp_path):
    run_to_step_6(base, tmp_path)
    assert ScriptedRun(tmp_path, base).refreshed == [4.0]


def test_a_run_whose_questions_have_changed_is_not_resumed(base, tmp_path):
    """The name of the data file was compared, but not what is in it."""
    run_to_step_6(base, tmp_path)
    for change in ({"text": "When?"}, {"answers": ("Berta",)}, {"kind": "math"}):
        changed = [*QUESTIONS[:-1], replace(QUESTIONS[-1], **change)]
        with pytest.raises(UsageError, match=r"step-000004 was made with other questions: give the data"):
            ScriptedRun(tmp_path, base, questions_of_the_data=changed)
    assert ScriptedRun(tmp_path, base).state.step == 4


def test_a_checkpoint_of_an_older_version_is_refused_in_one_sentence(base, tmp_path):
    """It holds the state of a sampler of questions."""
    run_to_step_6(base, tmp_path)
    newest = checkpoints_of(tmp_path)[-1]
    state = json.loads((newest / "state.json").read_text()) | {"sampler": {"epoch": 0, "position": 10}}
    (newest / "state.json").write_text(json.dumps(state))
    (newest / atomic_folder.MANIFEST).unlink()
    atomic_folder.seal(newest, newest.with_name("step-000005"))
    with pytest.raises(UsageError, match=r"by another version, with another state: .* another --out$"):
        ScriptedRun(tmp_path, base)


def test_a_failed_checkpoint_is_reported_and_two_in_a_row_stop_the_run(base, tmp_path, capsys):
    run = ScriptedRun(tmp_path, base, save_every=1)
    folder = tmp_path / "checkpoints"
    obstacles = [folder / f".step-{step:06d}.tmp" for step in (2, 4, 5)]
    run.step()
    run.step()
    for path in obstacles:
        path.touch()  # a checkpoint is first written to a folder of this name
    run.step()
    message = f"{folder / 'step-000002'} could not be written: File exists. The older one stays"
    assert message in capsys.readouterr().out
    run.step()
    run.step()  # the second failure is not in a row with the first: step 3 was saved
    with pytest.raises(Resumable, match=r"step-000005 could not be written: .* for the second time in a row"):
        run.step()
    assert [int(path.name[5:]) for path in checkpoints_of(tmp_path)] == [1, 3]


def test_a_failed_save_on_stop_reports_that_the_step_is_not_saved(base, tmp_path):
    run = run_to_step_6(base, tmp_path)
    (tmp_path / "checkpoints/.step-000006.tmp").touch()
    with pytest.raises(Resumable, match="step 6 is not saved: make room"):
        run.lifecycle.save(last=True)


def test_a_signal_during_a_step_ends_the_run_after_the_step(base, tmp_path):
    run = ScriptedRun(tmp_path, base)
    assert run.run.interrupt.deferred  # there is something to save
    run.run.interrupt.name = "SIGTERM"
    with pytest.raises(Resumable, match="SIGTERM was received"):
        run.step()
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]


def test_a_report_is_written_with_each_checkpoint(base, tmp_path):
    run = ScriptedRun(tmp_path, base)
    for _ in range(4):
        run.step()
    assert not (tmp_path / "report.html").exists()
    run.step()
    assert (tmp_path / "report.html").exists()


def test_saves_that_follow_a_slow_report_do_not_write_it_again(base, tmp_path):
    """A report of a long run takes seconds. At most a twentieth of the time goes into reports."""
    run = ScriptedRun(tmp_path, base, save_every=1, steps=4)
    run.step()  # step 0
    run.step()
    report = tmp_path / "report.html"
    assert report.exists() and run.lifecycle.next_report > time.monotonic()
    last_step = (math.inf, True)
    for next_report, written in [(math.inf, False), (time.monotonic(), True), last_step]:
        report.unlink(missing_ok=True)
        run.lifecycle.next_report = next_report
        run.step()
        assert report.exists() == written


def run_to_step_6(base: Path, folder: Path, **options) -> ScriptedRun:
    """A run that validated best at step 1 and has completed step 6."""
    run = ScriptedRun(folder, base, **options)
    run.step(val_em=0.2, val_reward=0.0)
    run.step(val_em=0.5, val_reward=0.0)
    for _ in range(5):
        run.step()
    return run


def test_with_on_collapse_warn_a_collapse_is_reported_and_the_run_continues(base, tmp_path, capsys):
    run = run_to_step_6(base, tmp_path)
    run.collapse()
    assert run.state.step == 10
    assert "Alarm at step 9: format is 0.3" in capsys.readouterr().out


def test_with_on_collapse_stop_a_collapsed_run_resumes_only_with_warn(base, tmp_path):
    run = run_to_step_6(base, tmp_path, on_collapse="stop")
    with pytest.raises(Resumable, match=r"training has collapsed: format is 0\.3"):
        run.collapse()
    run.lifecycle.save(last=True)
    for _ in range(2):  # a job queue may restart it repeatedly
        with pytest.raises(UsageError, match=r"collapsed at step 9 \(format\); .* --on-collapse warn"):
            ScriptedRun(tmp_path, base, on_collapse="stop")
    resumed = ScriptedRun(tmp_path, base, on_collapse="warn")
    assert resumed.state.step == 9
    resumed.step(format=0.3)  # the alarm is not raised again
    assert resumed.state.step == 10


def test_consecutive_steps_without_an_intact_group_end_the_run(base, tmp_path):
    run = ScriptedRun(tmp_path, base)
    for _ in range(IDLE_STEPS - 1):
        run.step(groups_dropped=1.0)
    run.step()
    for _ in range(IDLE_STEPS - 1):
        run.step(groups_dropped=1.0)
    with pytest.raises(Resumable, match="broke every group of 3 steps"):
        run.step(groups_dropped=1.0)


def test_an_export_without_its_checkpoint_is_repaired_on_resume(base, tmp_path):
    run = run_to_step_6(base, tmp_path)
    (tmp_path / "agent/training.json").write_text('{"step": 6}')  # as if killed after the export of step 6
    resumed = ScriptedRun(tmp_path, base)
    assert resumed.state.step == 4 and resumed.weight() == 4 and resumed.refreshed == [4.0]
    assert exported_step(tmp_path / "agent") == 1 == run.state.best_step


def test_a_step_whose_validation_was_interrupted_is_resumed_with_its_metrics(base, tmp_path):
    run = run_to_step_6(base, tmp_path)
    run.state.line = {"step": 6, "em": 0.25}  # updated, but not completed: its line is in the state
    run.lifecycle.save(last=True)
    resumed = ScriptedRun(tmp_path, base)
    assert resumed.state.step == 6 and resumed.state.line == {"step": 6, "em": 0.25}
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_a_sign_in_a_single_step_is_an_alarm_that_names_the_page_on_failures(base, tmp_path, capsys):
    run = ScriptedRun(tmp_path, base)
    run.step(**{"update/kl": 0.15})
    said = capsys.readouterr().out
    assert said.count("Alarm at step 0: update/kl is 0.15") == said.count("docs/running.md") == 1
