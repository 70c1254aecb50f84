"""Starts the ranks of a run again and again without importing torch again: `python -m tests.faults.nursery`.

A line of JSON on standard input (`ranks`, `arguments`, `folder`, `events`, …) forks the ranks of one life of
`train.py`; a line comes back with their process ids, and one with their exit codes when all have ended. What
torchrun does when a rank dies is done here too: the others get SIGTERM, and SIGKILL after three seconds.

The forked processes tell where they stand, in the pipe `events`: each phase as it begins and ends.
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

SHORT = ("backward", "step", "seal")


class Phases:
    """Wraps functions so that they say when they begin and end."""

    def __init__(self, path: str, rank: int) -> None:
        self.pipe = os.open(path, os.O_WRONLY)
        self.rank = rank

    def tell(self, sign: str, name: str) -> None:
        os.write(self.pipe, f"{self.rank} {sign} {name} {time.monotonic()}\n".encode())
        if sign == "+" and name in SHORT:
            time.sleep(0.003)  # else the phase is over before anybody could strike

    def wrap(self, home: object, attribute: str, name: str) -> None:
        inner: Callable = getattr(home, attribute)

        def told(*arguments, **options):
            self.tell("+", name)
            try:
                return inner(*arguments, **options)
            finally:
                self.tell("-", name)

        setattr(home, attribute, told)

    def poison(self, rank: int, steps: int) -> None:
        """Make the advantages of a rank's games infinite, in so many steps."""
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

        async def told(*arguments, **options):
            self.tell("+", "rollout")
            try:
                return await inner(*arguments, **options)
            finally:
                self.tell("-", "rollout")

        train.play_groups = told


def live(rank: int, order: dict, port: int) -> None:
    """Be one rank of a run, in a forked process. Never returns."""
    log = os.open(f"{order['folder']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(order["folder"])
    count = order["ranks"]
    if count > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}
    phases = Phases(order["events"], rank)
    phases.wrap_games()
    phases.poison(order["poisoned"], order["steps"])
    for home, attribute, name in [
        (train, "validate", "validation"),
        (train, "learn", "update"),
        (torch.Tensor, "backward", "backward"),
        (torch.optim.AdamW, "step", "step"),
        (lifecycle, "export_agent", "export"),
        (checkpoint.Checkpoints, "save", "save"),
        (atomic_folder, "seal", "seal"),
    ]:
        phases.wrap(home, attribute, name)
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
    """The exit codes of processes {id: rank}, by rank; minus the signal for one that was killed."""
    codes: dict[int, int] = {}
    patience: float | None = None
    while len(codes) < len(ranks):
        for process, rank in ranks.items():
            ended, status = os.waitpid(process, os.WNOHANG) if rank not in codes else (0, 0)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        left = [process for process, rank in ranks.items() if rank not in codes]
        if patience is None and any(codes.values()):
            patience = time.monotonic() + 3
            [os.kill(process, signal.SIGTERM) for process in left]
        if patience is not None and time.monotonic() > patience:
            [os.kill(process, signal.SIGKILL) for process in left]
        time.sleep(0.005)
    return [codes[rank] for rank in sorted(codes)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w")  # the ranks write to their own logs
    for line in sys.stdin:
        order = json.loads(line)
        Path(order["folder"]).mkdir(parents=True, exist_ok=True)
        port, ranks = free_port(), {}
        for rank in range(order["ranks"]):
            process = os.fork()
            if process == 0:
                live(rank, order, port)
            ranks[process] = rank
        replies.write(json.dumps(list(ranks)) + "\n")
        replies.flush()
        replies.write(json.dumps(wait_for(ranks)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
