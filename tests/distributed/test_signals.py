"""Signals: what they cancel, when they end the run, and which processes they reach."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from prompt_r1.environments.specs import check_environment
from prompt_r1.errors import Interrupted, Resumable, SignalBeforeTraining
from prompt_r1.pair.agent import load_agent
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.programs.command_line import explain
from prompt_r1.training import start
from prompt_r1.training.preflight import ChosenTraining
from prompt_r1.training.signals import SIGNALS, Interrupt
from tests.support.games import ONE_RANK
from tests.support.paths import ROOT
from tests.support.settings import train_config


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own handler of SIGINT: a shell ignores the signal for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


ANNOUNCED = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT]


@pytest.mark.parametrize("number", ANNOUNCED, ids=lambda number: number.name)
def test_a_signal_cancels_calls_that_wait_for_the_environment(number):
    """SIGUSR2 (submitit) and SIGHUP (a closed terminal) lost the steps since the last checkpoint."""
    cancelled = []

    async def ask() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("ask")
            raise
        return "too late"

    async def games() -> list[str]:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
        return await asyncio.gather(ask(), ask())

    with Interrupt() as interrupt, pytest.raises(Resumable, match=f"{number.name} was received"):
        interrupt.training_began = True
        asyncio.run(interrupt.guard(games()))
    assert cancelled == ["ask", "ask"]


def test_after_a_signal_during_an_update_no_new_work_starts():
    async def work() -> None:
        pytest.fail("started after the signal")

    with Interrupt() as interrupt:
        interrupt.training_began = True
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)  # a second signal has no effect
        assert str(interrupt.stop) == "SIGTERM was received"
        with pytest.raises(Resumable):
            asyncio.run(interrupt.guard(work()))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_a_signal_before_training_ends_the_run_at_once(number, code):
    with Interrupt(), pytest.raises(SignalBeforeTraining, match="before training began") as stopped:
        os.kill(os.getpid(), number)
    assert explain(stopped.value)[0] == code


@pytest.mark.parametrize("part", ["AutoModelForCausalLM", "AutoTokenizer"])
def test_a_signal_while_a_model_loads_is_not_taken_for_a_broken_model(part, asking_agent, monkeypatch):
    """It ended as "no causal language model at …" with exit code 2; a scheduler requeues only 75."""
    monkeypatch.setattr(
        f"transformers.{part}.from_pretrained", lambda *args, **options: os.kill(os.getpid(), signal.SIGTERM)
    )
    with Interrupt(), pytest.raises(SignalBeforeTraining):
        load_agent(asking_agent, train_config([]), torch.device("cpu"))


def test_a_signal_during_the_start_check_leaves_the_event_loop():
    """asyncio's transports and libraries catch any Exception of a callback, and went on."""

    async def check() -> None:
        try:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.sleep(10)
        except Exception:
            pytest.fail("a library took the signal for an error of its own")

    with Interrupt(), pytest.raises(SignalBeforeTraining):
        asyncio.run(check())


def test_the_first_ctrl_c_saves_with_its_own_exit_code_and_the_second_one_ends_the_run_at_once():
    with Interrupt() as interrupt:
        interrupt.training_began = True
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # torchrun sends the same Ctrl-C again
        assert isinstance(interrupt.stop, Interrupted) and str(interrupt.stop) == "SIGINT was received"
        interrupt.last_ctrl_c -= 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(
            os.getpid(), signal.SIGINT
        )  # The copy of the second one does not interrupt the end of the run.


@pytest.mark.parametrize("training_began", [True, False])
def test_the_copy_of_a_ctrl_c_that_ended_the_run_does_not_interrupt_its_end(training_began):
    """A bug: where the copy came late, a rank was killed by SIGINT, and the run ended with exit code 75."""
    with pytest.raises((KeyboardInterrupt, SignalBeforeTraining)), Interrupt() as interrupt:
        interrupt.training_began = training_began
        os.kill(os.getpid(), signal.SIGINT)
        interrupt.last_ctrl_c -= 2
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    interrupt.last_ctrl_c -= 2
    with pytest.raises(KeyboardInterrupt):  # Another Ctrl-C still ends what hangs.
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(number):
    """A shell ignores Ctrl-C for jobs in the background, and nohup ignores SIGHUP."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), number)
        assert not interrupt.stop and signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_guard_returns_the_result_and_raises_the_errors_of_its_work():
    async def succeed() -> int:
        return 7

    async def fail() -> int:
        raise KeyError("mine")

    with Interrupt() as interrupt:
        assert asyncio.run(interrupt.guard(succeed())) == 7
        with pytest.raises(KeyError):
            asyncio.run(interrupt.guard(fail()))


def test_the_previous_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_signal_of_slurm_reaches_the_program_through_the_shell_of_a_task(tmp_path):
    """The shell ignored USR1, so its program did too: at the time limit all ranks were killed unsaved."""
    script = (ROOT / "examples/train.slurm").read_text("utf-8")
    shell_of_a_task = script.split("bash -c '")[1].split("' train.py")[0]
    program = tmp_path / "python"  # saves at the signal, as train.py does
    program.write_text("#!/bin/sh\ntrap 'exit 75' USR1\ntouch started\nwhile :; do sleep 0.02; done\n")
    program.chmod(0o755)
    variables = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"), "1")
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "codes": str(tmp_path / "codes")}
    with subprocess.Popen(
        ["bash", "-c", shell_of_a_task, "train.py"], cwd=tmp_path, env=variables, start_new_session=True
    ) as task:
        try:
            while not (tmp_path / "started").exists():
                time.sleep(0.01)
            os.killpg(task.pid, signal.SIGUSR1)  # Slurm signals the shell and the program
            assert task.wait(timeout=10) == 0, "the other ranks are still saving"
        finally:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
    assert (tmp_path / "codes").read_text() == "75\n"


def test_a_signal_wakes_up_a_loop_in_which_nothing_else_is_due():
    """The games may all wait for an environment. The signal must not wait until a timer is due."""
    due: list[str] = []

    async def games() -> None:
        asyncio.get_running_loop().call_later(2, due.append, "a timer")
        threading.Timer(0.02, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM)).start()
        await asyncio.sleep(60)

    with Interrupt() as interrupt, pytest.raises(Resumable, match="SIGTERM"):
        interrupt.training_began = True
        asyncio.run(interrupt.guard(games()))
    assert not due


def test_a_signal_after_the_games_reaches_no_loop_that_has_ended():
    """During an update no games run, and their event loop may be closed."""

    async def games() -> str:
        return "played"

    with Interrupt() as interrupt:
        interrupt.training_began = True
        assert asyncio.run(interrupt.guard(games())) == "played"
        os.kill(os.getpid(), signal.SIGTERM)
        assert str(interrupt.stop) == "SIGTERM was received"


def test_an_error_in_a_run_closes_its_log_and_then_its_environment(tmp_path, monkeypatch):
    """Otherwise a bar stays on the terminal, a W&B run stays open, and connections are cut."""
    events: list[str] = []

    async def close_environment() -> None:
        events.append("environment")

    run = SimpleNamespace(
        log=SimpleNamespace(close=lambda: events.append("log")),
        environment=SimpleNamespace(close=close_environment),
    )
    monkeypatch.setattr(start, "fork_ranks", lambda *_, **__: None)
    monkeypatch.setattr(start, "start_ranks", lambda *_: ONE_RANK)
    monkeypatch.setattr(start, "open_parts", lambda *_: run)
    config = train_config(["--agent", "none", "--env", "mini", "--data", "mini", "--out", str(tmp_path)])
    chosen = ChosenTraining(config, resolve_agent(config.agent), check_environment(config.env, config))
    with pytest.raises(Resumable), start.start_run(chosen):
        raise Resumable("no reply")
    assert events == ["log", "environment"]


def test_a_ctrl_c_after_another_signal_still_saves(monkeypatch):
    """A bug: one second after SIGTERM, the first Ctrl-C ended the run without saving."""
    monkeypatch.setattr("prompt_r1.training.signals.SAME_CTRL_C", -1.0)
    with Interrupt() as interrupt:
        interrupt.training_began = True
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert str(interrupt.stop) == "SIGTERM was received"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
