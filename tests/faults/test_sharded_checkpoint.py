"""Sharded checkpoints of two ranks."""

import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed import Ranks, full_tensor, start_ranks, stop_ranks
from prompt_r1.storage.checkpoint import Checkpoints, State
from tests.support import tiny
from tests.support.ports import free_ports

pytestmark = pytest.mark.faults


class ShardedTraining:
    """A sharded policy, its optimiser and its checkpoints."""

    def __init__(self, folder: Path, ranks: Ranks, *, seed: int) -> None:
        self.policy = tiny.policy(seed=seed)
        for module in (*self.policy.model.model.layers, self.policy.model):
            fully_shard(module, mesh=ranks.mesh)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-2)
        config = TrainConfig(agent="tiny", data=("own",), lr=1e-2)
        self.checkpoints = Checkpoints(folder, self.policy, self.optimizer, config, ranks, say=print)

    def learn(self, step: int) -> None:
        tokens = torch.tensor([tiny.random_tokens(20, seed=step)])
        self.policy.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [full_tensor(weight.data).clone() for weight in self.policy.parameters()]


def save_and_load_on_rank(rank: int, port: int, folder: Path) -> None:
    """Train on after step 1 is saved, then load step 1 and train again: the weights must be the same."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = start_ranks("cpu", "fsdp")
    saved = ShardedTraining(folder, ranks, seed=0)
    saved.learn(1)
    assert saved.checkpoints.save(State(1)) == ""
    for step in (2, 3):
        saved.learn(step)
    loaded = ShardedTraining(folder, ranks, seed=1)
    assert loaded.checkpoints.load(loaded.checkpoints.newest()).step == 1
    for step in (2, 3):
        loaded.learn(step)
    for got, want in zip(loaded.weights(), saved.weights(), strict=True):
        assert torch.equal(got, want)
    stop_ranks(ranks)


def test_a_sharded_checkpoint_holds_the_weights_of_its_step(tmp_path):
    [port] = free_ports(1)
    mp.spawn(save_and_load_on_rank, (port, tmp_path), nprocs=2)
    assert (tmp_path / "checkpoints/step-000001/manifest.json").exists()
