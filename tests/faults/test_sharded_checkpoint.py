"""Checkpoints that go from several ranks to one and back."""

import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from prompt_r1.model.distributed import start_ranks, stop_ranks
from prompt_r1.model.lora import add_lora
from prompt_r1.model.policy import Policy
from prompt_r1.model.sharding import full_tensor
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.checkpoint import (
    State,
    begin_states,
    load_tensors,
    read_state,
    save_checkpoint,
    tensors_of,
)
from prompt_r1.training.run_folder import newest_checkpoint
from tests.support import tiny
from tests.support.games import CPU
from tests.support.json_server import free_ports

pytestmark = pytest.mark.faults

# For each of several, one and several ranks: the value of --parallel.
ROUTES = {
    "ddp": ("ddp", "auto", "ddp"),
    "fsdp": ("fsdp", "auto", "fsdp"),
    "hsdp": ("hsdp", "auto", "hsdp"),
    "adapters": ("ddp", "auto", "ddp"),
}


def train_or_resume(rank: int, count: int, parallel: str, port: int, folder: Path, adapted: bool) -> None:
    """Begin a run and save it, or load it, compare it with what was saved, and save it as the next step."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(min(2, count))}
    ranks = start_ranks(CPU, parallel)
    begins = not (folder / "tensors.pt").exists()
    policy = Policy(tiny.model(seed=0 if begins or adapted else 1), compute_dtype=torch.float32)
    if adapted:
        add_lora(policy.model, rank=2, alpha=4, seed=int(begins))
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=False)
    optimizer = torch.optim.AdamW(policy.trained_parameters(), lr=1e-2)
    begin_states(optimizer)
    config = TrainConfig(agent="tiny", data=("own",), lr=1e-2)
    step = 1
    if begins:
        for _ in range(2):
            for weight in policy.trained_parameters():
                weight.grad = weight.detach().clone()
            ranks.sum_gradients(policy)
            optimizer.step()
    else:
        newest = ranks.on_first_rank(lambda: newest_checkpoint(folder, say=print))
        step += read_state(newest).trained_step
        load_tensors(newest, policy, optimizer)
    tensors = {name: full_tensor(tensor).clone() for name, tensor in tensors_of(policy, optimizer).items()}
    if begins and ranks.is_first:
        torch.save(tensors, folder / "tensors.pt")
    ranks.barrier()
    saved = torch.load(folder / "tensors.pt")
    assert tensors.keys() == saved.keys() and len(tensors) > 8
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)
    save_checkpoint(folder, State({"step": step}), policy, optimizer, config, ranks)
    stop_ranks(ranks)


@pytest.mark.parametrize("route", ROUTES)
def test_weights_and_moments_are_bit_equal_from_several_ranks_to_one_and_back(route, tmp_path):
    """With hsdp, from two nodes of two ranks."""
    several = 4 if route == "hsdp" else 2
    for count, parallel in zip((several, 1, several), ROUTES[route], strict=True):
        [port] = free_ports(1)
        arguments = (count, parallel, port, tmp_path, route == "adapters")
        mp.start_processes(train_or_resume, arguments, nprocs=count, start_method="fork")
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000002", "step-000003"]
