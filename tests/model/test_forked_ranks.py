"""A run on a CPU forks its process into one rank per core."""

import json
import os

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.model import forked_ranks
from prompt_r1.model.forked_ranks import rank_count, usable_cores
from prompt_r1.training.log import read_metrics
from tests.support.programs import SMALL, CallHere, call


@pytest.fixture
def four_cores(monkeypatch, tmp_path):
    """A machine of four cores, which no container and no launcher limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(forked_ranks, "CONTAINER_LIMIT", tmp_path / "cpu.max")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "threads", "cores"),
    [
        (None, None, 4),
        ("max 100000", None, 4),
        ("200000 100000", None, 2),
        ("50000 100000", None, 1),  # half of a core
        ("800000 100000", None, 4),  # the limit is above the affinity
        (None, "3", 3),
        (None, "64", 4),
        ("200000 100000", "1", 1),
    ],
)
def test_affinity_container_and_omp_num_threads_limit_the_cores(
    limit, threads, cores, four_cores, monkeypatch
):
    if limit is not None:
        (four_cores / "cpu.max").write_text(f"{limit}\n")
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("wanted", "questions", "count"), [(0, 16, 4), (0, 8, 2), (0, 2, 1), (1, 16, 1), (3, 16, 3), (6, 16, 6)]
)
def test_a_run_has_a_rank_per_core_with_enough_questions_or_the_wanted_number(
    wanted, questions, count, four_cores
):
    assert rank_count(wanted, device="cpu", questions=questions) == count


@pytest.mark.parametrize("world", ["1", "8"])
def test_the_ranks_of_a_launcher_are_not_forked_again(world, four_cores, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    assert rank_count(4, device="cpu", questions=16) == 1


def test_on_a_gpu_ranks_are_started_by_torchrun(four_cores, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert rank_count(0, device="auto", questions=16) == 1
    assert rank_count(0, device="cpu", questions=16) == 4
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 2"):
        rank_count(2, device="auto", questions=16)


@pytest.mark.slow
def test_forked_ranks_play_the_games_of_one_process_and_print_once(tmp_path, call_here: CallHere):
    """Two steps with one, and with two ranks: the same games in the first step, and nearly equal metrics."""
    line = ["train.py", *SMALL, "--data", "mini:validation", "--steps", "2", "--test-data", "none"]
    games, rows = {}, {}
    for ranks in (1, 2):
        out = tmp_path / f"ranks{ranks}"
        run = call if ranks > 1 else call_here  # a process with threads does not fork
        ended = run(tmp_path, *line, "--out", out, "--ranks", str(ranks))
        assert not ended.returncode, ended.stderr
        assert ended.stdout.count(f"{ranks} × cpu") == 1 and ended.stdout.count("report.html") == 1
        files = sorted((out / "trajectories").glob("step-000001-*"))
        assert len(files) == ranks
        played = [json.loads(game) for file in files for game in file.read_text().splitlines()]
        games[ranks] = sorted(
            (game["question"]["id"], [(turn["text"], turn["reply"]) for turn in game["turns"]])
            for game in played
        )
        rows[ranks] = read_metrics(out)
    assert games[1] == games[2] and len(games[1]) == 8
    for one, two in zip(rows[1], rows[2], strict=True):
        assert one["step"] == two["step"]
    first, second = rows[1][1], rows[2][1]
    assert first["reward/mean"] == second["reward/mean"]
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)
