"""Training on one process, on two with full weights (ddp) and on two with shards (fsdp, hsdp) is equal."""

import asyncio
import os
import random
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.fsdp import full_tensor
from prompt_r1.distributed.ranks import (
    Ranks,
    assign_questions,
    choose_parallel,
    make_mesh,
    run_on_all_ranks,
    start_ranks,
    stop_ranks,
)
from prompt_r1.errors import FatalEnvError, Resumable, UsageError
from prompt_r1.grpo import group_advantages
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.training.update import Update, split
from prompt_r1.types import Completion, Question, Reward, ScoredGame, Trajectory
from tests import tiny
from tests.games import ONE_RANK, record_logprobs_of
from train import learn

GROUP = 4  # games of a question
# Five training steps. Each number is a question, of which the environment broke this many games. There are
# groups that lose one game, groups that are dropped, a rank without a question, and a step without games.
STEPS = [[0, 1, 4, 0, 0, 2], [0], [4, 4], [4, 0, 0], [0, 0, 0, 0, 1]]


@dataclass(frozen=True)
class Case:
    """A value of --parallel, and settings that interact with it."""

    parallel: str
    per_node: int = 2  # ranks of a node
    tied: bool = True
    recompute: bool = False
    offload: bool = False
    compute: torch.dtype = torch.float32


CASES = {
    "ddp": Case("ddp"),
    "fsdp": Case("fsdp"),
    "fsdp, untied head, recomputed activations": Case("fsdp", tied=False, recompute=True),
    "fsdp, offloaded to CPU memory": Case("fsdp", offload=True),
    "hsdp, two nodes of one": Case("hsdp", per_node=1),
    "hsdp, one node of two": Case("hsdp"),
    "fsdp, bfloat16 products": Case("fsdp", compute=torch.bfloat16),
}


@dataclass
class Outcome:
    """The result of five training steps."""

    metrics: list[dict[str, float]]
    gradients: list[Tensor]  # of the first optimiser step
    weights: list[Tensor]
    playing: list[Tensor]  # weights of the full copy that plays
    stored: int  # number of weights that this rank stores


def group(seed: int, broken: int) -> list[Trajectory]:
    """The games of a question: one opening, then turns of random lengths; the first `broken` are broken."""
    rng = random.Random(seed)
    opening = tiny.random_tokens(rng.randint(3, 20), seed=seed)
    games = []
    for number in range(GROUP):
        game = Trajectory(Question(str(seed), "d", "?" * len(opening), ("a",)), stop="answered")
        game.add_context(opening)
        for turn in range(rng.randint(1, 3)):
            sampled = tiny.random_tokens(rng.randint(1, 25), seed=seed + 10 * number + turn)
            game.add_sampled(Completion(sampled, [0.0] * len(sampled), True))
            game.add_context(tiny.random_tokens(rng.randint(1, 9), seed=number))
        game.stop = "env_error" if number < broken else "answered"
        games.append(game)
    return games


def scored(group: list[Trajectory]) -> list[ScoredGame]:
    """Score a group with made-up rewards, and compare its games."""
    rewards = [None if game.stop == "env_error" else len(game.tokens) % 7 / 3 - 1 for game in group]
    [advantages] = group_advantages([rewards])
    columns = zip(group, rewards, advantages, strict=True)
    return [
        ScoredGame(game, None if reward is None else Reward(1, 0, reward), advantage)
        for game, reward, advantage in columns
    ]


def add_logprob_gap(games: list[ScoredGame], nats: float) -> None:
    """Change the log-probability of one token, as if the engine had computed another one."""
    for game in [game for game in games if game.advantage is not None][:1]:
        game.trajectory.logprobs[game.trajectory.sampled.index(True)] -= nats


def train_five_steps(case: Case, ranks: Ranks) -> Outcome:
    """Train on this rank's share of STEPS. Called by every rank."""
    policy, reference = (Policy(tiny.model(tied=case.tied), compute=case.compute) for _ in range(2))
    playing = Policy(tiny.model(tied=case.tied, seed=5).to(case.compute), compute=case.compute)
    sampled_by = tiny.policy(tied=case.tied)
    if case.recompute:
        policy.checkpoint_activations()
    if ranks.mesh is not None:
        for model in (policy, reference.requires_grad_(False)):
            model.shard(ranks.mesh, ranks.device, offload=case.offload)
    config = TrainConfig(lr=1e-3, kl_coef=0.1, tokens_per_batch=64, weight_decay=0.01)
    update = Update(config, policy, reference, ranks)
    gradients: list[Tensor] = []
    update.optimizer.register_step_pre_hook(lambda *_: gradients.append(full_weights(policy, "grad")))
    metrics = []
    for number, broken in enumerate(STEPS):
        groups_PG = [group(100 * number + index, count) for index, count in enumerate(broken)]
        mine = assign_questions([len(games[0].question.text) for games in groups_PG], ranks.count)[ranks.rank]
        games_PG = [scored(groups_PG[index]) for index in mine]
        for index, games in zip(mine, games_PG, strict=True):
            record_logprobs_of(sampled_by, games)
            add_logprob_gap(games, 0.1 * (index + 1))
        mini_batches = split(
            games_PG, games=len(broken) * GROUP, group_size=GROUP, mini_batch=8, numbers=mine
        )
        metrics.append(learn(update, mini_batches, clip=config.clip, kl_coef=config.kl_coef))
        playing.copy_weights_from(policy)
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in policy.parameters()]
    stored = sum(weight.numel() for weight in local)
    return Outcome(metrics, gradients[0], full_weights(policy, "data"), list(playing.parameters()), stored)


def full_weights(policy: Policy, name: str) -> list[Tensor]:
    """The attribute `name` of each weight ("data" or "grad"), gathered from all ranks."""
    return [full_tensor(getattr(parameter, name)).clone() for parameter in policy.parameters()]


def run_rank(rank: int, ports: dict[str, int], folder: Path) -> None:
    """Train each case on this of two ranks; rank 0 writes the outcomes."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, port in ports.items():
        case = CASES[name]
        os.environ |= {"LOCAL_WORLD_SIZE": str(case.per_node), "MASTER_PORT": str(port)}
        ranks = start_ranks("cpu", case.parallel)
        outcome = train_five_steps(case, ranks)
        if rank == 0:
            torch.save(outcome, folder / f"{name}.pt")
        stop_ranks(ranks)


def on_two_ranks(cases: list[str], folder: Path, *, seconds: float = 100) -> dict[str, Outcome]:
    """Train each case on two processes; fails if they hang."""
    ports = dict(zip(cases, free_ports(len(cases)), strict=True))
    running = mp.spawn(run_rank, (ports, folder), nprocs=2, join=False)
    end = time.monotonic() + seconds
    while not running.join(timeout=1):
        if time.monotonic() > end:
            for process in running.processes:
                process.kill()
            pytest.fail(f"two ranks still wait for each other after {seconds} s")
    return {name: torch.load(folder / f"{name}.pt", weights_only=False) for name in cases}


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


# The size that the tolerance is relative to: loss and KL are small differences of terms of size 1.
SIZES = {
    "loss": 1.0,
    "kl": 1.0,
    "kl_median": 1.0,
    "clip_frac": 1.0,
    "entropy": 0.0,
    "grad_norm": 0.0,
    "engine/logprob_gap": 10.0,
}


def check_equal_training(two: Outcome, one: Outcome) -> None:
    for got, want in zip(two.metrics, one.metrics, strict=True):
        for key, size in SIZES.items():
            assert got[key] == pytest.approx(want[key], rel=1e-6, abs=1e-6 * size), key
        assert got["update/skipped"] == want["update/skipped"] == 0
    assert 0 < distance(two.gradients, one.gradients) < 1e-6  # 0 would mean that nothing was summed
    assert distance(two.weights, one.weights) < 1e-5
    check_that_playing_weights_are_copies(two)


def check_that_playing_weights_are_copies(outcome: Outcome) -> None:
    for copied, weight in zip(outcome.playing, outcome.weights, strict=True):
        assert torch.equal(copied, weight.to(copied.dtype))


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """The relative distance, over all tensors."""
    got, want = (torch.cat([tensor.flatten() for tensor in tensors]).double() for tensors in (got, want))
    return ((got - want).norm() / want.norm()).item()


def test_two_ranks_with_full_or_sharded_weights_train_like_one_process(tmp_path):
    one = train_five_steps(Case("none"), ONE_RANK)
    two = on_two_ranks(["ddp", "fsdp"], tmp_path)
    for outcome in two.values():
        check_equal_training(outcome, one)
    assert two["ddp"].stored == one.stored == pytest.approx(2 * two["fsdp"].stored, rel=0.01)


@pytest.mark.slow
def test_every_kind_of_sharding_trains_like_one_process(tmp_path):
    one = {tied: train_five_steps(Case("none", tied=tied), ONE_RANK) for tied in (True, False)}
    two = on_two_ranks([name for name in CASES if name not in ("ddp", "fsdp")], tmp_path)
    rounded = two.pop("fsdp, bfloat16 products")
    for name, outcome in two.items():
        check_equal_training(outcome, one[CASES[name].tied])

    assert {tensor.dtype for tensor in rounded.gradients + rounded.weights} == {torch.float32}
    assert {tensor.dtype for tensor in rounded.playing} == {torch.bfloat16}
    check_that_playing_weights_are_copies(rounded)
    assert 1e-4 < distance(rounded.gradients, one[True].gradients) < 0.1


class BesideFailedRank(Ranks):
    """The first of two ranks; the other one has failed."""

    def gather(self, item: list) -> list:
        return [item, [Resumable("the budget is used up")]]


def test_a_rank_raises_the_error_of_another_rank():
    async def work() -> str:
        return "done"

    with asyncio.Runner() as runner:
        assert run_on_all_ranks(work(), runner, ONE_RANK) == "done"
        with pytest.raises(Resumable, match="the budget is used up"):
            run_on_all_ranks(work(), runner, BesideFailedRank(rank=0, count=1, device=torch.device("cpu")))


def test_an_error_of_this_rank_is_shared_before_it_is_raised():
    shared: list[object] = []

    class Sharing(Ranks):
        def gather(self, item: list) -> list:
            shared.append(item)
            return [item, []]

    async def work() -> str:
        raise FatalEnvError("the key is wrong")

    with asyncio.Runner() as runner, pytest.raises(FatalEnvError, match="the key is wrong"):
        run_on_all_ranks(work(), runner, Sharing(rank=0, count=1, device=torch.device("cpu")))
    assert len(shared) == 1 and "the key is wrong" in str(shared[0])


def test_auto_chooses_by_device_and_number_of_processes():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    chosen = [choose_parallel("auto", count, device) for count in (1, 8) for device in (cpu, gpu)]
    assert chosen == ["none", "none", "ddp", "fsdp"]
    with pytest.raises(UsageError, match="--parallel none is for one process, and torchrun started 2"):
        choose_parallel("none", 2, cpu)


def test_hsdp_on_nodes_of_different_sizes_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="--parallel hsdp needs equal nodes: 3 processes, 2 of them here"):
        make_mesh("hsdp", 3, torch.device("cpu"))


def test_questions_are_assigned_evenly_and_long_ones_to_different_ranks():
    rng = random.Random(0)
    lengths = [rng.choice([20, 30, 200]) for _ in range(64)]
    shares = assign_questions(lengths, 4)
    assert sorted(number for share in shares for number in share) == list(range(64))
    assert all({number // 4 for number in share} == set(range(16)) for share in shares)  # one of every four
    in_turn = [sum(lengths[rank::4]) for rank in range(4)]
    assigned = [sum(lengths[number] for number in share) for share in shares]
    assert max(assigned) - min(assigned) <= max(lengths) < max(in_turn) - min(in_turn)
    assert assign_questions([5], 2) == [[0], []]


@pytest.mark.slow
def test_a_sharded_run_is_resumed_by_one_process_and_gives_the_same_agent(asking_agent, tmp_path):
    """Runs from a shell. Each step has one question, so that one rank has no game."""
    from tests.programs import call  # not above: each rank imports this file anew

    line = ["train.py", "--agent", asking_agent, "--env", "mini", "--data", "mini", "--questions", "1"]
    line += ["--group-size", "8", "--mini-batch", "4", "--max-new", "48", "--max-tokens", "700"]
    line += ["--rule", "release", "--lr", "1e-4", "--device", "cpu", "--save-every", "1"]
    resumed = [*line, "--out", "resumed"]
    done = call(tmp_path, *resumed, "--steps", "2", "--parallel", "fsdp", ranks=2)
    assert done.returncode == 0, done.stderr
    done = call(tmp_path, *resumed, "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "Resuming after step 2" in done.stdout
    done = call(tmp_path, *line, "--steps", "3", "--out", "whole")
    assert done.returncode == 0, done.stderr
    for one, two in zip(read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "resumed"), strict=True):
        for key in ("loss", "kl", "grad_norm", "reward/mean", "tokens/sampled"):
            assert one.get(key, 0) == pytest.approx(two.get(key, 0), rel=1e-3, abs=1e-6), (one["step"], key)
    assert one["grad_norm"] > 0
    agents = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "agent") for name in ("whole", "resumed")
    ]
    assert distance(*(list(agent.parameters()) for agent in agents)) < 1e-5
