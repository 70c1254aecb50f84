"""The benchmarks run, and ours and the rivals sample the same tokens and learn the same."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import calls, forwards, gpu_check, rollout, update
from benchmarks.rivals import play_continuous, play_generate
from benchmarks.rollout import count_greedy_games, play_ours
from benchmarks.workload import Lengths, plan, random_model, totals
from prompt_r1.agent import cuda_graphs
from tests import tiny
from tests.agent.conftest import kernel_in_plain_torch
from tests.paths import ROOT

SHORT = Lengths(prompt=24, turns=(1, 1, 1), new=(3, 6), reply=(2, 5), latency=0.01, sigma=0.5)


@pytest.fixture(scope="module")
def games():
    return plan(2, 2, seed=3, lengths=SHORT, vocabulary=tiny.model().config.vocab_size)


def make_model(kind: str):
    model = tiny.model()
    model.set_attn_implementation(kind)
    model.generation_config.eos_token_id = None  # the plan sets the length of each turn
    return model


def summary_of(main, line: str, monkeypatch, capsys) -> object:
    """Run a benchmark with these arguments; the JSON of its last line."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *line.split()])
    main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_rival_samples_the_same_greedy_tokens(games):
    ours = play_ours(tiny.policy(), games, latency=False)
    assert count_greedy_games(make_model("sdpa"), games, ours.tokens) == len(games)
    assert ours.prefilled == totals(games).prefill
    lockstep = play_generate(make_model("sdpa"), games, latency=True)
    assert lockstep.tokens == ours.tokens
    assert 0 < lockstep.waiting < lockstep.wall
    batched = play_continuous(make_model("sdpa"), games, latency=True, batch=64, pages=64)
    assert batched.tokens == ours.tokens


def test_the_rollout_benchmark_runs(games, monkeypatch, capsys):
    monkeypatch.setattr(rollout, "plan", lambda *_, **__: games)
    monkeypatch.setattr(rollout, "random_model", lambda name, attention, **_: make_model(attention))
    result = summary_of(rollout.main, "--rounds 1 --rivals lockstep", monkeypatch, capsys)
    assert result["identical"] and result["prefill_exact"] and result["rivals_identical"] == 4
    assert result["vs_lockstep"] > 0


@pytest.mark.slow
def test_the_update_benchmark_runs_and_the_variants_learn_the_same(monkeypatch, capsys):
    result = summary_of(update.main, "--vocabulary 500 --questions 1 --rounds 1", monkeypatch, capsys)
    assert result["vs_naive"] > 0 and result["loss_difference"] < 1e-5


def test_the_large_model_has_the_size_of_qwen3_4b():
    model = random_model("Qwen3-4B", attention="sdpa", dtype=torch.bfloat16, device=torch.device("meta"))
    assert sum(weight.numel() for weight in model.parameters()) == 4_022_468_096


def test_the_flop_of_a_prefill_equal_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    model = make_model("eager")
    ids = torch.arange(32)[None]
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.base_model(ids)
    bench = forwards.Bench(tiny.policy(), rows=64, longest=64, rounds=1)
    counted, _ = bench.prefill(32, prompts=1)
    # Unlike torch, we count only the unmasked pairs of tokens, and the weights of norms as if multiplied.
    norms = 2 * 32 * sum(weight.numel() for weight in model.parameters() if weight.ndim == 1)
    masked = 4 * bench.shape.layers * bench.shape.heads * bench.shape.dim * (32 * 32 - 32 * 33 / 2)
    assert counted - norms + masked == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.slow
def test_a_thousand_games_at_once_cost_little_cpu_and_do_not_block_the_event_loop(monkeypatch, capsys):
    """A bug: with 1,000 calls at once, a call took 33.7 ms of CPU, and the loop stood still for 32 s."""
    for load in summary_of(calls.main, "--games 250 1000 --latency 0.2", monkeypatch, capsys):
        assert load["calls"] == 3 * load["games"] and load["failed"] == 0
        # CPU time, which other work of the machine disturbs little; twice what a quiet machine takes.
        assert load["cpu_ms"] < 7 and load["lag_cpu"] < 1


ONE_RANK = gpu_check.Ranks(rank=0, count=1, device=torch.device("cpu"))


def test_a_cuda_error_that_stays_leaves_a_table():
    """After an illegal access every call of CUDA raises, the collectives of training included."""

    def illegal(_: gpu_check.Machine) -> gpu_check.Row:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Broken(gpu_check.Ranks):
        def max(self, values):
            illegal(None)

        sum = max

    machine = gpu_check.Machine(Broken(rank=0, count=1, device=torch.device("cpu")))
    rows = list(gpu_check.run_checks(machine, {"one": illegal, "two": illegal}, time.monotonic() + 60))
    assert [(row.name, row.verdict) for row in rows] == [("one", "FAIL"), ("two", "FAIL")]
    late = list(gpu_check.run_checks(machine, {"one": illegal, "two": illegal}, time.monotonic()))
    assert [(row.verdict, row.note) for row in late][1] == ("SKIP", "no time left")


def test_no_row_writes_beyond_a_small_cache(monkeypatch):
    """On a GPU an index beyond the cache is an error that stays."""
    monkeypatch.setattr(gpu_check, "random_model", lambda *_, attention, **__: make_model(attention))
    machine = gpu_check.Machine(ONE_RANK)
    machine.bench = forwards.Bench(machine.policy, rows=70, longest=64, rounds=1)
    assert gpu_check.run_check("prefill", gpu_check.prefill, machine).verdict == "PASS"


@pytest.fixture
def recording_machine(monkeypatch):
    """A machine whose decode steps are recorded by a kernel in plain torch."""
    monkeypatch.setattr(gpu_check, "random_model", lambda *_, attention, **__: make_model(attention))
    monkeypatch.setattr(
        gpu_check.Policy, "attention", SimpleNamespace(decode=kernel_in_plain_torch, shares_rows=False)
    )
    return gpu_check.Machine(ONE_RANK, record=lambda step: step)


def test_a_replay_sees_new_weights(recording_machine):
    found = gpu_check.replay_after_new_weights(recording_machine)
    assert found.verdict == "PASS" and found.value < 1e-5


@pytest.mark.slow
def test_every_size_of_graph_is_recorded(recording_machine):
    found = gpu_check.graphs_of_every_size(recording_machine)
    assert (found.verdict, found.value) == ("PASS", len(cuda_graphs.SIZES))


@pytest.mark.slow
def test_the_check_of_a_gpu_has_no_failing_row_on_two_cpu_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "benchmarks.gpu_check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["name"] for row in rows] == list(gpu_check.CHECKS)
    verdicts = {row["name"]: row["verdict"] for row in rows}
    assert not [row for row in rows if row["verdict"] == "FAIL"]
    skipped = {name for name, verdict in verdicts.items() if verdict == "SKIP"}
    assert skipped == {"graphs of every size", "replay with new weights"}
