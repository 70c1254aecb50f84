"""Forks the ranks of training runs, so that torch is imported only once.

`python -m tests.support.rank_server` reads requests from standard input, a line of JSON each (`ranks`,
`arguments`, `folder`, `launcher`, `fault`). For a request it forks the ranks of one `train.py` and, when all
of them have exited, writes a line with the fields of fault_harness.ProcessRun. With a launcher, it ends the
other ranks when one fails, as torchrun does: by SIGTERM, and by SIGKILL after three seconds.

The forked processes write an event to a pipe at the start and at the end of each phase.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from select import select

import torch

import train
from prompt_r1.programs.command_line import run_program
from prompt_r1.training import checkpoint
from prompt_r1.training import record as record_file
from prompt_r1.training.preflight import read_training
from prompt_r1.training.record import Record
from prompt_r1.training.run import Run
from tests.support.json_server import free_ports

SHORT_PHASES = ("backward", "step", "complete")


def recorder(pipe: int, rank: int) -> Callable[[str], AbstractContextManager]:
    """Make a function that records the start and the end of a phase; it decorates a function that is one."""

    def record(sign: str, phase: str) -> None:
        os.write(pipe, json.dumps([rank, sign, phase, time.monotonic()]).encode() + b"\n")

    @contextmanager
    def recorded(phase: str) -> Iterator[None]:
        record("+", phase)
        if phase in SHORT_PHASES:
            time.sleep(0.003)  # otherwise the phase ends before a signal can arrive
        try:
            yield
        finally:
            record("-", phase)

    return recorded


def run_rank(rank: int, request: dict, port: int, pipe: int) -> None:
    """Run one rank of `train.py` in a forked process. Never returns."""
    log = os.open(f"{request['folder']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    count = request["ranks"]
    if count > 1:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in variables.items()}
    recorded, play_groups = recorder(pipe, rank), train.play_groups

    async def rollout(*arguments, **options):
        with recorded("rollout"):
            return await play_groups(*arguments, **options)

    train.play_groups = rollout
    for home, attribute, phase in [
        (Record, "validate", "validation"),
        (Run, "mini_batches", "update"),  # the update begins with it
        (torch.Tensor, "backward", "backward"),
        (torch.optim.AdamW, "step", "step"),
        (record_file, "export_agent", "export"),
        (record_file, "save_checkpoint", "save"),
        (checkpoint, "complete_folder", "complete"),
    ]:
        setattr(home, attribute, recorded(phase)(getattr(home, attribute)))
    sys.argv = ["train.py", *request["arguments"]]
    code: object = 1
    try:
        run_program(lambda arguments: train.main(read_training(arguments)), sys.argv[1:])
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def follow(ranks: list[int], pipe: int, *, launcher: bool, fault: dict | None) -> dict[str, object]:
    """Follow the processes of ranks until all have exited, and inject a fault.

    Exit codes are negative for a signal.
    """
    codes: dict[int, int] = {}
    events: list[list] = []
    unread = b""
    fault_time, terminated_at = 0.0, 0.0
    while len(codes) < len(ranks):
        exited = [rank for rank, process in enumerate(ranks) if rank not in codes and has_exited(process)]
        if select([pipe], [], [], 0.005)[0]:
            *lines, unread = (unread + os.read(pipe, 2**16)).split(b"\n")
            events += map(json.loads, lines)
        for rank in exited:  # only now: all its events have been read
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(ranks[rank], 0)[1])
        running = [process for rank, process in enumerate(ranks) if rank not in codes]
        starts = [event[2] for event in events if fault and event[:2] == [fault["rank"], "+"]]
        if fault and not fault_time and starts.count(fault["phase"]) >= fault["occurrence"]:
            time.sleep(fault["delay"])
            send(fault["number"], [ranks[target] for target in fault["targets"] if target not in codes])
            fault_time = time.monotonic()
        if launcher and any(codes.values()) and not terminated_at:
            terminated_at = time.monotonic()
            send(signal.SIGTERM, running)
        if terminated_at and time.monotonic() > terminated_at + 3:
            send(signal.SIGKILL, running)
    exit_codes = [codes[rank] for rank in sorted(codes)]
    after_fault = time.monotonic() - fault_time
    return {"exit_codes": exit_codes, "events": events, "seconds_after_fault": after_fault}


def has_exited(process: int) -> bool:
    """Whether a child has exited; it stays to be waited for."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def send(number: int, processes: list[int]) -> None:
    for process in processes:
        os.kill(process, number)


def main() -> None:
    torch.set_num_threads(1)
    responses = os.fdopen(os.dup(1), "w")  # each rank redirects standard output to its own log
    for line in sys.stdin:
        request = json.loads(line)
        Path(request["folder"]).mkdir(parents=True, exist_ok=True)
        [port] = free_ports(1)
        reading, writing = os.pipe()
        ranks: list[int] = []
        for rank in range(request["ranks"]):
            process = os.fork()
            if process == 0:
                run_rank(rank, request, port, writing)
            ranks.append(process)
        ended = follow(ranks, reading, launcher=request["launcher"], fault=request["fault"])
        os.close(reading)
        os.close(writing)
        responses.write(json.dumps(ended) + "\n")
        responses.flush()


if __name__ == "__main__":
    main()
