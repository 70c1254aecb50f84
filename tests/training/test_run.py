"""When a run saves, exports, stops and resumes, and its warm-up on a GPU."""

import asyncio
import gc
import json
import shutil
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from prompt_r1.environments.budget import Budget, OutOfBudget
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.evaluation import after_training
from prompt_r1.grpo import grpo_loss
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.policy import Policy
from prompt_r1.pair.agent import load_agent
from prompt_r1.pair.named_agent import STEP_FILE, exported_step
from prompt_r1.programs import folders
from prompt_r1.reward import RULES
from prompt_r1.settings.train import TrainConfig
from prompt_r1.spending import Spending
from prompt_r1.training import record as record_file
from prompt_r1.training import resume as resume_file
from prompt_r1.training.checkpoint import State, begin_states, tensors_of
from prompt_r1.training.log import Log, read_metrics
from prompt_r1.training.record import IDLE_STEPS, Record
from prompt_r1.training.resume import resume_run
from prompt_r1.training.run import Run
from prompt_r1.training.run_folder import checkpoints_of
from prompt_r1.training.signals import Interrupt
from prompt_r1.training.start import warm_up
from prompt_r1.training.update import UpdateStats, gap_limit_of
from prompt_r1.types import Question
from tests.support import tiny
from tests.support.exports import file_size_limit, load_tensors
from tests.support.games import GOOD, ONE_RANK, RIGHT, WRONG, game_of_turns, score_and_compare
from tests.support.providers import environment_of
from tests.support.thread_ranks import on_each_rank

CONFIG = TrainConfig(
    agent="tiny", data=("own.jsonl",), val_data=("own.jsonl",), save_every=1, lr=1e-2, steps=99
)
QUESTIONS = [Question("q", "own", "Who?", ("Anna",))] * 50
HEALTHY = {"format": 1.0, "reward/mean": 0.5, "entropy": 0.2, "grad_norm": 0.3, "turns": 2.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_agent(tmp_path_factory.mktemp("base"))


@dataclass(kw_only=True)
class ScriptedRun(Run):
    """A run without an engine, which notes the first weight at each refresh."""

    refreshed: list[float] = field(default_factory=list)

    def refresh(self) -> None:
        self.refreshed.append(self.weight())

    def weight(self) -> float:
        return next(self.policy.parameters())[0, 0].item()


@dataclass
class ScriptedRecord(Record):
    """A record of scripted steps: each writes its number into a weight, and has the given metrics."""

    validation: dict[str, float] = field(default_factory=dict)  # metrics of the next validation

    def validate(self) -> dict[str, float]:
        return self.validation | {"val/format": 1.0}

    def step(self, **metrics: float) -> None:
        """Take the next step and finish it with metrics; `val_em` stands for "val/em"."""
        has_begun = bool(read_metrics(self.run.folder))  # A new run begins with step 0.
        number = self.state.trained_step + has_begun
        with torch.no_grad():
            next(self.run.policy.parameters())[0, 0] = number
        line, self.validation = {"step": number, **HEALTHY}, {"val/n": 10, "val/errors": 0}
        if "val_em" in metrics:
            self.validation |= {"val/reward": 0.0, "val/format": 1.0}
        for name, value in metrics.items():
            if name.startswith("val_"):
                self.validation[name.replace("_", "/")] = value
            else:
                line[name] = value
        self.state = replace(self.state, metrics=line)
        self.finish_step()

    def steps(self, count: int) -> None:
        """Take healthy steps."""
        for _ in range(count):
            self.step(val_em=0.1, val_reward=0.1)


def resume(
    folder: Path,
    base: Path,
    *,
    questions: list[Question] = QUESTIONS,
    validation: list[Question] = QUESTIONS,
    ranks: Ranks = ONE_RANK,
    **options: object,
) -> ScriptedRecord:
    """Start a scripted run, or resume it from the newest checkpoint in the folder."""
    config = replace(CONFIG, **options)
    policy = tiny.policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr)
    begin_states(optimizer)
    run = ScriptedRun(
        config=config,
        folder=folder,
        ranks=ranks,
        runner=asyncio.Runner(),
        interrupt=Interrupt(),
        environment=environment_of(tiny.ScriptedEnvironment([])),
        start=base,
        agent=None,  # No game is played.
        policy=policy,
        reference=None,
        questions=SimpleNamespace(training=questions, validation=validation, test=()),
        optimizer=optimizer,
        own_reward=None,
        own_advantages=None,
        loss_function=grpo_loss,
        gap_limit=gap_limit_of(policy),
        log=Log(folder, rank=ranks.rank),
    )
    return ScriptedRecord(**vars(resume_run(run)))


def test_only_the_first_rank_changes_the_run_folder_at_the_start(base, tmp_path, monkeypatch):
    """If two ranks cleaned it, one might remove or rename what the other one has just moved."""
    changed = []
    for name in ("newest_checkpoint", "trim_run", "write_yaml"):
        monkeypatch.setattr(resume_file, name, lambda *_, name=name, **options: changed.append(name))
    on_each_rank(2, lambda ranks: resume(tmp_path, base, ranks=ranks))
    assert changed == ["newest_checkpoint", "trim_run", "write_yaml"]


def test_the_reward_decides_between_agents_with_equal_em(base, tmp_path):
    record = resume(tmp_path, base)
    for reward in (0.2, 0.5, 0.4, 0.5):
        record.step(val_em=0.0, val_reward=reward)
    assert record.state.best.step == 1 == exported_step(tmp_path / "agent")  # the first of two equal rewards
    record.step(val_em=0.0, val_reward=0.1)
    kept = [int(folder.name[5:]) for folder in checkpoints_of(tmp_path)]
    assert kept == [1, 3, 4], "the two newest checkpoints and the best one"


def test_without_validation_the_newest_agent_is_exported(base, tmp_path):
    record = resume(tmp_path, base, val_data=(), steps=6, save_every=4)
    record.step()
    assert checkpoints_of(tmp_path) == []  # nothing has been trained yet
    record.steps(5)
    assert record.state.best.step == 4 == exported_step(tmp_path / "agent")
    record.step()  # the last one
    assert record.state.best.step == 6 == exported_step(tmp_path / "agent")
    assert [int(folder.name[5:]) for folder in checkpoints_of(tmp_path)] == [4, 6]


@pytest.mark.parametrize("settings", [{}, {"reward": "my_code:reward"}])
def test_until_a_validation_succeeds_the_newest_agent_is_exported(base, tmp_path, settings):
    """A bug: the environment broke each game of each validation, and the run ended without an agent."""
    record = resume(tmp_path, base, **settings)
    for _ in range(3):
        record.step(val_n=0, val_errors=10)
    assert record.state.best.step == 2 == exported_step(tmp_path / "agent")
    record.step(val_em=0.0, val_reward=-0.5)
    record.step(val_n=0, val_errors=10)
    assert record.state.best.step == 3 == exported_step(tmp_path / "agent"), "a validation has judged it"


@pytest.mark.parametrize(("settings", "best"), [({}, 1), ({"reward": "my_code:reward"}, 2)])
def test_the_best_agent_is_the_best_by_em_or_by_the_users_own_reward(base, tmp_path, settings, best):
    record = resume(tmp_path, base, **settings)
    for em, mean in ((0.2, -0.9), (0.5, -0.5), (0.4, -0.1), (0.4, -0.1)):
        record.step(val_em=em, val_reward=mean)
    assert record.state.best.step == best == exported_step(tmp_path / "agent")


def test_an_outage_that_breaks_the_hard_games_of_a_validation_makes_no_agent_the_best(base, tmp_path):
    """A bug: val/em leaves broken games out, so 8 right answers of 10 lost against 7 of 8."""
    record = resume(tmp_path, base)
    record.step(val_em=8 / 10, val_reward=0.5, val_n=10, val_errors=0)
    record.step(val_em=7 / 8, val_reward=0.6, val_n=8, val_errors=2)
    assert record.state.best.step == 0 == exported_step(tmp_path / "agent")
    record.step(val_em=9 / 9, val_reward=0.4, val_n=9, val_errors=1)  # at least 9 of 10 are right
    assert record.state.best.step == 2 == exported_step(tmp_path / "agent")


def test_an_em_that_is_equal_but_for_the_digits_of_the_log_makes_no_agent_the_best(base, tmp_path):
    """A bug: 7 right games of 9 are logged as 0.777778, and so 7 of 10 were a little more than 0.7."""
    record = resume(tmp_path, base)
    record.step(val_em=7 / 10, val_reward=0.6, val_n=10, val_errors=0)
    record.step(val_em=7 / 9, val_reward=0.5, val_n=9, val_errors=1)
    assert record.state.best.step == 0 == exported_step(tmp_path / "agent")


def stop(*_: object, **options: object) -> None:
    raise Resumable("the machine stopped")


def exported_weight(folder: Path) -> float:
    """The weight into which a scripted step writes its number."""
    name = next(name for name, _ in tiny.policy().model.named_parameters())
    return load_tensors(folder / "agent")[name][0, 0].item()


def test_a_stop_before_a_checkpoint_is_complete_leaves_no_agent_that_no_checkpoint_names(
    base, tmp_path, monkeypatch
):
    """A bug: on a GPU the repeated step may be worse, and the agent of the lost step stayed to the end."""
    record = resume(tmp_path, base)
    record.step(val_em=0.2, val_reward=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(record_file, "save_checkpoint", stop)
        with pytest.raises(Resumable):
            record.step(val_em=0.5, val_reward=0.1)
    resumed = resume(tmp_path, base, steps=1)
    resumed.step(val_em=0.1, val_reward=0.1)
    assert resumed.state.best.step == 0 == exported_step(tmp_path / "agent")


@pytest.mark.parametrize("steps", [1, 99])
def test_an_agent_whose_export_was_interrupted_is_exported_by_the_resumed_run(
    base, tmp_path, monkeypatch, steps
):
    """Even if it was the agent of the last step, so that no validation follows."""
    record = resume(tmp_path, base, steps=steps)
    record.step(val_em=0.2, val_reward=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(record_file, "export_agent", stop)
        with pytest.raises(Resumable):
            record.step(val_em=0.5, val_reward=0.1)
    assert exported_step(tmp_path / "agent") == 0
    resumed = resume(tmp_path, base, steps=steps)
    assert resumed.state == resumed.saved and resumed.state.best.step == 1
    assert exported_step(tmp_path / "agent") == 1 == exported_weight(tmp_path)
    assert json.loads((tmp_path / "agent" / STEP_FILE).read_text())["val/em"] == 0.5


def test_a_removed_agent_is_exported_again_from_its_checkpoint(base, tmp_path):
    record = resume(tmp_path, base)
    for em in (0.2, 0.5, 0.1, 0.1):
        record.step(val_em=em, val_reward=0.1)
    shutil.rmtree(tmp_path / "agent")
    resumed = resume(tmp_path, base)
    assert resumed.state.best.step == 1 == exported_step(tmp_path / "agent") == exported_weight(tmp_path)
    assert resumed.state.trained_step == 3 == resumed.run.weight()
    assert resumed.run.refreshed == [3.0]


def test_where_the_best_agent_is_lost_the_best_one_is_chosen_from_the_resumed_step_on(base, tmp_path):
    """The checkpoint of step 1 is removed when step 3 is the best, and then that of step 3 is damaged."""
    record = resume(tmp_path, base)
    for em in (0.2, 0.5, 0.1, 0.6):
        record.step(val_em=em, val_reward=0.1)
    (tmp_path / "checkpoints" / "step-000003" / "state.json").unlink()
    resumed = resume(tmp_path, base)
    resumed.finish_step()
    assert resumed.state.best.em == 0.1 and resumed.state == resumed.saved
    assert resumed.state.best.step == 2 == exported_step(tmp_path / "agent") == exported_weight(tmp_path)
    resumed.step(val_em=0.05, val_reward=0.1)
    assert exported_step(tmp_path / "agent") == 2
    resumed.step(val_em=0.2, val_reward=0.1)
    assert exported_step(tmp_path / "agent") == 4


def test_a_finished_run_whose_best_agent_is_lost_gets_the_agent_of_the_resumed_step(base, tmp_path):
    """As where somebody copied only the newest checkpoint. It ended without an agent, or with "no folder"."""
    record = resume(tmp_path, base)
    for em in (0.2, 0.5, 0.1):
        record.step(val_em=em, val_reward=0.1)
    shutil.rmtree(tmp_path / "agent")
    shutil.rmtree(tmp_path / "checkpoints" / "step-000001")
    resume(tmp_path, base).finish_step()
    assert exported_step(tmp_path / "agent") == 2 == exported_weight(tmp_path)


def test_a_full_disk_in_an_export_stops_the_run_which_exports_the_agent_when_it_is_resumed(
    base, tmp_path, monkeypatch
):
    """The error of the safetensors library ended the run with a traceback."""
    record = resume(tmp_path, base)
    record.step(val_em=0.2, val_reward=0.1)
    export_agent = record_file.export_agent

    def on_a_full_disk(*arguments: object, **options: object) -> None:
        with file_size_limit(20_000):
            export_agent(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(record_file, "export_agent", on_a_full_disk)
        with pytest.raises(Resumable, match=r"agent could not be written: .*File too large.*make room"):
            record.step(val_em=0.5, val_reward=0.3)
    assert not (tmp_path / folders.TEMPORARY).exists()  # the room that it took is free again
    assert exported_step(tmp_path / "agent") == 0
    resume(tmp_path, base)
    assert exported_step(tmp_path / "agent") == 1


def test_a_checkpoint_that_cannot_be_written_stops_the_run(base, tmp_path):
    record = resume(tmp_path, base)
    record.steps(2)
    sentence = r"step-000002 could not be written: File too large: make room"
    with file_size_limit(1_000), pytest.raises(Resumable, match=sentence):
        record.step()
    assert [int(path.name[5:]) for path in checkpoints_of(tmp_path)] == [0, 1]


def run_to_step_5(base: Path, folder: Path, **options) -> ScriptedRecord:
    """A run that validated best at step 2, was saved at step 4, and has completed step 5."""
    record = resume(folder, base, save_every=2, **options)
    for em in (0.2, 0.0, 0.5, 0.0, 0.4, 0.0):
        record.step(**({"val_em": em, "val_reward": 0.0} if em else {}))
    return record


def test_a_resumed_run_plays_with_the_weights_of_the_checkpoint_and_writes_the_next_ones(base, tmp_path):
    run_to_step_5(base, tmp_path)
    resumed = resume(tmp_path, base)
    assert resumed.run.refreshed == [4.0]
    resumed.steps(4)
    assert checkpoints_of(tmp_path)[-1].name == "step-000008"


def test_a_run_whose_questions_have_changed_is_not_resumed(base, tmp_path):
    """The name of the data file was compared, but not what is in it."""
    run_to_step_5(base, tmp_path)
    for change in ({"text": "When?"}, {"answers": ("Berta",)}, {"kind": "math"}):
        changed = [*QUESTIONS[:-1], replace(QUESTIONS[-1], **change)]
        with pytest.raises(UsageError, match=r"step-000004 .*other questions"):
            resume(tmp_path, base, questions=changed)
    assert resume(tmp_path, base).state.trained_step == 4


def test_a_run_whose_validation_questions_have_changed_is_not_resumed(base, tmp_path):
    """A bug: EM of other questions was compared with that of the best agent so far, in silence."""
    run_to_step_5(base, tmp_path)
    for changed in (QUESTIONS[:-1], [], [replace(QUESTIONS[0], text="When?"), *QUESTIONS[1:]]):
        with pytest.raises(UsageError, match=r"step-000004 .*other validation questions.*--val-data"):
            resume(tmp_path, base, validation=changed)
    assert resume(tmp_path, base).state.best.em == 0.5


def test_a_checkpoint_of_an_older_version_is_refused_in_one_sentence(base, tmp_path):
    """It names no format, and holds the state of a sampler of questions."""
    run_to_step_5(base, tmp_path)
    newest = checkpoints_of(tmp_path)[-1]
    state = json.loads((newest / "state.json").read_text())
    del state["format"]
    (newest / "state.json").write_text(json.dumps(state | {"sampler": {"epoch": 0, "position": 10}}))
    folders.write_manifest(newest)
    with pytest.raises(UsageError, match=r"another version.*another --out$"):
        resume(tmp_path, base)


def test_a_signal_during_a_step_ends_the_run_after_the_step_and_its_alarm(base, tmp_path, capsys):
    """A bug: the alarm was left to the resumed run, which takes it as reported when it reads the line."""
    record = resume(tmp_path, base)
    record.run.interrupt.stop = Resumable("SIGTERM was received")
    with pytest.raises(Resumable, match="SIGTERM was received"):
        record.step(kl=float("nan"))
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]
    assert "Alarm at step 0: kl is nan" in capsys.readouterr().out


def test_a_report_is_written_with_each_checkpoint(base, tmp_path):
    record = resume(tmp_path, base, save_every=2, val_data=())
    record.steps(2)
    assert not (tmp_path / "report.html").exists()
    record.step()
    assert (tmp_path / "report.html").exists()


def test_an_alarm_is_reported_once_with_its_page_and_the_run_continues(base, tmp_path, capsys):
    record = run_to_step_5(base, tmp_path)
    for _ in range(4):
        record.step(format=0.3)
    said = capsys.readouterr().out
    assert said.count("Alarm at step 8: format is 0.3") == said.count("docs/running.md") == 1
    resumed = resume(tmp_path, base)  # reads the lines again
    resumed.finish_step()
    assert "Alarm at step 8" in capsys.readouterr().out, "the last step is logged again"
    for _ in range(3):
        resumed.step(format=0.3, **{"reward/mean": -0.5})
    said = capsys.readouterr().out
    assert said.count("Alarm") == said.count("Alarm at step 11: reward/mean is -0.5; its median") == 1


@pytest.mark.parametrize(
    ("skipped", "failed", "reason"),
    [
        (0, True, "in 3 steps in a row; in the last one, the environment broke every group$"),
        (2, False, "in the last one, the loss or its gradient was not finite .* smaller --lr.$"),
        (0, False, "in 3 steps in a row; in the last one, every game was cut off, .* larger --max-new"),
    ],
)
def test_consecutive_steps_without_an_optimiser_step_end_the_run(base, tmp_path, skipped, failed, reason):
    record = resume(tmp_path, base)
    idle, trained = SimpleNamespace(taken=0, skipped=skipped), SimpleNamespace(taken=1, skipped=skipped)
    for update in (*[idle] * (IDLE_STEPS - 1), trained, *[idle] * (IDLE_STEPS - 1)):
        record.stop_if_idle(update, environment_failed=failed)
    with pytest.raises(Resumable, match=reason):
        record.stop_if_idle(idle, environment_failed=failed)


def test_the_reason_of_the_last_step_without_an_optimiser_step_is_named_as_such(base, tmp_path):
    """A bug: the reason of the last step was given for all of them."""
    record = resume(tmp_path, base)
    skipped, idle = SimpleNamespace(taken=0, skipped=2), SimpleNamespace(taken=0, skipped=0)
    record.stop_if_idle(skipped, environment_failed=False)
    record.stop_if_idle(skipped, environment_failed=False)
    with pytest.raises(Resumable, match=r"in a row; in the last one, the environment broke every group$"):
        record.stop_if_idle(idle, environment_failed=True)


def test_a_step_whose_validation_was_interrupted_is_resumed_with_its_metrics(base, tmp_path):
    record = run_to_step_5(base, tmp_path)
    # The step is in the weights, but it is not finished.
    record.state = replace(record.state, metrics={"step": 5, "em": 0.25})
    record.save()
    resumed = resume(tmp_path, base)
    assert resumed.state.metrics == {"step": 5, "em": 0.25}
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_run_that_is_resumed_with_fewer_steps_saves_the_step_that_was_not_finished(base, tmp_path):
    """A bug: step 5 was neither the last step nor a multiple of --save-every, and `free_for_test` failed."""
    record = run_to_step_5(base, tmp_path)
    record.state = replace(record.state, metrics={"step": 5, **HEALTHY})
    record.save()
    resumed = resume(tmp_path, base, steps=3, save_every=100)
    resumed.finish_step()
    assert list(resumed.remaining_steps()) == [] and resumed.state == resumed.saved


@pytest.mark.parametrize("val_data", [(), ("own.jsonl",)])
@pytest.mark.parametrize("steps", [5, 3])
def test_the_step_after_which_a_signal_stopped_a_run_can_be_made_its_last_one(
    base, tmp_path, val_data, steps
):
    """A bug: its agent was neither validated nor exported, so there might be no agent/ at all."""
    record = resume(tmp_path, base, save_every=100, val_data=val_data)
    record.steps(5)
    record.run.interrupt.stop = signal = Resumable("SIGTERM was received")
    with pytest.raises(Resumable):
        record.step(em=0.25)
    record.save_and_explain(signal)
    for _ in range(2):  # A kill before the step is finished loses no line.
        resumed = resume(tmp_path, base, save_every=100, val_data=val_data, steps=steps)
    means = {"val/em": 0.5, "val/reward": 0.5, "val/format": 1.0}
    resumed.validation = {"val/n": 10, "val/errors": 0, **means}
    resumed.finish_step()
    assert list(resumed.remaining_steps()) == [] and resumed.state == resumed.saved
    assert exported_step(tmp_path / "agent") == 5
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert lines[-1]["em"] == 0.25 and ("val/em" in lines[-1]) == bool(val_data)


def test_a_last_step_that_was_validated_is_not_validated_again(base, tmp_path):
    """Its agent is not the best one, and the step is no multiple of --save-every."""
    record = resume(tmp_path, base, save_every=2, steps=3)
    for em in (0.1, 0.1, 0.5, 0.2):
        record.step(val_em=em, val_reward=em)
    resumed = resume(tmp_path, base, save_every=2, steps=3)
    resumed.validate = Mock(side_effect=AssertionError)
    resumed.finish_step()
    assert resumed.state == record.state == resumed.saved
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_the_calls_of_a_step_are_logged_though_a_signal_interrupted_its_validation(base, tmp_path):
    """The resumed run logged the calls of the validation alone."""
    record = resume(tmp_path, base)
    record.step(val_em=0.1, val_reward=0.1)
    games_PG = score_and_compare([[game_of_turns(GOOD, RIGHT), game_of_turns(WRONG)]], RULES["release"])
    record.run.log.seconds["rollout"] = 1.0
    record.run.environment.clients[0].counts["paid"] = 3
    signal = Resumable("SIGTERM was received")
    record.validate = Mock(side_effect=signal)
    with pytest.raises(Resumable, match="SIGTERM"):
        record.write_down(1, games_PG, UpdateStats())
    record.save_and_explain(signal)
    resumed = resume(tmp_path, base)
    resumed.run.environment.clients[0].counts["paid"] = 2  # by its validation
    resumed.finish_step()
    assert [line["env/paid"] for line in read_metrics(tmp_path)] == [0, 5]


def test_a_signal_in_a_validation_loses_no_line_of_an_earlier_step(base, tmp_path):
    record = resume(tmp_path, base, save_every=3)
    record.steps(1)  # step 0
    games_PG = score_and_compare([[game_of_turns(GOOD, RIGHT), game_of_turns(WRONG)]], RULES["release"])
    signal = Resumable("SIGTERM was received")
    record.validate = Mock(side_effect=signal)
    for step in (1, 2):
        record.run.log.seconds["rollout"] = 1.0
        record.write_down(step, games_PG, UpdateStats(taken=1))
    record.run.log.seconds["rollout"] = 1.0
    with pytest.raises(Resumable, match="SIGTERM"):
        record.write_down(3, games_PG, UpdateStats(taken=1))
    record.save_and_explain(signal)
    resumed = resume(tmp_path, base, save_every=3)
    resumed.finish_step()
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_a_mistake_of_the_users_function_on_one_rank_is_raised_on_all_when_the_run_is_saved(
    base, tmp_path, monkeypatch
):
    """A bug: the steps since the last checkpoint were lost."""
    saved: list[int] = []
    monkeypatch.setattr(
        record_file, "save_checkpoint", lambda _, state, *rest: saved.append(state.trained_step)
    )

    def fail(ranks: Ranks, *, trained: int) -> str:
        record = resume(tmp_path, base, ranks=ranks)
        record.state = replace(record.state, metrics={"step": trained})
        with pytest.raises(UsageError) as error, record.checkpoint_on_user_error(), ranks.shared_errors():
            if ranks.rank == 1:
                raise UsageError("--reward f raised KeyError")
        return str(error.value)

    sentences = on_each_rank(2, lambda ranks: fail(ranks, trained=0))
    assert sentences == ["--reward f raised KeyError"] * 2 and saved == []
    sentences = on_each_rank(2, lambda ranks: fail(ranks, trained=7))
    resumes = "--reward f raised KeyError; stopped after step 7, the same command resumes the run"
    assert sentences == [resumes] * 2 and saved == [7, 7]


def test_a_run_without_budget_is_said_to_resume_with_a_larger_limit_only(base, tmp_path):
    """A bug: "the same command resumes the run" stood at the end of the sentence, and it did not."""
    record = run_to_step_5(base, tmp_path)
    budget = Budget(max_usd=1.0, charged=Spending(calls=9, usd=1.0))
    with pytest.raises(OutOfBudget) as spent:
        asyncio.run(budget.reserve(Spending(usd=0.1)))
    sentence = str(record.save_and_explain(spent.value))
    assert "larger limit resumes the run" in sentence and "same command" not in sentence
    assert sentence.endswith("stopped after step 5")
    other = str(record.save_and_explain(Resumable("too many calls failed")))
    assert "larger limit" not in other and "stopped after step 5" in other
    assert other.endswith("same command resumes the run")


def test_a_warm_up_leaves_weights_gradients_and_optimiser_as_they_were(base, tmp_path):
    run = resume(tmp_path, base, max_tokens=20, tokens_per_batch=100).run
    run.reference = tiny.policy()
    before = {name: weight.clone() for name, weight in run.policy.named_parameters()}
    states = {name: value.clone() for name, value in tensors_of(run.policy, run.optimizer).items()}
    warm_up(run)
    for name, weight in run.policy.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None, name
    for name, value in tensors_of(run.policy, run.optimizer).items():
        assert torch.equal(value, states[name]), name


def test_the_test_loads_its_agents_without_optimizer_reference_and_cache_in_memory(
    base, tmp_path, monkeypatch
):
    """Qwen3-8B on eight GPUs of 80 GB: beside the training there was no room for the agents of the test."""
    record = resume(tmp_path, base, steps=1)
    run = record.run
    run.agent = load_agent(base, CONFIG, ONE_RANK.device)
    run.reference = tiny.policy()
    record.steps(2)  # The first is step 0, the validation of the start.
    moments = [value for state in run.optimizer.state.values() for value in state.values()]
    held = [weakref.ref(thing) for thing in (run.agent.engine._pool.cache, run.reference, *moments)]
    del moments
    alive: list[bool] = []

    def no_room(path: Path, config: TrainConfig, device: torch.device) -> None:
        gc.collect()  # as `load_policy` does
        alive.extend(reference() is not None for reference in held)
        raise UsageError("no room")

    monkeypatch.setattr(after_training, "load_agent", no_room)
    monkeypatch.setattr(run, "config", replace(run.config, env="none"))
    monkeypatch.setattr(run, "questions", SimpleNamespace(test=QUESTIONS[:1]))
    record.free_for_test()
    with pytest.raises(UsageError, match="no room"):
        after_training.compare_on_test(run)
    assert len(alive) > 4 and not any(alive)


def test_the_report_is_written_when_the_checkpoint_of_its_step_is_there(base, tmp_path, monkeypatch):
    """A report may fail in ways that nobody foresaw. Then the step must be saved already."""
    record = resume(tmp_path, base)

    def fail() -> None:
        raise RuntimeError(f"no report of {checkpoints_of(tmp_path)[-1].name}")

    monkeypatch.setattr(record, "update_report", fail)
    with pytest.raises(RuntimeError, match="no report of step-000000"):
        record.steps(1)


def test_a_state_that_is_saved_already_is_not_written_again(base, tmp_path, monkeypatch):
    """Writing a checkpoint of a large model takes minutes, which a signal may not leave."""
    written: list[int] = []
    save_checkpoint = record_file.save_checkpoint

    def noted(folder: Path, state: State, *rest: object) -> None:
        written.append(state.trained_step)
        save_checkpoint(folder, state, *rest)

    monkeypatch.setattr(record_file, "save_checkpoint", noted)
    record = resume(tmp_path, base)
    record.steps(2)
    assert written == [0, 1]
    record.save_and_explain(Resumable("a signal came"))
    resume(tmp_path, base).save_and_explain(Resumable("a signal came at once"))
    assert written == [0, 1]


def test_a_warm_up_takes_the_memory_of_the_reference_too(base, tmp_path):
    """The KV cache would otherwise take what the reference's forward needs beside the policy."""
    run = resume(tmp_path, base, max_tokens=20, tokens_per_batch=100).run
    run.reference = tiny.policy()
    computed: list[Policy] = []
    for policy in (run.reference, run.policy):
        policy.model.base_model.register_forward_hook(lambda *_, policy=policy: computed.append(policy))
    warm_up(run)
    assert computed == [run.reference, run.policy]


def test_ranks_with_other_questions_are_refused_on_every_rank():
    """A bug: with other orders, some questions were played by two ranks and others by none."""

    def refused(ranks: Ranks) -> bool:
        with pytest.raises(UsageError, match="same list in each process"):
            resume_file.check_same_on_all_ranks(["digest", f"of rank {ranks.rank}"], ranks)
        resume_file.check_same_on_all_ranks(["digest", "of all"], ranks)
        return True

    assert on_each_rank(2, refused) == [True, True]
