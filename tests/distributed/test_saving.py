"""Checkpoints that one of two ranks cannot write, or that are damaged: both ranks raise the same sentence."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch.optim import Optimizer

from prompt_r1.errors import Resumable, UsageError
from prompt_r1.model.distributed import Ranks, start_ranks
from prompt_r1.model.policy import Policy
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training import checkpoint
from prompt_r1.training.checkpoint import State, begin_states, load_tensors, save_checkpoint
from tests.support import tiny
from tests.support.exports import file_size_limit
from tests.support.games import CPU
from tests.support.json_server import free_ports

LIMIT = 100_000  # bytes that a file may have on the rank that fails
TIMEOUT = 60.0  # seconds that a rank waits for another
CONFIG = TrainConfig(agent="tiny", data=("own",))


def start(rank: int, port: int) -> tuple[Ranks, Policy, Optimizer]:
    """Start one of two ranks, and make a policy that learns."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = start_ranks(CPU, "ddp", timeout=TIMEOUT)
    policy = tiny.policy()
    optimizer = torch.optim.AdamW(policy.parameters())
    begin_states(optimizer)
    return ranks, policy, optimizer


def save_on_a_full_disk(rank: int, victim: int, last_file: bool, port: int, folder: Path) -> None:
    """Save a checkpoint. On the rank `victim`, its tensors do not fit on the disk, or only its last files."""
    ranks, policy, optimizer = start(rank, port)
    config = CONFIG
    if last_file:
        checkpoint.FILE_BYTES = 10_000
        config = replace(CONFIG, env_args="x" * 2 * LIMIT)
    with file_size_limit(LIMIT if rank == victim else 2**40):
        try:
            save_checkpoint(folder, State({"step": 1}), policy, optimizer, config, ranks)
        except Resumable as error:
            (folder / f"rank{rank}").write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize(("victim", "last_file"), [(0, False), (1, False), (0, True)])
def test_a_checkpoint_that_one_rank_cannot_write_stops_both(victim, last_file, tmp_path):
    """A full disk met by rank 0 after the tensors: rank 1 went on, and waited an hour for rank 0."""
    [port] = free_ports(1)
    arguments = (victim, last_file, port, tmp_path)
    mp.start_processes(save_on_a_full_disk, arguments, nprocs=2, start_method="fork")
    for rank in (0, 1):
        assert "could not be written: File too large" in (tmp_path / f"rank{rank}").read_text()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def load_damaged(rank: int, port: int, folder: Path) -> None:
    """Save a checkpoint, damage the header of a file of tensors, and load it."""
    ranks, policy, optimizer = start(rank, port)
    save_checkpoint(folder, State({"step": 1}), policy, optimizer, CONFIG, ranks)
    checkpoint_folder = folder / "checkpoints" / "step-000001"
    if ranks.is_first:
        [file, *_] = sorted(checkpoint_folder.glob("*.safetensors"))
        file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])  # It keeps its size.
    ranks.barrier()
    try:
        load_tensors(checkpoint_folder, policy, optimizer)
    except UsageError as error:
        (folder / f"rank{rank}").write_text(str(error))
    os._exit(0)


def test_a_damaged_checkpoint_is_refused_on_both_ranks(tmp_path):
    """Rank 0 alone read the header, and its error was shown as a bug of this program."""
    [port] = free_ports(1)
    mp.start_processes(load_damaged, (port, tmp_path), nprocs=2, start_method="fork")
    for rank in (0, 1):
        assert "step-000001 cannot be loaded" in (tmp_path / f"rank{rank}").read_text()
