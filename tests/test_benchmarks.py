"""The benchmarks: all engines play the same games, and the counted work is the work that is done."""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks import bfloat16, calls, cluster, gpu_check, launches, models, rollout, roofline, virtual
from benchmarks.rivals import Vllm, play_continuous, play_generate
from benchmarks.rollout import count_greedy_games, play_ours
from benchmarks.workload import Lengths, large_model, longest, plan, totals
from prompt_r1.agent import attention, cuda_graphs
from tests import tiny
from tests.agent.test_cuda_graphs import attend_from_offsets
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


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in Path(rollout.__file__).parent.glob("[a-z]*.py"))
)
def test_every_benchmark_can_be_imported(name):
    assert import_module(f"benchmarks.{name}").__doc__


def test_every_rival_samples_the_same_greedy_tokens(games):
    ours = play_ours(tiny.policy(), games, latency=False)
    assert count_greedy_games(make_model("sdpa"), games, ours.tokens) == len(games)
    assert ours.prefilled == totals(games).prefill and 0 <= ours.waiting < 0.1
    for static in (False, True):
        assert play_generate(make_model("sdpa"), games, latency=False, static=static).tokens == ours.tokens
    batched = play_continuous(make_model("sdpa"), games, latency=True, batch=64, pages=64)
    assert batched.tokens == ours.tokens


def test_the_time_in_which_all_games_wait_is_measured():
    three_turns = replace(SHORT, turns=(0, 0, 1), latency=0.2, sigma=0.01)
    one = plan(1, 1, seed=2, lengths=three_turns, vocabulary=99)
    for run in (
        play_ours(tiny.policy(), one, latency=True),
        play_generate(make_model("sdpa"), one, latency=True, static=False),
    ):
        assert run.waiting == pytest.approx(totals(one).longest_chain, rel=0.2)


def test_vllm_plays_the_same_games(games, monkeypatch):
    """A fake engine with vLLM's interface decodes one sequence at a time with the weights that it loads."""
    events = []

    class FakeEngine:
        @classmethod
        def from_engine_args(cls, arguments):
            asyncio.get_running_loop()
            self = cls()
            self.model = AutoModelForCausalLM.from_pretrained(arguments.model)
            self.limit = arguments.max_model_len
            return self

        async def generate(self, prompt, sampling, request_id):
            ids = torch.tensor([prompt["prompt_token_ids"]])
            assert sampling.temperature == 0.0 and sampling.ignore_eos
            assert ids.shape[1] + sampling.max_tokens <= self.limit
            await asyncio.sleep(0)
            events.append(request_id)
            with torch.inference_mode():
                out = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=sampling.max_tokens,
                    eos_token_id=None,
                )
            new = out[0, ids.shape[1] :].tolist()
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(new))])

        async def reset_prefix_cache(self):
            events.append("reset")

        def shutdown(self):
            events.append("shutdown")

    package, parameters = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.AsyncLLMEngine, package.TokensPrompt = FakeEngine, dict
    package.AsyncEngineArgs = package.SamplingParams = SimpleNamespace
    parameters.RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    with Vllm(make_model("sdpa"), games, share=0.4) as rival:
        runs = [rival.play(latency=False) for _ in range(2)]
    expected = play_ours(tiny.policy(), games, latency=False).tokens
    assert [run.tokens for run in runs] == [expected, expected]
    assert len(set(events) - {"reset", "shutdown"}) == 2 * totals(games).turns
    assert events.count("reset") == 2 and events[-1] == "shutdown"


def test_a_plan_has_the_requested_lengths(games):
    assert longest(games) == max(
        24 + sum(turn.new_tokens + len(turn.reply) for turn in game.turns) for game in games
    )
    assert all(3 <= turn.new_tokens <= 6 and len(turn.reply) <= 5 for game in games for turn in game.turns)
    assert games[0].prompt == games[1].prompt != games[2].prompt


def test_the_large_model_has_the_size_of_qwen3_4b():
    model = large_model(attention="sdpa", device=torch.device("meta"))
    assert sum(weight.numel() for weight in model.parameters()) == 4_022_468_096
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_the_rollout_benchmark_prints_its_summary_as_the_last_line(games, monkeypatch, capsys):
    monkeypatch.setattr(rollout, "plan", lambda *_, **__: games)
    monkeypatch.setattr(rollout, "load", lambda name, kind, device: make_model(kind))
    monkeypatch.setattr(
        sys, "argv", ["rollout", "--rounds", "1", "--rivals", "lockstep", "vllm", "--ablations"]
    )
    rollout.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["identical"] and result["prefill_exact"] and result["rivals_identical"] == 4
    assert result["vs_lockstep"] > 0 and result["vs_generate_batch"] is result["vs_vllm"] is None


def test_the_roofline_benchmark_counts_the_bytes_that_a_decode_step_reads(monkeypatch, capsys):
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(roofline, "MATRIX_SIDE", {"cpu": 64})
    monkeypatch.setattr(roofline, "load", lambda name, kind, device: make_model(kind))
    monkeypatch.setattr(sys, "argv", ["roofline", "--rounds", "1", "--sequences", "3", "--contexts", "40"])
    roofline.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    model = make_model(attention.NAME)
    config = model.config
    weights = sum(weight.numel() for weight in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    cached = 3 * 40 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    assert result["decode"][0]["bytes"] == 4 * (weights + cached)
    assert result["kernel"] == "one_by_one" and result["attention_error"] < 1e-5


def test_the_flop_of_a_prefill_equal_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    model = make_model("eager")
    ids = torch.arange(32)[None]
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.base_model(ids)
    bench = roofline.Bench(tiny.policy(), rows=64, longest=64, rounds=1)
    counted = bench.prefill(32, prompts=1).flop
    # Unlike torch, we count only the unmasked pairs of tokens, and the weights of norms as if multiplied.
    norms = 2 * 32 * sum(weight.numel() for weight in model.parameters() if weight.ndim == 1)
    masked = 4 * bench.shape.layers * bench.shape.heads * bench.shape.dim * (32 * 32 - 32 * 33 / 2)
    assert counted - norms + masked == pytest.approx(counter.get_total_flops(), rel=0.01)


def measure_calls(monkeypatch, capsys, line: str) -> list[dict[str, float]]:
    """Run the benchmark of calls with these arguments; its summary."""
    monkeypatch.setattr(sys, "argv", ["calls", *line.split()])
    calls.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_benchmark_of_calls_plays_all_games(monkeypatch, capsys):
    rounds = measure_calls(monkeypatch, capsys, "--games 10 --rounds 2 --latency 0.01")
    assert [load["calls"] for load in rounds] == [30, 30]
    for load in rounds:
        assert load["failed"] == 0 and load["cpu_ms"] > 0 and load["descriptors"] > 3


@pytest.mark.slow
def test_a_thousand_games_at_once_cost_little_cpu_and_do_not_block_the_event_loop(monkeypatch, capsys):
    """A bug: with 1,000 calls at once, a call took 33.7 ms of CPU, and the loop stood still for 32 s."""
    for load in measure_calls(monkeypatch, capsys, "--games 250 1000 --latency 0.2"):
        assert load["calls"] == 3 * load["games"] and load["failed"] == 0
        # CPU time, which other work of the machine disturbs little; twice what a quiet machine takes.
        assert load["cpu_ms"] < 7 and load["lag_cpu"] < 1


def test_the_page_of_models_lists_every_type_of_the_installed_transformers():
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    if f"transformers {transformers.__version__} " not in page:
        pytest.skip("the page was written with another version of transformers")
    assert not [name for name in models.all_names() if f"| `{name}` |" not in page]
    assert " 0 wrong. " in page


def test_the_survey_tells_right_refused_and_untestable_types_apart():
    found = models.survey(["qwen3", "stablelm", "zamba2"])
    assert list(found.right) == ["qwen3"] and not found.wrong
    assert "do not pass the cache on" in found.refused["stablelm"]
    assert "num_hidden_layers" in found.untested["zamba2"]


@pytest.mark.slow
def test_well_known_types_are_right_and_none_is_wrong():
    right = (
        "llama", "mistral", "qwen2", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3",
        "smollm3", "olmo2", "granite", "gpt2", "gpt_neox", "opt", "gpt_oss", "cohere", "mixtral",
    )  # fmt: skip
    refused = (
        "deepseek_v3",
        "qwen3_next",
        "bloom",
        "falcon",
        "jamba",
        "rwkv",
        "nemotron",
        "diffllama",
        "bert",
    )
    found = models.survey([*right, *refused])
    assert list(found.right) == list(right) and list(found.refused) == list(refused), found


LAUNCHES = virtual.Launches(products=15, attention=2, small=100)


def test_a_virtual_rollout_plays_the_plan_and_takes_as_long_as_its_parts():
    lengths = replace(SHORT, prompt=410, latency=3.0)
    planned = plan(2, 2, seed=3, lengths=lengths, vocabulary=999)
    device = replace(virtual.A100, kv_tokens=40_000)
    run = virtual.play_virtually(planned, lengths, device, LAUNCHES)
    for parts, game in zip(run.games, planned, strict=True):
        assert parts[0] == 410 and len(parts) == 2 * len(game.turns)
        assert parts[2::2] == [len(turn.reply) for turn in game.turns[:-1]]
        assert all(3 <= count <= 6 for count in parts[1::2])
    assert run.sampled == sum(sum(parts[1::2]) for parts in run.games)
    parts_of_time = run.graph_seconds + run.eager_seconds + run.host_seconds + run.waiting_seconds
    assert run.seconds == pytest.approx(parts_of_time, abs=0.01)
    # Each question, of which most is the instruction, is computed once, and nothing is evicted.
    assert run.prefilled == run.needed - virtual.INSTRUCTION
    longest_chain = totals(planned).longest_chain
    assert longest_chain < run.seconds < longest_chain + 2.0
    assert len(run.admissions) == len(run.steps) > 10 and min(run.steps) > 0


def test_a_virtual_forward_takes_the_time_that_the_assumptions_give():
    clock = virtual.VirtualClock()
    model = virtual.ToyModel(virtual.A100, LAUNCHES, clock, (3, 6))
    decode = model._seconds(torch.tensor([999, 1999]))
    assert decode == pytest.approx((8.04e9 + 3000 * 147_456) / 1.555e12 / 0.82, rel=1e-3)
    prompt = model._seconds(torch.arange(8192))
    flop = 7.27e9 * 8192 + 0.59e6 * 8192 * 8193 / 2
    assert prompt == pytest.approx(flop / 312e12 / 0.52, rel=1e-3)
    clock.replaying = True
    assert model._seconds(torch.tensor([999, 1999])) == pytest.approx(
        decode + (100 + LAUNCHES.attention) * 2e-6
    )
    assert model.batches == [2, 2]


def test_the_launches_and_waits_of_a_small_program_are_counted():
    trace = launches.Trace()
    matrix, row = torch.zeros(4, 4, device="meta"), torch.zeros(4, device="meta")
    with trace, launches.HostLists(trace.counts):
        product = (matrix @ matrix.T)[:, 1:].contiguous()  # two kernels: views launch nothing
        (product.exp() + row[:3]).sum().item()  # three kernels, one wait
        row.copy_(torch.zeros(4), non_blocking=True)
        torch.tensor([1, 2], device="meta")
        matrix[[0, 1]].tolist()  # a copy of the indices, one kernel, a copy of the result
    counts = trace.counts
    assert counts.operations == {"mm": 1, "clone": 1, "exp": 1, "add": 1, "sum": 1, "index": 1}
    assert (counts.uploads, counts.downloads, counts.copies) == (2, 2, 1)


def test_a_decode_step_is_traced_without_its_prompt():
    model = make_model(attention.NAME).to("meta", torch.bfloat16)
    traced = launches.trace_decode_step(model, rows=3, fused=False)
    fused = launches.trace_decode_step(model, rows=3)
    layers = model.config.num_hidden_layers
    assert traced.launches.attention == 2 * layers  # to the shared prompt, and to the game's own tokens
    assert traced.launches.products == 7 * layers + 1
    # Four norms of 8 kernels, 10 for the rotary embedding, 2 for the gate; fused, they are 1, 2 and 1.
    norms = 4 * layers + 1
    assert traced.launches.small - fused.launches.small == 7 * norms + 8 * layers + layers
    assert traced.synchronisations == fused.synchronisations == 1


def test_the_efficiency_of_the_update_counts_what_ranks_wait_for():
    equal = cluster.scored_groups([[10, 6], [10, 6], [10, 6], [10, 6]], group_size=2)
    assert cluster.update_efficiency(equal, 1, 4, 1000) == cluster.update_efficiency(equal, 2, 4, 1000) == 1
    # Both groups are split, so each rank has 10 + 25 and 10 + 5 tokens; whole, one would have 10 + 2 × 25.
    uneven = cluster.scored_groups([[10, 6], [10, 6], [10, 26], [10, 26]], group_size=2)
    assert cluster.update_efficiency(uneven, 2, 4, 1000) == pytest.approx((20 + 60) / 2 / 50)


@pytest.mark.slow
def test_the_benchmark_of_a_cluster_prints_its_summary_as_the_last_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cluster", "--questions", "16"])
    cluster.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 36 * 8 < result["launches_decode"] <= 1000 and result["syncs_decode"] <= 2
    assert result["virtual_rollout_s_a100"] > 1 and 0.9 < result["prefill_ratio_a100"] < 4
    assert 0 < result["update_efficiency_16"] <= result["update_efficiency_8"] <= 1
    assert 0 < result["admission_ms_640"] < 50 and 0 < result["step_ms_128"] < 50


ONE_RANK = gpu_check.Ranks(rank=0, count=1, device=torch.device("cpu"))


def test_a_check_that_raises_is_a_row_that_fails():
    def broken(_: gpu_check.Machine) -> gpu_check.Found:
        raise ValueError("first line\nsecond line")

    def absent(_: gpu_check.Machine) -> gpu_check.Found:
        raise gpu_check.Skipped("no GPU")

    def slow(_: gpu_check.Machine) -> gpu_check.Found:
        return gpu_check.at_least(3.0, 4.0, "GB/s", "copy")

    def wrong(_: gpu_check.Machine) -> gpu_check.Found:
        return gpu_check.at_most(float("nan"), 4.0, "", "error")

    machine = gpu_check.Machine(ONE_RANK)
    rows = [gpu_check.run_check("row", check, machine) for check in (broken, absent, slow, wrong)]
    assert [row.verdict for row in rows] == ["FAIL", "SKIP", "SLOW", "FAIL"]
    assert rows[0].note == "ValueError: first line" and rows[1].note == "no GPU"
    assert rows[2].note == "copy; at least 4 expected"


def test_a_cuda_error_that_stays_leaves_a_table():
    """After an illegal access every call of CUDA raises, the collectives of training included."""

    def illegal(_: gpu_check.Machine) -> gpu_check.Found:
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


def test_a_row_is_that_of_the_worst_rank():
    good, slow = (gpu_check.Row("copy", verdict, 1.0, "GB/s", "note") for verdict in ("PASS", "SLOW"))
    assert gpu_check.worst([good, good]) == good and gpu_check.worst([slow, slow]) == slow
    assert gpu_check.worst([good, slow, good]).note == "on 1 of 3 ranks, first rank 1: note"


@pytest.mark.parametrize(("rows", "verdict"), [(70, "SKIP"), (100, "PASS")])
def test_no_row_writes_beyond_a_small_cache(monkeypatch, rows, verdict):
    """On a GPU an index beyond the cache is an error that stays."""
    monkeypatch.setattr(gpu_check, "small_model", lambda **options: make_model(options["attention"]))
    machine = gpu_check.Machine(ONE_RANK)
    machine.bench = roofline.Bench(machine.policy, rows=rows, longest=64, rounds=1)
    assert gpu_check.run_check("mixed step", gpu_check.mixed_step, machine).verdict == verdict
    assert gpu_check.run_check("prefill", gpu_check.prefill, machine).verdict == "PASS"


@pytest.fixture
def recording_machine(monkeypatch):
    """A machine whose decode steps are recorded by a kernel in plain torch."""
    monkeypatch.setattr(gpu_check, "small_model", lambda **options: make_model(options["attention"]))
    monkeypatch.setattr(gpu_check.Policy, "decode_kernel", lambda self: attend_from_offsets)
    return gpu_check.Machine(ONE_RANK, record=lambda step: step)


def test_a_replay_sees_new_weights(recording_machine):
    found = gpu_check.replay_after_new_weights(recording_machine)
    assert found.verdict == "PASS" and found.value < 1e-5


@pytest.mark.slow
def test_every_size_of_graph_is_recorded(recording_machine):
    found = gpu_check.graphs_of_every_size(recording_machine)
    assert (found.verdict, found.value) == ("PASS", len(cuda_graphs.SIZES))


def test_a_replay_with_old_weights_fails(recording_machine):
    """What a graph of other addresses would do: its result stays as it was recorded."""

    def record(step):
        recorded = step()
        return lambda: recorded

    recording_machine.record = record
    assert gpu_check.replay_after_new_weights(recording_machine).verdict == "FAIL"


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
    assert skipped == {"free memory", "graphs of every size", "replay with new weights"}


@pytest.mark.slow
def test_float32_logits_make_the_gap_of_bfloat16_smaller(capsys):
    bfloat16.measure_gap(1)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    rounded, exact = ([float(row[2]) for row in rows if kind in row[0]] for kind in ("bfloat16", "float32"))
    assert len(rounded) == len(exact) == 2
    assert all(0 < after < before < 0.05 for after, before in zip(exact, rounded, strict=True))
