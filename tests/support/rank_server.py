"""Forks the ranks of training runs, so that torch is imported only once.

`python -m tests.support.rank_server` reads requests from standard input, one line of JSON each (`ranks`,
`arguments`, `folder`, `events`, `launcher`). For each it forks the ranks of one `train.py` and writes two
lines: their process ids, and, when all have exited, their exit codes. With a launcher, it terminates the
other ranks when one fails, as torchrun does: SIGTERM, then SIGKILL after three seconds.

The forked processes write an event to the named pipe `events` at the start and the end of each phase.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import train
from prompt_r1.cli.command_line import run_program
from prompt_r1.storage import atomic_folder
from prompt_r1.training import lifecycle
from tests.support.json_server import free_ports

SHORT_PHASES = ("backward", "step", "seal")


class PhaseRecorder:
    """Wraps functions of this process so that each call is recorded as a phase."""

    def __init__(self, path: str, rank: int) -> None:
        self.pipe = os.open(path, os.O_WRONLY)
        self.rank = rank

    def record(self, sign: str, phase: str) -> None:
        os.write(self.pipe, f"{self.rank} {sign} {phase} {time.monotonic()}\n".encode())
        if sign == "+" and phase in SHORT_PHASES:
            time.sleep(0.003)  # otherwise the phase ends before a signal can arrive

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the start and the end of what runs within."""
        self.record("+", name)
        try:
            yield
        finally:
            self.record("-", name)

    def wrap_rollout(self) -> None:
        original = train.play_groups

        async def recorded(*arguments, **options):
            with self.phase("rollout"):
                return await original(*arguments, **options)

        train.play_groups = recorded


def run_rank(rank: int, request: dict, port: int) -> None:
    """Run one rank of `train.py` in a forked process. Never returns."""
    log = os.open(f"{request['folder']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    count = request["ranks"]
    if count > 1:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in variables.items()}
    recorder = PhaseRecorder(request["events"], rank)
    recorder.wrap_rollout()
    for home, attribute, phase in [
        (lifecycle, "validation_metrics", "validation"),
        (train, "learn", "update"),
        (torch.Tensor, "backward", "backward"),
        (torch.optim.AdamW, "step", "step"),
        (lifecycle, "export_agent", "export"),
        (lifecycle, "save_checkpoint", "save"),
        (atomic_folder, "seal", "seal"),
    ]:
        setattr(home, attribute, recorder.phase(phase)(getattr(home, attribute)))
    sys.argv = ["train.py", *request["arguments"]]
    code: object = 1
    try:
        run_program(train.main)
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def wait_for_exit(ranks: dict[int, int], *, launcher: bool) -> list[int]:
    """Wait for processes {id: rank}; return their exit codes by rank, negative for a signal."""
    codes: dict[int, int] = {}
    kill_at: float | None = None
    while len(codes) < len(ranks):
        for process, rank in ranks.items():
            if rank in codes:
                continue
            exited, status = os.waitpid(process, os.WNOHANG)
            if exited:
                codes[rank] = os.waitstatus_to_exitcode(status)
        running = [process for process, rank in ranks.items() if rank not in codes]
        if launcher and kill_at is None and any(codes.values()):
            kill_at = time.monotonic() + 3
            for process in running:
                os.kill(process, signal.SIGTERM)
        if kill_at is not None and time.monotonic() > kill_at:
            for process in running:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[rank] for rank in sorted(codes)]


def main() -> None:
    torch.set_num_threads(1)
    responses = os.fdopen(os.dup(1), "w")  # each rank redirects standard output to its own log
    for line in sys.stdin:
        request = json.loads(line)
        Path(request["folder"]).mkdir(parents=True, exist_ok=True)
        [port] = free_ports(1)
        ranks: dict[int, int] = {}
        for rank in range(request["ranks"]):
            process = os.fork()
            if process == 0:
                run_rank(rank, request, port)
            ranks[process] = rank
        responses.write(json.dumps(list(ranks)) + "\n")
        responses.flush()
        responses.write(json.dumps(wait_for_exit(ranks, launcher=request["launcher"])) + "\n")
        responses.flush()


if __name__ == "__main__":
    main()
