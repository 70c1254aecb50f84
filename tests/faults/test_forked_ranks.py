"""Faults of a run that has forked its ranks: signals, and a rank that dies."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from prompt_r1.training.log import read_metrics
from tests.support.programs import call, command, wait_for

pytestmark = pytest.mark.faults


def hear_ctrl_c() -> None:
    """A shell ignores SIGINT for what it runs in the background, and children inherit this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def started(arguments, tmp_path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run of two ranks after its first step: the process that forked them, and their process ids."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    line = command("train.py", *arguments, "--ranks", "2", "--steps", "400")
    process = subprocess.Popen(line, cwd=tmp_path, start_new_session=True, preexec_fn=hear_ctrl_c, **pipes)
    try:
        wait_for(lambda: len(read_metrics(tmp_path / "run")) >= 2, process)
        yield process, ranks_of(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The ids of the processes that a process has forked."""
    return [
        int(rank) for rank in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


def has_ended(process: int) -> bool:
    """Whether a process has exited, also if nobody has waited for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_ended(processes: list[int], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not all(map(has_ended, processes)):
        assert time.monotonic() < deadline, f"a rank still runs after {seconds} s"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT], ids=["to one process", "to all, as Ctrl-C"]
)
def test_a_signal_saves_one_step_of_all_ranks_and_says_so_once(number, started, arguments, tmp_path):
    process, ranks = started
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else 75), output
    assert output.count("same command resumes the run") == 1, output
    assert "Traceback" not in output
    wait_until_ended(ranks)
    steps = len(read_metrics(tmp_path / "run"))
    resumed = call(tmp_path, "train.py", *arguments, "--ranks", "2", "--steps", str(steps + 1))
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(steps + 2))


def test_a_killed_rank_stops_the_run_which_can_be_resumed(started):
    process, ranks = started
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and "another rank has died" in output, output
    assert "Traceback" not in output


def test_a_killed_rank_0_ends_the_run_and_leaves_no_rank_behind(started):
    process, ranks = started
    os.kill(ranks[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and "rank 0 was killed by SIGKILL" in output, output
    wait_until_ended(ranks)


def test_a_second_ctrl_c_ends_every_rank_at_once(arguments, tmp_path):
    """The first one waits until the update has ended. Each rank gets both of them twice."""
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\n"
        "from prompt_r1.grpo import grpo_loss\n\n\n"
        "def slow(logprobs, columns, **settings):\n"
        "    if len(logprobs) > 9:  # not in the trial with made-up games\n"
        "        pathlib.Path('learns-' + os.environ['RANK']).touch()\n"
        "        time.sleep(600)\n"
        "    return grpo_loss(logprobs, columns, **settings)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    line = command("train.py", *arguments, "--ranks", "2", "--loss-function", "slow:slow")
    process = subprocess.Popen(line, cwd=tmp_path, start_new_session=True, preexec_fn=hear_ctrl_c, **pipes)
    with process:
        try:
            wait_for(lambda: all((tmp_path / f"learns-{rank}").exists() for rank in (0, 1)), process)
            ranks = ranks_of(process)
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(1.5)
            assert process.poll() is None, "the update has not ended"
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in output, output
    wait_until_ended(ranks)


def test_a_killed_run_leaves_no_rank_behind(started):
    process, ranks = started
    process.kill()
    process.communicate(timeout=120)
    wait_until_ended(ranks)


def test_a_killed_run_ends_its_ranks_while_they_wait_for_replies(arguments, unresponsive_endpoint, tmp_path):
    """A bug: they sent and paid calls until the games of the step had ended, also beside the resumed run."""
    # In a large group, some game of each rank asks.
    settings = ["--ranks", "2", "--group-size", "32", "--env", unresponsive_endpoint]
    line = command("train.py", *arguments, *settings)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    journal = tmp_path / "run/journal/rank1.jsonl"
    with subprocess.Popen(line, cwd=tmp_path, **pipes) as process:
        wait_for(lambda: journal.exists() and journal.stat().st_size > 0, process)
        ranks = ranks_of(process)
        process.kill()
    wait_until_ended(ranks, seconds=10.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("asking", ["01", "1"], ids=["both ranks play", "rank 0 waits for rank 1"])
def test_a_signal_to_one_process_cancels_the_games_of_all_ranks(asking, number, arguments, tmp_path):
    """A bug: `docker stop` signals one process. Rank 0 waited until rank 1 had played, and was killed."""
    (tmp_path / "slow.py").write_text(
        "import asyncio, os, pathlib\n\n\n"
        "class Slow:\n"
        "    async def ask(self, messages):\n"
        "        rank = os.environ['RANK']\n"
        f"        if rank in {asking!r}:\n"
        "            pathlib.Path('asked-' + rank).touch()\n"
        "            await asyncio.sleep(600)\n"
        "        return 'Anna'\n"
    )
    # In a large group, some game of each rank asks.
    settings = ["--ranks", "2", "--group-size", "32", "--env", "py:slow:Slow"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    line = command("train.py", *arguments, *settings)
    with subprocess.Popen(line, cwd=tmp_path, preexec_fn=hear_ctrl_c, **pipes) as process:
        try:
            wait_for(lambda: all((tmp_path / f"asked-{rank}").exists() for rank in asking), process)
            time.sleep(1.0)  # Meanwhile rank 0 may end its games, and wait in a collective.
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else 75), output
    assert f"{number.name} was received" in output and "Traceback" not in output
    assert output.count("same command resumes the run") == 1, output


def test_an_error_that_only_rank_1_meets_is_shown(arguments, tmp_path):
    """Rank 1 has no terminal: without its stderr, a user would only read that another rank has died."""
    (tmp_path / "own_loss.py").write_text(
        "import os\n"
        "from prompt_r1.grpo import grpo_loss\n\n\n"
        "def own_loss(logprobs, columns, *, clip, clip_high, kl_coef, importance_cap):\n"
        "    if os.environ.get('RANK') == '1' and len(logprobs) > 9:  # not in the trial\n"
        "        raise ZeroDivisionError('only on rank 1')\n"
        "    return grpo_loss(logprobs, columns, clip=clip, clip_high=clip_high, kl_coef=kl_coef,\n"
        "                     importance_cap=importance_cap)\n"
    )
    ended = call(tmp_path, "train.py", *arguments, "--ranks", "2", "--loss-function", "own_loss:own_loss")
    assert ended.returncode == 75 and "another rank has died" in ended.stderr, ended.stderr
    assert ended.stderr.count("ZeroDivisionError: only on rank 1") == 1
