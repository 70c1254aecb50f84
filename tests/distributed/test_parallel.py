"""Several ranks with replicated (ddp) or sharded weights (fsdp) train like one process."""

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from traceback import format_exception
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor

from prompt_r1.errors import FatalEnvError, Resumable, UsageError
from prompt_r1.grpo import compare_games
from prompt_r1.model import distributed
from prompt_r1.model.distributed import (
    RankFailed,
    RankLost,
    Ranks,
    as_shared,
    errors_as_rank_lost,
    start_ranks,
    stop_ranks,
)
from prompt_r1.model.lora import add_lora
from prompt_r1.model.machine import pick_device
from prompt_r1.model.packing import pack
from prompt_r1.model.policy import Policy
from prompt_r1.model.sharding import full_tensor
from prompt_r1.training.batches import games_to_learn_from, mini_batches_of
from prompt_r1.types import Reward, ScoredGame, Trajectory
from tests.support import tiny
from tests.support.exports import locked
from tests.support.games import CPU, ONE_RANK, Learner, record_logprobs_of, siblings
from tests.support.json_server import free_ports
from tests.support.thread_ranks import ThreadRanks, on_each_rank

GSPO = "examples.losses:gspo"
GROUP_SIZE = 4
SHORT = timedelta(seconds=0.2)
TIMEOUT = 90.0  # seconds that a rank waits for another
# Four training steps: for each question, how many games of its group the environment breaks. One broken game
# is left out, more drop the group. In step 2 only one rank has a question, and four ranks have three games to
# train on; in step 3 no rank has a game.
BROKEN_GAMES = [[0, 1, 4, 0, 0, 2], [1], [4, 4], [4, 0, 0]]


@dataclass(frozen=True)
class Case:
    """A value of --parallel, with the settings that it must work with."""

    parallel: str
    tied: bool = True  # whether input and output embeddings are tied
    recompute: bool = False  # whether the backward pass recomputes activations
    offload: bool = False  # whether weights are in CPU memory
    compute: torch.dtype = torch.float32
    adapter_rank: int = 0
    loss_function: str = ""


CASES = {
    "ddp": Case("ddp"),
    "ddp, adapters": Case("ddp", adapter_rank=4),
    "fsdp": Case("fsdp"),
    "fsdp, untied head, recomputed activations, a loss of whole games": Case(
        "fsdp", tied=False, recompute=True, loss_function=GSPO
    ),
    "fsdp, kept in CPU memory": Case("fsdp", offload=True),
    "hsdp": Case("hsdp"),
    "fsdp, bfloat16 products": Case("fsdp", compute=torch.bfloat16),
}


@dataclass
class Outcome:
    """The result of four training steps."""

    metrics: list[dict[str, float]]
    gradients: list[Tensor]  # the gradients of the first optimiser step
    weights: list[Tensor]
    rollout_weights: list[Tensor]  # the weights of the unsharded copy that plays the games
    local_weights: int  # the number of weights that this rank holds
    steps: int  # the number of optimiser steps


def with_rewards(group: list[Trajectory], broken: int) -> list[Reward | None]:
    """Rewards that depend on the lengths of the games of a question; the first `broken` games are broken."""
    for game in group[:broken]:
        game.stop = "env_error"
    lengths = [len(game.tokens) for game in group]
    return [None] * broken + [Reward(1, 0, length % 7 / 3 - 1) for length in lengths[broken:]]


def record_a_gap(games: list[ScoredGame], nats: float) -> None:
    """Change the recorded log-probability of one token, as if the engine differed from the policy there."""
    for game in games:
        if game.advantage is not None:
            first_sampled = game.trajectory.sampled.index(True)
            game.trajectory.logprobs[first_sampled] -= nats
            return


def four_steps(case: Case, ranks: Ranks) -> Outcome:
    """Train on this rank's share of the games. Called by every rank."""
    policy = Policy(tiny.model(tied=case.tied), compute_dtype=case.compute)
    reference = Policy(tiny.model(tied=case.tied), compute_dtype=case.compute).requires_grad_(False)
    rollout_policy = Policy(tiny.model(tied=case.tied, seed=5).to(case.compute), compute_dtype=case.compute)
    sampling_policy = tiny.policy(tied=case.tied)
    if case.adapter_rank:
        add_lora(policy.model, rank=case.adapter_rank, alpha=32)
        rollout_policy = policy
    if case.recompute:
        policy.checkpoint_activations()
    if ranks.mesh is not None:
        for model in (policy, reference):
            model.shard(ranks.mesh, ranks.device, offload=case.offload)
    learner = Learner(
        policy,
        reference=reference,
        ranks=ranks,
        kl_coef=0.1,
        clip=0.02,
        clip_high=0.03,
        loss_function=case.loss_function,
    )
    gradients: list[Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: gradients.append(full_gradients(policy)))
    metrics = []
    for step, broken in enumerate(BROKEN_GAMES):
        numbers = range(ranks.rank, len(broken), ranks.count)  # the questions of this rank
        groups_PG = [siblings(100 * step + number, GROUP_SIZE) for number in numbers]
        rewards_PG = [with_rewards(group, broken[n]) for group, n in zip(groups_PG, numbers, strict=True)]
        games_PG = compare_games(groups_PG, rewards_PG, numbers=numbers)
        for number, games in zip(numbers, games_PG, strict=True):
            record_logprobs_of(sampling_policy, games)
            record_a_gap(games, 0.1 * (number + 1))
        used_PG = games_to_learn_from(games_PG, ranks, mask_truncated=False, skip_no_spread=False)
        mini_batches = mini_batches_of(used_PG, ranks, mini_batch=8)
        metrics.append(learner.learn(mini_batches))
        rollout_policy.copy_weights_from(policy)
    return Outcome(
        metrics,
        gradients[0],
        weights=[full_tensor(weight.data).clone() for weight in policy.parameters()],
        rollout_weights=list(rollout_policy.parameters()),
        local_weights=sum(local_size(weight) for weight in policy.parameters()),
        steps=len(gradients),
    )


def full_gradients(policy: Policy) -> list[Tensor]:
    return [full_tensor(weight.grad).clone() for weight in policy.trained_parameters()]


def local_size(weight: Tensor) -> int:
    """How many elements of a weight this rank holds."""
    return weight.to_local().numel() if isinstance(weight, DTensor) else weight.numel()


def train_on_rank(rank: int, count: int, ports: dict[str, int], folder: Path) -> None:
    """Train one case after the other on one of `count` ranks; rank 0 saves the outcomes."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # Four ranks are two nodes.
    for name, port in ports.items():
        case = CASES[name]
        os.environ["MASTER_PORT"] = str(port)
        ranks = start_ranks(CPU, case.parallel, timeout=TIMEOUT)
        outcome = four_steps(case, ranks)
        if rank == 0:
            torch.save(outcome, folder / f"{name}.pt")
        stop_ranks(ranks)


def on_ranks(count: int, cases: list[str], folder: Path) -> dict[str, Outcome]:
    """Train each case on `count` processes. Fails when one of them waits for another longer than TIMEOUT."""
    ports = dict(zip(cases, free_ports(len(cases)), strict=True))
    arguments = (count, ports, folder)
    running = mp.start_processes(train_on_rank, arguments, count, join=False, start_method="fork")
    try:
        while not running.join():
            pass
    finally:
        for process in running.processes:
            process.kill()
    return {name: torch.load(folder / f"{name}.pt", weights_only=False) for name in cases}


# Loss and KL are small differences of terms of size 1, so the tolerance of 1e-6 is relative to 1.
MAGNITUDES = {
    "loss": 1.0,
    "kl": 1.0,
    "kl_median": 1.0,
    "clip_frac": 1.0,
    "entropy": 0.0,
    "grad_norm": 0.0,
    "engine/logprob_gap": 10.0,
}


def check_same_training(two: Outcome, one: Outcome) -> None:
    for got, want in zip(two.metrics, one.metrics, strict=True):
        for key, magnitude in MAGNITUDES.items():
            assert got[key] == pytest.approx(want[key], rel=1e-6, abs=1e-6 * magnitude), key
        assert got["update/skipped"] == want["update/skipped"] == 0
    assert 0 < distance(two.gradients, one.gradients) < 1e-6  # exactly 0: the ranks did not add gradients
    assert distance(two.weights, one.weights) < 1e-5
    check_rollout_weights(two)


def check_rollout_weights(outcome: Outcome) -> None:
    for copied, weight in zip(outcome.rollout_weights, outcome.weights, strict=True):
        assert torch.equal(copied, weight.to(copied.dtype))


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """The relative L2 distance over all tensors."""
    got_values = torch.cat([tensor.flatten() for tensor in got]).double()
    want_values = torch.cat([tensor.flatten() for tensor in want]).double()
    return ((got_values - want_values).norm() / want_values.norm()).item()


@pytest.mark.timeout(600)
def test_two_ranks_with_replicated_or_sharded_weights_train_like_one_process(tmp_path):
    one = four_steps(Case("none"), ONE_RANK)
    two = on_ranks(2, ["ddp", "fsdp"], tmp_path)
    for outcome in two.values():
        check_same_training(outcome, one)
    assert max(metrics["clip_frac"] for metrics in one.metrics) > 0
    assert two["ddp"].local_weights == one.local_weights
    assert one.local_weights == pytest.approx(2 * two["fsdp"].local_weights, rel=0.01)


@pytest.mark.slow
def test_every_sharding_trains_like_one_process(tmp_path):
    one = {
        True: four_steps(Case("none"), ONE_RANK),
        False: four_steps(Case("none", tied=False, loss_function=GSPO), ONE_RANK),
    }
    two = on_ranks(2, [name for name in CASES if name.startswith("fsdp, ")], tmp_path)
    bfloat16 = two.pop("fsdp, bfloat16 products")
    for name, outcome in two.items():
        check_same_training(outcome, one[CASES[name].tied])

    assert {tensor.dtype for tensor in bfloat16.gradients + bfloat16.weights} == {torch.float32}
    assert {tensor.dtype for tensor in bfloat16.rollout_weights} == {torch.bfloat16}
    check_rollout_weights(bfloat16)
    assert 1e-4 < distance(bfloat16.gradients, one[True].gradients) < 0.1


@pytest.mark.slow
def test_adapters_on_two_ranks_train_like_those_of_one_process(tmp_path):
    one = four_steps(Case("none", adapter_rank=4), ONE_RANK)
    check_same_training(on_ranks(2, ["ddp, adapters"], tmp_path)["ddp, adapters"], one)


@pytest.mark.slow
def test_four_ranks_train_like_one_process(tmp_path):
    """In step 2 there are three games, so one of the ranks has none."""
    one = four_steps(Case("none"), ONE_RANK)
    four = on_ranks(4, ["fsdp", "hsdp"], tmp_path)
    for outcome in four.values():
        check_same_training(outcome, one)
    assert one.local_weights == pytest.approx(4 * four["fsdp"].local_weights, rel=0.05)
    assert one.local_weights == pytest.approx(2 * four["hsdp"].local_weights, rel=0.05), "shards of a node"


def lost_rank(work: Callable[[], object]) -> None:
    with errors_as_rank_lost(Ranks(0, 2, CPU)):
        work()


def wait_for_a_rank_that_never_comes() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=SHORT)


def test_a_collective_that_fails_makes_the_run_resumable():
    with pytest.raises(RankLost, match=r"rank 0 of 2 .*\(.*same command resumes"):
        lost_rank(wait_for_a_rank_that_never_comes)


def leave_at_once(rank: int, sharded: bool, port: int, folder: Path) -> None:
    """Rank 1 leaves; rank 0 writes down how its next collective fails."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = start_ranks(CPU, "fsdp" if sharded else "ddp", timeout=TIMEOUT)
    policy = tiny.policy()
    if sharded:
        policy.shard(ranks.mesh, ranks.device, offload=False)
    batch = pack([siblings(0, 2)], ranks.device)
    loss = policy(batch).logprobs.sum()
    if rank == 1:
        os._exit(0)
    try:
        with errors_as_rank_lost(ranks):
            loss.backward()
            ranks.sum_gradients(policy)
    except RankLost as error:
        (folder / "error").write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_that_dies_in_a_backward_makes_the_run_of_the_others_resumable(sharded, tmp_path):
    """Sharded weights communicate inside torch's own backward, out of reach of the collectives of `Ranks`."""
    [port] = free_ports(1)
    mp.start_processes(leave_at_once, (sharded, port, tmp_path), nprocs=2, start_method="fork")
    assert "rank 0 of 2 could not communicate" in (tmp_path / "error").read_text()


def test_an_error_outside_of_a_collective_stays_as_it_is():
    def bug() -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        lost_rank(bug)


def test_memory_that_runs_out_in_a_collective_is_no_lost_rank():
    class Large:
        def __reduce__(self):
            raise torch.OutOfMemoryError

    def gather_large_object() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.all_gather_object([None], Large())
        finally:
            dist.destroy_process_group()

    with pytest.raises(torch.OutOfMemoryError):
        lost_rank(gather_large_object)


@pytest.mark.parametrize("kind", [UsageError, Resumable, FatalEnvError, OSError])
def test_a_failure_of_one_rank_is_raised_on_those_that_succeeded_too(kind):
    def work(ranks: Ranks) -> int:
        if ranks.rank == 1:
            raise kind("no room")
        return ranks.rank

    def share(ranks: Ranks) -> bool:
        with pytest.raises(kind, match="no room"), ranks.shared_errors():
            work(ranks)
        with ranks.shared_errors():
            return True

    assert on_each_rank(2, share) == [True, True]


def test_an_unexpected_error_of_one_rank_ends_all_ranks_and_keeps_its_traceback():
    """A bug: the other ranks waited for the timeout of their next collective, which is an hour."""

    class NotPickled(Exception):
        """An error whose class has no name by which another process could find it."""

    def work(ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise NotPickled("no room")

    def shown(ranks: Ranks) -> str:
        failed = r"rank 1 failed \(NotPickled: no room\)"
        # In the loop of train.py, the games share their errors inside such a context.
        caught_error = pytest.raises(RankFailed, match=f"^{failed}")
        with caught_error as caught, ranks.shared_errors(), ranks.shared_errors():
            work(ranks)
        pickle.dumps(caught.value)  # It reached the other ranks.
        return "".join(format_exception(caught.value))

    for text in on_each_rank(2, shown):
        assert text.count('raise NotPickled("no room")') == 1, "the rank that failed showed it twice"


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (
            ZeroDivisionError("only on rank 1"),
            "RankFailed: rank 1 failed (ZeroDivisionError: only on rank 1)",
        ),
        (OSError("no name of a file"), "OSError: no name of a file"),
    ],
)
def test_all_ranks_show_where_one_of_them_failed(error, first):
    """A bug: only the failed rank showed its traceback, and a forked rank has no terminal."""

    def work() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        work()
    shared = pickle.loads(pickle.dumps(as_shared(caught.value, 1)))
    shown = "".join(format_exception(shared))
    assert first in shown and "in work" in shown


def test_a_launch_that_cannot_work_is_one_sentence():
    """Without a variable of torchrun, and with a peer that never comes: each was a traceback of torch.

    The peer is awaited for the given time.
    """
    [port] = free_ports(1)
    begin = time.monotonic()
    alone = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for variables in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", **alone}):
        with (
            patch.dict(os.environ, variables),
            pytest.raises(UsageError, match=r"2 ranks \(WORLD_SIZE\) did not find each other"),
        ):
            start_ranks(CPU, "ddp", timeout=0.2)
    assert time.monotonic() - begin < 30


def test_empty_variables_of_a_launcher_are_those_of_a_single_process():
    with patch.dict(os.environ, {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}):
        assert start_ranks(CPU, "ddp") == ONE_RANK


def test_a_process_takes_the_gpu_of_its_local_rank_or_the_only_one_that_it_sees(monkeypatch):
    """A bug: cuda:3 was asked for by the fourth Slurm task of a node, which saw only its own GPU, cuda:0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setenv("RANK", "8")  # RANK counts over all machines. LOCAL_RANK decides.
    for visible, expected in ((4, [0, 1, 2, 3]), (1, [0, 0, 0, 0])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        for local_rank, number in enumerate(expected):
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
            assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", number)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"--device cuda: there is no GPU 3: this process sees 2"):
        pick_device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")


def test_a_rank_that_does_not_know_its_gpu_is_refused(monkeypatch):
    """A bug: without LOCAL_RANK, every process that srun had started on a node took its first GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto") == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("auto", "cuda"):
        with pytest.raises(UsageError, match=r"LOCAL_RANK .* 4 GPUs"):
            pick_device(name)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert pick_device("auto") == torch.device("cuda", 0)


def test_several_ranks_do_not_take_one_gpu(monkeypatch):
    """A bug: NCCL failed on the second rank, which was reported as a rank that had died."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"--device cuda:0: all ranks would take this GPU"):
        pick_device("cuda:0")
    assert pick_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # The other rank is on another machine.
    assert pick_device("cuda:0") == torch.device("cuda", 0)


def test_a_missing_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"--device cuda: .*no usable GPU.*cpu"):
        pick_device("cuda")


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_the_memory_of_a_gpu_has_expandable_segments_however_the_gpu_is_named(name, monkeypatch):
    """A bug: with `--device cuda:0` it had none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(os, "environ", {})
    pick_device(name)
    assert os.environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_gpu_with_a_number_that_does_not_exist_is_named(monkeypatch):
    """A bug: `--device cuda:7` was a traceback of torch."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UsageError, match=r"--device cuda:7: there is no GPU 7"):
        pick_device("cuda:7")


@pytest.mark.slow
def test_a_second_run_in_a_busy_folder_is_refused_by_all_ranks(tmp_path):
    """Rank 1 waited for rank 0, which had left, and its traceback of 20 lines hid the sentence."""
    from tests.support.programs import call

    line = "train.py --agent none --env mini --data mini --device cpu --out run".split()
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        refused = call(tmp_path, *line, ranks=2)
    assert "train.py: run is in use by process" in refused.stderr and "[rank1]" not in refused.stderr


def test_a_weight_that_no_token_of_a_rank_used_takes_part_in_the_sum(monkeypatch):
    """Such as an expert's: a rank that left it out would wait in another collective than the others."""
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", reduced.append)
    experts = torch.nn.ParameterList([torch.zeros(2), torch.zeros(3)])
    experts[0].grad = torch.ones(2)
    Ranks(0, 2, CPU).sum_gradients(experts)
    assert [gradients.tolist() for gradients in reduced] == [[1, 1, 0, 0, 0]]


def test_gradients_are_summed_in_buckets_and_each_returns_to_its_weight(monkeypatch):
    """A collective for each gradient cost a small model more than its optimiser step."""
    reduced = []

    def add_the_gradients_of_an_equal_rank(bucket: Tensor) -> None:
        reduced.append(bucket.numel())
        bucket.mul_(2)

    monkeypatch.setattr(distributed, "BUCKET", 6)
    monkeypatch.setattr(dist, "all_reduce", add_the_gradients_of_an_equal_rank)
    shapes = [(2,), (2, 2), (3, 5), (1,), (4,), (3,)]
    weights = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes])
    own = [torch.randn(shape) for shape in shapes]
    for weight, gradient in zip(weights, own, strict=True):
        weight.grad = gradient.clone()
    Ranks(0, 2, CPU).sum_gradients(weights)
    assert reduced == [6, 15, 5, 3]
    for weight, gradient in zip(weights, own, strict=True):
        assert torch.equal(weight.grad, 2 * gradient)


def test_no_rank_raises_an_error_before_every_rank_has_received_it(monkeypatch):
    """A rank that left at once broke the connection through which another one still received the error."""
    waited: list[int] = []

    def note(ranks: Ranks) -> None:
        waited.append(ranks.rank)

    def stop() -> None:
        raise Resumable("no room")

    def share(ranks: Ranks) -> None:
        with ranks.shared_errors():
            pass
        assert not waited, "ranks that succeed need no barrier"
        ranks.gather(None)
        with pytest.raises(Resumable):
            ranks.on_first_rank(stop)

    monkeypatch.setattr(ThreadRanks, "barrier", note)
    on_each_rank(2, share)
    assert sorted(waited) == [0, 1]


def test_a_rank_leaves_the_process_group_only_when_every_rank_has_done_its_work(monkeypatch):
    """Gloo can abort a process whose partner has left."""
    events: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda: events.append("wait"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: events.append("leave"))
    stop_ranks(Ranks(0, 2, CPU))
    assert events == ["wait", "leave"]
