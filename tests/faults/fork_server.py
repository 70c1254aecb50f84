"""Start runs of train.py without importing torch each time: `python -m tests.faults.fork_server`.

Each line of JSON on standard input (`ranks`, `arguments`, `folder`, `events`, …) forks the ranks of one run.
The server replies with a line of their process ids, and with a line of their exit codes when all have ended.
Like torchrun, it sends SIGTERM to the other ranks when one dies, and SIGKILL after three seconds.

The ranks write an event to the pipe `events` whenever a phase begins or ends.
"""

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import train
from prompt_r1.cli.command_line import run_program
from prompt_r1.storage import atomic_folder, checkpoint
from prompt_r1.training import lifecycle

SHORT = ("backward", "step", "seal")  # phases that are made longer, so that a signal can hit them


class EventWriter:
    """Wraps functions so that an event is written when they begin and end."""

    def __init__(self, path: str, rank: int) -> None:
        self.pipe = os.open(path, os.O_WRONLY)
        self.rank = rank

    def write(self, sign: str, name: str) -> None:
        os.write(self.pipe, f"{self.rank} {sign} {name} {time.monotonic()}\n".encode())
        if sign == "+" and name in SHORT:
            time.sleep(0.003)

    def wrap(self, home: object, attribute: str, name: str) -> None:
        inner: Callable = getattr(home, attribute)

        def wrapped(*arguments, **options):
            self.write("+", name)
            try:
                return inner(*arguments, **options)
            finally:
                self.write("-", name)

        setattr(home, attribute, wrapped)

    def poison(self, rank: int, steps: int) -> None:
        """Make the advantages of a rank's games infinite in the first `steps` steps."""
        inner, left = train.score_and_compare, [steps]

        def compare(*arguments, **options):
            games_PG = inner(*arguments, **options)
            left[0] -= 1
            if rank != self.rank or left[0] < 0:
                return games_PG
            return [[replace(game, advantage=math.inf) for game in group] for group in games_PG]

        train.score_and_compare = compare

    def wrap_games(self) -> None:
        inner = train.play_groups

        async def wrapped(*arguments, **options):
            self.write("+", "rollout")
            try:
                return await inner(*arguments, **options)
            finally:
                self.write("-", "rollout")

        train.play_groups = wrapped


def run_rank(rank: int, order: dict, port: int) -> None:
    """Run one rank of train.py in this forked process. Never returns."""
    log = os.open(f"{order['folder']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(order["folder"])
    count = order["ranks"]
    if count > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}
    events = EventWriter(order["events"], rank)
    events.wrap_games()
    events.poison(order["poisoned"], order["steps"])
    for home, attribute, name in [
        (train, "validate", "validation"),
        (train, "learn", "update"),
        (torch.Tensor, "backward", "backward"),
        (torch.optim.AdamW, "step", "step"),
        (lifecycle, "export_agent", "export"),
        (checkpoint.Checkpoints, "save", "save"),
        (atomic_folder, "seal", "seal"),
    ]:
        events.wrap(home, attribute, name)
    sys.argv = ["train.py", *order["arguments"]]
    code: object = 1
    try:
        run_program(train.main)
    except SystemExit as left:
        code = left.code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def wait_for(ranks: dict[int, int]) -> list[int]:
    """Wait for processes {id: rank}. Returns their exit codes by rank; -N for one killed by signal N."""
    codes: dict[int, int] = {}
    deadline: float | None = None
    while len(codes) < len(ranks):
        for process, rank in ranks.items():
            ended, status = os.waitpid(process, os.WNOHANG) if rank not in codes else (0, 0)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        left = [process for process, rank in ranks.items() if rank not in codes]
        if deadline is None and any(codes.values()):
            deadline = time.monotonic() + 3
            for process in left:
                os.kill(process, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            for process in left:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[rank] for rank in sorted(codes)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w")  # the ranks redirect stdout to their own logs
    for line in sys.stdin:
        order = json.loads(line)
        Path(order["folder"]).mkdir(parents=True, exist_ok=True)
        port, ranks = free_port(), {}
        for rank in range(order["ranks"]):
            process = os.fork()
            if process == 0:
                run_rank(rank, order, port)
            ranks[process] = rank
        replies.write(json.dumps(list(ranks)) + "\n")
        replies.flush()
        replies.write(json.dumps(wait_for(ranks)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
