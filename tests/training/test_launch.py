"""A run that is complete: the same command says so, and anything that is left to do is done."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.config.yaml_files import write_yaml
from prompt_r1.training.launch import _finished_summary

CONFIG = TrainConfig(**{**PRESETS["mini"], "steps": 4})


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that has saved, exported, logged and tested its last step."""
    for name in ("checkpoints/step-000002", "checkpoints/step-000004", "agent"):
        (tmp_path / name).mkdir(parents=True)
    write_yaml(CONFIG, tmp_path / "config.yaml")
    lines = [{"step": step, "reward/mean": 0.5, "em": 0.5, "format": 1.0} for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "agent/training.json").write_text(json.dumps({"step": 0}))
    (tmp_path / "test.md").write_text("a table")
    return tmp_path


def test_a_complete_run_is_summed_up_wherever_it_lies_and_however_it_is_named(run):
    for config in (CONFIG, replace(CONFIG, out=str(run), resume="never"), replace(CONFIG, data=("mini",))):
        first, _, *rest = _finished_summary(run, config).splitlines()
        assert first == (
            f"{run} is finished: step 4 of 4; a larger --steps trains on, and --resume never begins a new run"
        )
        assert f"  {run}/agent: the agent of step 0, a Hugging Face folder" in rest


@pytest.mark.parametrize("missing", ["agent/training.json", "test.md", "config.yaml", "metrics.jsonl"])
def test_a_run_without_one_of_its_results_is_not_complete(run, missing):
    (run / missing).unlink()
    assert _finished_summary(run, CONFIG) == ""


def test_a_run_of_other_settings_or_steps_is_not_complete(run):
    assert _finished_summary(run, replace(CONFIG, steps=5)) == ""
    assert _finished_summary(run, replace(CONFIG, lr=1e-3)) == ""
    (run / "checkpoints/step-000004").rmdir()
    assert _finished_summary(run, CONFIG) == "", "its last step is not saved"
    (run / "checkpoints/step-000002").rmdir()
    assert _finished_summary(run, CONFIG) == ""
    (run / "checkpoints/step-000004").mkdir()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:4]) + "\n")
    assert _finished_summary(run, CONFIG) == "", "its last step is not logged"


def test_a_run_without_test_questions_needs_no_test(run):
    config = replace(CONFIG, test_data=())
    write_yaml(config, run / "config.yaml")
    (run / "test.md").unlink()
    assert _finished_summary(run, config)
