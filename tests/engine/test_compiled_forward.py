"""The compiled forward against the eager one: hidden states, the cache that both write, and the engine."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from prompt_r1.engine import compiled_forward
from prompt_r1.engine.compiled_forward import CompiledForward
from prompt_r1.engine.engine import Engine
from prompt_r1.engine.kv_cache import BlockPool, TokenSequence
from prompt_r1.engine.paged_attention import PagedBatch
from prompt_r1.model.loading import load_policy
from prompt_r1.model.policy import Policy
from tests.engine import test_engine
from tests.support import tiny
from tests.support.games import CPU, play_with

OTHER_FAMILIES = ("llama", "gemma3_text", "granite", "olmo2", "phi3", "smollm3")
FAMILIES = ["qwen3", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHER_FAMILIES)]
AOT_EAGER = {"backend": "aot_eager"}  # compiles to the eager kernels, within seconds
NEW = ((2, 3), (16, 1), (1, 1), (20, 13))  # the new tokens of two sequences in each of four forwards


@pytest.fixture(autouse=True)
def no_earlier_graphs() -> None:
    torch._dynamo.reset()
    counters.clear()


def cached_turns(policy: Policy, forward) -> tuple[list[Tensor], Tensor]:
    """The hidden states of four forwards over two sequences, and the cache that they filled."""
    pool = BlockPool(policy, blocks=12, block_size=8)
    pool.cache.zero_()
    sequences, hidden = [TokenSequence(0), TokenSequence(1)], []
    for turn, counts in enumerate(NEW):
        new_tokens: dict[TokenSequence, list[int]] = {}
        for sequence, count in zip(sequences, counts, strict=True):
            new_tokens[sequence] = [token % 99 for token in tiny.random_tokens(count, seed=turn)]
            pool.allocate(sequence, len(sequence.tokens) + count)
        with torch.inference_mode():
            hidden.append(forward(PagedBatch(new_tokens, pool)))
        for sequence, new in new_tokens.items():
            sequence.tokens += new
    return hidden, pool.cache


@pytest.mark.slow  # Compiling takes ten seconds.
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_one_graph_for_all_batches_and_equals_the_eager_forward(family, tmp_path):
    """Bit by bit: hidden states, and the keys and values that the forwards wrote to the cache."""
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3_text" else {}
    folder = tiny.save_model(tmp_path, family, num_hidden_layers=2, **layers)
    policy = load_policy(folder, device=CPU)
    compiled, compiled_cache = cached_turns(policy, CompiledForward(policy, compiler=AOT_EAGER))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    eager, eager_cache = cached_turns(policy, policy.hidden_states)
    assert all(map(torch.equal, compiled, eager))
    assert torch.equal(compiled_cache, eager_cache) and compiled_cache.count_nonzero() > 1000


def play(policy: Policy, forward) -> list[list[int]]:
    """Six games of three turns that share their openings in pairs."""
    engine = tiny.engine(policy, max_tokens=128, kv_tokens=400, block_size=16, prefill_tokens=24)
    engine._forward = forward
    openings = [tiny.random_tokens(20 + number // 2, seed=number // 2) for number in range(6)]
    return [game.tokens for game in play_with(engine, openings, turns=2, max_new=9)]


@pytest.mark.slow  # Compiling takes ten seconds.
def test_the_engine_writes_the_same_tokens_with_two_graphs():
    policy = tiny.policy()
    compiled = CompiledForward(policy, compiler=AOT_EAGER)
    assert play(policy, compiled) == play(policy, policy.hidden_states)
    assert counters["stats"]["unique_graphs"] <= 2, "one for a single token, and one for all other batches"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports a deprecated part of torch
def test_inductor_computes_what_the_eager_forward_does():
    policy = tiny.policy(layers=1)
    compiled, compiled_cache = cached_turns(policy, CompiledForward(policy))
    assert counters["stats"]["unique_graphs"] == 1
    eager, eager_cache = cached_turns(policy, policy.hidden_states)
    for one, other in zip([*compiled, compiled_cache], [*eager, eager_cache], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@settings(max_examples=100)
@given(**test_engine.WORKLOADS)
def test_the_compiled_engine_equals_a_naive_computation_over_random_schedules(**workload):
    """Each engine gets the compiled forward, as on a GPU."""

    class CompiledEngine(Engine):
        def __init__(self, policy: Policy, **options: object) -> None:
            super().__init__(policy, **options)
            self._forward = CompiledForward(policy, compiler=AOT_EAGER)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "Engine", CompiledEngine)
        test_engine.check_schedule(**workload)
        assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow  # The first compilation imports the compiler.
def test_a_model_that_cannot_be_compiled_plays_eagerly_with_a_warning():
    policy, attempts = tiny.policy(), []

    def broken(graph: object, inputs: object) -> None:
        attempts.append(graph)
        raise RuntimeError("no such instruction")

    torch._dynamo.register_backend(broken, name="broken")
    with pytest.warns(UserWarning, match="does not work here .*no such instruction") as said:
        tokens = play(policy, CompiledForward(policy, compiler={"backend": "broken"}))
    assert len(attempts) == len(said) == 1
    assert tokens == play(policy, policy.hidden_states)


@pytest.mark.parametrize("kind", [TorchDynamoException, RuntimeError, OSError])
def test_a_model_that_could_not_be_compiled_is_not_compiled_again_and_no_batch_is_kept(kind, monkeypatch):
    """An attempt takes minutes on a large model, and a batch holds the tensors of its step."""
    attempts = []

    def broken_compiler(model: object, **options: object):
        def compiled(*inputs: object, **keywords: object) -> None:
            attempts.append(model)
            raise kind("no such instruction")

        return compiled

    monkeypatch.setattr(torch, "compile", broken_compiler)
    policy = tiny.policy()
    with pytest.warns(UserWarning, match="no such instruction") as said:
        found, _ = cached_turns(policy, CompiledForward(policy))
    assert len(attempts) == len(said) == 1
    assert compiled_forward._running.get(None) is None
    assert all(map(torch.equal, found, cached_turns(policy, policy.hidden_states)[0]))


def test_out_of_memory_in_the_compiled_forward_is_left_to_the_engine(monkeypatch):
    def scarce(*inputs: object, **keywords: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "compile", lambda model, **options: scarce)
    with pytest.raises(torch.OutOfMemoryError):
        cached_turns(tiny.policy(), CompiledForward(tiny.policy()))
