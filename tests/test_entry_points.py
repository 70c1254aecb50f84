"""train.py, infer.py and evaluate.py as a user runs them, with tiny models in the mini world."""

import gc
import json
import re
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from prompt_r1.data.files import write_questions
from prompt_r1.miniworld.questions import mini_questions
from prompt_r1.pair.agent import load_agent
from prompt_r1.training.log import read_metrics
from tests.support import tiny
from tests.support.exports import newest_tensors, recorded_games
from tests.support.paths import ROOT
from tests.support.programs import FOUR_STEPS, SMALL, run_here

pytestmark = pytest.mark.timeout(600)  # trainings in processes of their own, on a machine that may be busy


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> Path:
    return tiny.save_agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, asking_agent) -> Path:
    """A folder with a run of four steps, runs/small; each step has a gradient."""
    folder = tmp_path_factory.mktemp("trained")
    write_questions(folder / "test.jsonl", mini_questions(0, "test")[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_here("train.py", "--agent", asking_agent, "--test-data", "test.jsonl", *FOUR_STEPS)
    assert all(line["grad_norm"] > 0 for line in read_metrics(folder / "runs/small")[1:])
    return folder


def test_a_run_folder_has_the_documented_files_and_metrics(trained):
    run = trained / "runs/small"
    names = "config.yaml metrics.jsonl trajectories journal checkpoints agent report.html test.md"
    names += " .lock"
    assert {path.name for path in run.iterdir()} == set(names.split())
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in lines if "val/em" in line] == [0, 2, 4]
    metrics = """
        reward/mean reward/format reward/answer em f1 turns stop/answered kl clip_frac entropy
        engine/logprob_gap env/calls env/errors env/latency tokens/s time/rollout
    """
    for line in lines[1:]:
        assert set(metrics.split()) <= line.keys()
        assert line["engine/logprob_gap"] <= 1e-4


def test_the_manuals_tables_of_metrics_list_exactly_the_metrics_of_a_run(trained):
    page = (ROOT / "docs/running.md").read_text("utf-8")
    documented: set[str] = set()
    for part in page.split("| in `metrics.jsonl` |")[1:]:
        table = part.split("\n\n")[0]
        for row in table.splitlines()[2:]:
            names = row.split(" | ")[0]
            documented |= set(re.findall(r"`([^`]+)`", names))
    written: set[str] = set()
    for line in read_metrics(trained / "runs/small"):
        written |= line.keys()
    assert documented == written


def test_the_trajectory_files_hold_the_games_of_a_step_with_rewards_and_advantages(trained):
    games = recorded_games(trained / "runs/small", "step-000001")
    assert len(games) == 8
    game = games[0]
    assert len(game["tokens"]) == len(game["sampled"]) and -1 <= game["reward"]["total"] <= 1
    assert len(game["logprobs"]) == game["sampled"].count("1") and max(game["logprobs"]) <= 0
    assert [game["group"] for game in games] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [game["sample"] for game in games] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert game["stop"] in ("answered", "max_turns", "malformed", "max_tokens")
    assert any(game["advantage"] for game in games)
    validated = recorded_games(trained / "runs/small", "validation-000000")
    assert all(-1 <= game["reward"]["total"] <= 1 for game in validated), "used by no update"


def test_a_stopped_and_resumed_run_ends_with_the_same_weights_and_metrics(
    trained, asking_agent, tmp_path, call_here
):
    """As if it had been killed after it wrote the metrics of step 3, and before the next checkpoint."""
    uninterrupted_run, resumed_run = trained / "runs/small", tmp_path / "runs/small"
    shutil.copytree(uninterrupted_run, resumed_run)
    shutil.rmtree(resumed_run / "checkpoints/step-000004")
    (resumed_run / "report.html").unlink()
    (resumed_run / "report.html").mkdir()  # it cannot be written
    metrics = (resumed_run / "metrics.jsonl").read_text().splitlines(keepends=True)
    damaged = [*metrics[:3], '{"step": 3, "reward/mean": 77}\n{"step": 4, "rew']
    (resumed_run / "metrics.jsonl").write_text("".join(damaged))
    line = ["--agent", asking_agent, "--test-data", "none", *FOUR_STEPS]
    resumed = call_here(tmp_path, "train.py", *line)
    assert resumed.returncode == 0 and "Resuming after step 2" in resumed.stdout
    assert "report.html could not be written: [Errno 21] Is a directory" in resumed.stdout
    expected, tensors = newest_tensors(uninterrupted_run), newest_tensors(resumed_run)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    expected_lines, lines = read_metrics(uninterrupted_run), read_metrics(resumed_run)
    assert len(lines) == len(expected_lines)
    for name in ("step", "reward/mean", "loss", "grad_norm", "val/reward"):
        assert [line.get(name) for line in lines] == [line.get(name) for line in expected_lines]


def test_the_paper_preset_runs_end_to_end(agent, tmp_path, call_here):
    """Table 6 with a tiny Qwen3: the paper's instruction, turns, rule and gradient checkpointing."""
    (tmp_path / "own.jsonl").write_text('{"question": "Who is number 1?", "answer": "1"}')
    settings = """
        --config paper --env mini --data own.jsonl --val-data own.jsonl --test-data none --steps 1
        --questions 1 --mini-batch 5 --max-new 24 --max-tokens 3000 --out runs/paper-seed0
    """
    done = call_here(tmp_path, "train.py", "--agent", agent, *settings.split())
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "runs/paper-seed0")
    assert len(lines) == 2 and lines[1]["grad_norm"] >= 0 and "val/reward" in lines[0]
    config = (tmp_path / "runs/paper-seed0/config.yaml").read_text()
    settings = "group_size: 5, lr: 1.0e-06, rule: paper, instruction: paper, max_turns: 5, kl_coef: 0.001"
    for setting in settings.split(", "):
        assert setting in config


def test_training_without_an_environment_makes_no_calls_and_has_one_turn_per_game(
    agent, tmp_path, monkeypatch, capfd
):
    rows = [json.dumps({"question": f"Who is {n}?", "answer": str(n)}) for n in range(2)]
    (tmp_path / "own.jsonl").write_text("\n".join(rows))
    files = ["--data", "own.jsonl", "--val-data", "own.jsonl", "--test-data", "own.jsonl"]
    monkeypatch.chdir(tmp_path)
    line = ["--config", "mini", "--agent", str(agent), *SMALL, "--env", "none", "--steps", "1", *files]
    line += ["--max-new", "8"]
    run_here("train.py", *line, "--out", "alone")
    output = capfd.readouterr().out
    run_folder = tmp_path / "alone"
    table = (run_folder / "test.md").read_text("utf-8")
    assert "environment alone" not in output + table and "| trained agent" in table
    line = read_metrics(run_folder)[1]
    assert line["turns"] == 1 and line["env/calls"] == line["env/paid"] == 0 and line["reward/mean"] <= 0


def test_evaluate_scores_every_method_and_writes_all_predictions(trained, call_here):
    done = call_here(trained, "evaluate.py", "--agent", "runs/small", "--limit", "2", "--out", "scores")
    assert done.returncode == 0, done.stderr
    table = (trained / "scores/tables.md").read_text("utf-8")
    assert table.count("**all**") == 3 and "| untrained |" in table
    assert [line.split()[0] for line in done.stdout.splitlines()[:4]] == [
        *("method", "direct", "untrained", "prompt-r1")
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "agent runs/small, step " in done.stderr and "environment mini, seed 0" in done.stderr
    lines = [json.loads(line) for line in (trained / "scores/predictions.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines].count("direct") == 2 and len(lines) == 6


def test_the_papers_tables_are_printed_again_without_new_calls(trained, monkeypatch, capsys):
    """One command gives ablations, transfer and out-of-distribution questions."""
    monkeypatch.chdir(trained)
    settings = """
        --tables --agent runs/small --env mini mini-b --limit 2 --out tables
        --method direct untrained agent-only prompt-r1
    """
    run_here("evaluate.py", *settings.split())
    first = capsys.readouterr().out
    filled = (trained / "tables/tables.md").read_text("utf-8")
    assert all(f"### Table {number}" in filled for number in (2, 3, 5)) and "| math_ood (n = " in filled
    lines = (trained / "tables/predictions.jsonl").read_bytes()
    assert lines.count(b"\n") == 4 * (2 + 1 + 1 + 2)  # direct and prompt-r1 with both environments
    run_here("evaluate.py", *settings.split())
    assert capsys.readouterr().out == first
    assert (trained / "tables/predictions.jsonl").read_bytes() == lines
    failed = [json.loads(line) for line in lines.splitlines()]
    failed = [line | {"error": "HTTP 500"} if line["method"] == "untrained" else line for line in failed]
    (trained / "tables/predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in failed))
    # Not to be continued: untrained is not asked.
    run_here("evaluate.py", *settings.partition("untrained")[0].split())


def test_evaluate_frees_an_agent_before_it_loads_the_next_and_samples_each_repeat_anew(
    agent, asking_agent, tmp_path, monkeypatch, call_here, request
):
    gc.disable()  # otherwise it may come by chance
    request.addfinalizer(gc.enable)
    opened = []

    def noted(*arguments):
        loaded = load_agent(*arguments)
        opened.extend(map(weakref.ref, loaded.policy.model.modules()))
        return loaded

    def memory_left(device):  # asked before the weights are read
        assert not [ref for ref in opened if ref() is not None], "two agents fill the memory of a GPU"
        return 10**12

    monkeypatch.setattr("prompt_r1.evaluation.making.load_agent", noted)
    monkeypatch.setattr("prompt_r1.model.loading.memory_left", memory_left)
    line = ["--method", "prompt-r1", "untrained", "--env", "mini", "--limit", "1", "--max-turns", "1"]
    line += ["--max-new", "8", "--temperature", "1", "--repeats", "2", "--out", "scores"]
    done = call_here(tmp_path, "evaluate.py", "--agent", agent, asking_agent, *line)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "scores/predictions.jsonl").read_text().splitlines()]
    repeats = [
        {line["raw"] for line in lines if line["agent"] == str(name)} for name in (agent, asking_agent)
    ]
    assert all(len(texts) > 1 for texts in repeats), "the repeats of a question are other games"
