"""A run on a CPU forks its process into one rank per core."""

import asyncio
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from prompt_r1.errors import UsageError
from prompt_r1.model import machine
from prompt_r1.model.distributed import RankLost
from prompt_r1.model.machine import usable_cores, use_threads
from prompt_r1.pair.api import open_pair
from prompt_r1.pair.named_agent import SETTINGS_FILE, resolve_agent
from prompt_r1.pair.settings import PairConfig, choose_pair
from prompt_r1.training import forked_ranks
from prompt_r1.training.forked_ranks import fork_ranks, rank_count, wait_for_ranks
from prompt_r1.training.log import read_metrics
from prompt_r1.training.signals import SIGNALS
from tests.support.exports import recorded_games
from tests.support.programs import SMALL, CallHere, call, run_here


@pytest.fixture
def four_cores(monkeypatch, tmp_path):
    """A machine of four cores, which no container and no launcher limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
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


def test_every_cgroup_around_a_process_limits_its_cores(four_cores, monkeypatch):
    """A bug: only the root of the tree was read, so outside of containers no quota counted."""
    own = four_cores / "own"
    own.write_text("0::/system.slice/training.service\n")
    monkeypatch.setattr(machine, "OWN_CGROUP", own)
    service = four_cores / "system.slice" / "training.service"
    service.mkdir(parents=True)
    (service / "cpu.max").write_text("300000 100000\n")
    assert usable_cores() == 3
    (service.parent / "cpu.max").write_text("200000 100000\n")
    assert usable_cores() == 2


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


@pytest.mark.parametrize(
    ("limit", "chosen", "ranks", "threads"),
    [
        ("max 100000", 4, 1, 4),
        ("200000 100000", 4, 1, 2),  # torch does not know the container's limit
        ("200000 100000", 1, 1, 1),
        ("50000 100000", 4, 1, 1),
        ("max 100000", 4, 2, 2),
        ("max 100000", 4, 3, 1),
        ("max 100000", 4, 8, 1),
    ],
)
def test_torch_computes_in_as_many_threads_as_a_rank_has_cores(
    limit, chosen, ranks, threads, four_cores, monkeypatch
):
    (four_cores / "cpu.max").write_text(f"{limit}\n")
    set_threads = []
    monkeypatch.setattr(machine, "TORCH_THREADS", chosen)
    monkeypatch.setattr("torch.set_num_threads", set_threads.append)
    use_threads(ranks=ranks)
    assert set_threads == [threads]


def test_an_agent_without_a_number_of_threads_gets_those_of_torch_after_a_mini_agent(four_cores, monkeypatch):
    """A bug: after the single thread of a mini agent, SmolLM2 computed in one thread, too."""
    monkeypatch.setattr(machine, "TORCH_THREADS", 3)
    before = torch.get_num_threads()
    try:
        use_threads(in_training=1)
        assert torch.get_num_threads() == 1
        use_threads(in_training=0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_pair_and_an_evaluation_compute_in_as_many_threads_as_they_have_cores(
    four_cores, asking_agent, monkeypatch
):
    """They computed in a thread for each core of the host, although their container had two."""
    (four_cores / "cpu.max").write_text("200000 100000\n")
    set_threads: list[int] = []
    monkeypatch.setattr(machine, "TORCH_THREADS", 64)
    monkeypatch.setattr("torch.set_num_threads", set_threads.append)
    chosen = choose_pair(PairConfig(env="mini"), ["env"], resolve_agent(str(asking_agent)))
    asyncio.run(open_pair(chosen))
    assert set_threads == [2]
    run_here("evaluate.py", "--method", "direct", "--env", "mini", "--limit", 1, "--dry-run")
    assert set_threads == [2, 2]


def test_an_agent_of_a_larger_machine_gets_no_more_threads_than_there_are_cores(
    four_cores, asking_agent, tmp_path, monkeypatch
):
    """The settings of an agent that was trained with 64 threads set 64 threads again."""
    (four_cores / "cpu.max").write_text("200000 100000\n")
    agent = shutil.copytree(asking_agent, tmp_path / "large")
    with (agent / SETTINGS_FILE).open("a") as file:
        file.write("threads: 64\n")
    set_threads: list[int] = []
    monkeypatch.setattr(machine, "TORCH_THREADS", 64)
    monkeypatch.setattr("torch.set_num_threads", set_threads.append)
    chosen = choose_pair(PairConfig(env="mini"), ["env"], resolve_agent(str(agent)))
    asyncio.run(open_pair(chosen))
    line = "--method prompt-r1 --env mini --limit 1".split()
    run_here("evaluate.py", "--agent", agent, *line, "--out", tmp_path / "out")
    assert set_threads and set(set_threads) == {2}


def test_a_machine_without_safe_forks_keeps_one_rank_and_its_threads(four_cores, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert rank_count(0, device="cpu", questions=16) == 1
    assert usable_cores() == 8
    with pytest.raises(UsageError, match="--ranks 2 is for CPUs, on Linux"):
        rank_count(2, device="cpu", questions=16)


LINE = ["train.py", *SMALL, "--data", "mini:validation", "--test-data", "none", "--out", "run"]


def dialogues_of(run: Path, step: int) -> list[tuple[str, list[tuple[str, str | None]]]]:
    """The games of a step, whichever ranks played them: question, and texts and replies of the turns."""
    return sorted(
        (game["question"]["id"], [(turn["text"], turn["reply"]) for turn in game["turns"]])
        for game in recorded_games(run, f"step-{step:06d}")
    )


@pytest.mark.slow
def test_forked_ranks_play_the_games_of_one_process_and_print_once(tmp_path, call_here: CallHere):
    """Two steps with one, and with two ranks: the same games in the first step, and nearly equal metrics."""
    games, rows = {}, {}
    for ranks in (1, 2):
        folder = tmp_path / f"ranks{ranks}"
        folder.mkdir()
        run = call if ranks > 1 else call_here  # a process with threads does not fork
        ended = run(folder, *LINE, "--steps", "2", "--ranks", str(ranks))
        assert not ended.returncode, ended.stderr
        assert ended.stdout.count(f"{ranks} × cpu") == 1 and ended.stdout.count("report.html") == 1
        assert len(list((folder / "run/trajectories").glob("step-000001-*"))) == ranks
        games[ranks] = dialogues_of(folder / "run", step=1)
        rows[ranks] = read_metrics(folder / "run")
    assert games[1] == games[2] and len(games[1]) == 8
    for one, two in zip(rows[1], rows[2], strict=True):
        assert one["step"] == two["step"]
    first, second = rows[1][1], rows[2][1]
    assert first["reward/mean"] == second["reward/mean"]
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_run_of_two_forked_ranks_resumes_with_one_and_plays_the_same_games(tmp_path, call_here: CallHere):
    """From one checkpoint, any number of ranks plays the next step's games alike."""
    begun = call(tmp_path, *LINE, "--steps", "1", "--ranks", "2")
    assert not begun.returncode, begun.stderr
    shutil.copytree(tmp_path / "run", tmp_path / "other" / "run")
    for ranks, folder, run in [("2", tmp_path, call), ("1", tmp_path / "other", call_here)]:
        resumed = run(folder, *LINE, "--steps", "2", "--ranks", ranks)
        assert not resumed.returncode and "Resuming after step 1" in resumed.stdout, resumed.stderr
        assert [row["step"] for row in read_metrics(folder / "run")] == [0, 1, 2]
    games = dialogues_of(tmp_path / "run", step=2)
    assert games == dialogues_of(tmp_path / "other" / "run", step=2) and len(games) == 8


def test_what_waits_in_the_buffers_is_written_before_the_first_fork(monkeypatch):
    """Otherwise every rank would print it again when it ends."""
    events: list[str] = []

    class Noted(io.StringIO):
        def flush(self) -> None:
            events.append("flush")

    def fork_of_parent() -> int:
        events.append("fork")
        return 1000 + len(events)

    monkeypatch.setattr(os, "fork", fork_of_parent)
    monkeypatch.setattr(sys, "stdout", Noted())
    monkeypatch.setattr(sys, "stderr", Noted())
    ranks = forked_ranks.fork(2)
    assert events == ["flush", "flush", "fork", "fork"]
    for errors in ranks.values():
        errors.close()


def test_a_process_that_the_system_does_not_allow_is_named(monkeypatch):
    """A bug: with the --pids-limit of a container, a run ended with a traceback of os.fork."""

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(UsageError, match=r"rank 0 .*Resource temporarily unavailable.*fewer --ranks"):
        forked_ranks.fork(3)


def test_the_process_that_forks_the_ranks_exits_with_the_code_of_rank_0(four_cores, monkeypatch):
    monkeypatch.setattr(forked_ranks, "fork", lambda count: {101: io.StringIO()})
    monkeypatch.setattr(forked_ranks, "wait_for_ranks", lambda ranks: 75)
    with pytest.raises(SystemExit) as exit_:
        fork_ranks(3)
    assert exit_.value.code == 75


@pytest.mark.parametrize(("flag", "expected"), [(0, 2), (1, 1), (8, 8)])
def test_each_rank_has_its_share_of_the_cores_or_as_many_threads_as_the_user_wants(
    flag, expected, four_cores, monkeypatch
):
    set_threads: list[int] = []
    monkeypatch.setattr(machine, "TORCH_THREADS", 4)
    monkeypatch.setattr("torch.set_num_threads", set_threads.append)
    use_threads(flag, ranks=2)
    assert set_threads == [expected]


@pytest.fixture
def no_handlers(monkeypatch) -> None:
    """No handlers for signals, because these tests share their process with others."""
    monkeypatch.setattr(forked_ranks, "unignored_signals", list)


def ranks_that_end(monkeypatch, *statuses: int | None) -> dict[int, io.StringIO]:
    """Processes with these statuses, each of which wrote a line to stderr; None: it still runs."""
    ranks = {101 + rank: io.StringIO(f"rank {rank} failed\n") for rank in range(len(statuses))}

    def wait(process: int, options: int) -> tuple[int, int]:
        status = statuses[process - 101]
        if status is None:
            assert options == os.WNOHANG, "nobody waits for a rank that still runs"
            return 0, 0
        return process, status

    monkeypatch.setattr(os, "waitpid", wait)
    return ranks


@pytest.mark.parametrize(
    ("codes", "printed"),
    [
        ((0, 0, 0), ""),
        ((2, 2, 2), ""),  # All ranks have raised the same error.
        ((75, 75, None), ""),
        ((75, 1, None), "rank 1 failed\n"),  # Rank 1 is the cause: rank 0 has only lost it.
        ((75, 75, 1), "rank 2 failed\n"),
    ],
)
def test_only_a_rank_that_ended_otherwise_than_rank_0_is_shown(
    codes, printed, no_handlers, monkeypatch, capsys
):
    ranks = ranks_that_end(monkeypatch, *(None if code is None else code << 8 for code in codes))
    assert wait_for_ranks(ranks) == codes[0]
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize(("status", "code"), [(3 << 8, "3"), (signal.SIGKILL, "-9")])
def test_a_rank_that_fails_after_its_work_is_reported_with_what_it_wrote(
    status, code, no_handlers, monkeypatch, capsys
):
    """A bug: nobody looked at the exit code, and rank 0 ended with 0."""
    ranks = ranks_that_end(monkeypatch, 0, 0, status)
    with pytest.raises(RankLost, match=rf"rank 2 .*exit code {code}\): the same command"):
        wait_for_ranks(ranks)
    assert capsys.readouterr().err == "rank 2 failed\n"


def test_a_killed_rank_0_makes_the_run_resumable(no_handlers, monkeypatch):
    with pytest.raises(RankLost, match="rank 0 was killed by SIGKILL"):
        wait_for_ranks(ranks_that_end(monkeypatch, signal.SIGKILL, None))


def test_a_signal_reaches_every_rank():
    """`docker stop` and `kill` signal only one process."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    ranks = {sleeper.pid: io.StringIO() for sleeper in sleepers}
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        with pytest.raises(RankLost, match="SIGUSR1"):
            wait_for_ranks(ranks)
        assert sleepers[1].wait(timeout=10) == -signal.SIGUSR1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for sleeper in sleepers:
            sleeper.kill()
