"""Trackers: a missing package, resumed runs, and no tracker."""

import sys
from importlib.util import find_spec

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.storage.run_log import Log

FAKE_WANDB = """
runs = []

class Error(Exception):
    pass

class Run:
    def __init__(self, settings):
        self.settings, self.lines, self.open = settings, [], True

    def log(self, metrics, *, step):
        self.lines.append((step, metrics))

    def finish(self):
        self.open = False

def init(**settings):
    runs.append(Run(settings))
    return runs[-1]
"""


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_install_command(name, tmp_path):
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(UsageError, match=f"{name}: .* not installed; `pip install {name}`"):
        Log(tmp_path, quiet=False, track=name)


def test_wandb_gets_each_line_and_a_resumed_run_continues_the_same_run(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for steps in ([0, 1], [2]):  # the second time resumed
        log = Log(tmp_path, quiet=False, track="wandb")
        for step in steps:
            log.metrics({"step": step, "em": 0.5})
        log.close()
    import wandb

    lines = [[(step, metrics["em"]) for step, metrics in run.lines] for run in wandb.runs]
    assert lines == [[(0, 0.5), (1, 0.5)], [(2, 0.5)]]
    assert len({run.settings["id"] for run in wandb.runs}) == 1 and not any(run.open for run in wandb.runs)
    monkeypatch.delitem(sys.modules, "wandb")


def test_tensorboard_replaces_the_steps_that_a_resumed_run_trains_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, value in ((0, 1.0), (2, 3.0)):
        log = Log(tmp_path, quiet=False, track="tensorboard")
        for step in range(start, 4):
            log.metrics({"step": step, "em": value})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("em")
    assert [(event.step, event.value) for event in events] == [(0, 1.0), (1, 1.0), (2, 3.0), (3, 3.0)]


def test_without_a_tracker_only_the_metrics_are_written(tmp_path):
    log = Log(tmp_path, quiet=False)
    log.metrics({"step": 0, "em": 0.5})
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
