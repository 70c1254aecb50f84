"""Fused kernels against the model's own modules, on a CPU: what is compiled for a GPU is not tested."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from prompt_r1.agent import attention
from prompt_r1.agent.fused_kernels import fuse, own_forwards
from prompt_r1.agent.model_check import check_model
from prompt_r1.agent.packing import pack
from prompt_r1.agent.policy import Policy
from tests import tiny
from tests.games import CPU, siblings

QWEN3 = ("Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm")


def uncompiled(function):
    """In place of torch.compile, which takes seconds."""
    return function


def gradients(policy: Policy) -> list[torch.Tensor]:
    """Of the log-probabilities of a packed group."""
    policy.zero_grad()
    policy(pack([siblings(0, 3)], CPU)).logprobs.sum().backward()
    return [weight.grad.clone() for weight in policy.parameters()]


def relative(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_unmodified_model(checkpointing):
    policy = tiny.policy()
    if checkpointing:
        policy.checkpoint_activations()
    expected = gradients(policy)
    assert fuse(policy.model, CPU, torch.float32, compiler=uncompiled) == QWEN3
    assert relative(gradients(policy), expected) < 1e-5
    check_model(policy)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_kernels_compute_what_the_model_computes_with_checkpointing_and_with_new_sizes():
    policy = tiny.policy()
    policy.checkpoint_activations()
    expected = gradients(policy)
    assert fuse(policy.model, CPU, torch.float32) == QWEN3
    assert relative(gradients(policy), expected) < 1e-5
    check_model(policy)  # rows of other lengths, and single tokens over the cache


def test_weights_may_be_wider_than_the_products():
    """The learner without shards: float32 weights, products in bfloat16."""
    policy = Policy(tiny.model(), compute=torch.bfloat16)
    assert fuse(policy.model, CPU, torch.bfloat16, compiler=uncompiled) == QWEN3
    check_model(policy)


def test_the_kernels_of_each_model_are_compiled_apart():
    """torch.compile keeps eight variants of a code object, then leaves further ones uncompiled."""
    functions = []

    def compiler(function):
        functions.append(function)
        return function

    for _ in range(2):
        fuse(tiny.model(), CPU, torch.float32, compiler=compiler)
    assert len({id(function.__code__) for function in functions}) == len(functions) == 4


def test_a_rotary_embedding_that_is_a_module_is_compiled_as_it_is(monkeypatch):
    """The package `kernels` puts one in the place of the function."""

    class Rotary(nn.Module):
        forward = staticmethod(modeling_qwen3.apply_rotary_pos_emb)

    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", Rotary())
    assert fuse(tiny.model(), CPU, torch.float32, compiler=uncompiled) == QWEN3


def test_a_fused_module_that_computes_something_else_is_not_used():
    """GELU in place of SiLU, and a rotary function that turns the other way."""
    model = tiny.model()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()

    def compiler(function):
        return lambda *inputs: function(*inputs[:-1], -inputs[-1])

    found = fuse(model, CPU, torch.float32, compiler=compiler)
    assert found == ("Qwen3RMSNorm",)
    assert "forward" not in vars(model.model.layers[0].mlp)


def test_wrong_gradients_are_noticed():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            return given.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / 2

    def compiler(function):
        return lambda first, *others: function(Halved.apply(first), *others)

    assert fuse(tiny.model(), CPU, torch.float32, compiler=compiler) == ("Qwen3RMSNorm",)


def test_without_a_compiler_the_model_computes_as_it_is():
    def compiler(function):
        def fails(*_):
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

        return fails

    with pytest.warns(UserWarning, match="kernels are not fused.*Failed to find C compiler"):
        assert fuse(tiny.model(), CPU, torch.float32, compiler=compiler) == ("Qwen3RMSNorm",)


def test_copies_compute_with_their_own_weights_and_own_forwards_come_back():
    model = tiny.model()
    state = torch.get_rng_state()
    fuse(model, CPU, torch.float32, compiler=uncompiled)
    assert torch.equal(torch.get_rng_state(), state)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    tokens = torch.tensor([tiny.random_tokens(9, seed=0)])
    assert torch.allclose(other(input_ids=tokens).logits, 2 * model(input_ids=tokens).logits, rtol=1e-4)
    with own_forwards(model):
        assert "forward" not in vars(model.model.norm)
    assert "forward" in vars(model.model.norm)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3", "olmo2", "gpt2"])
def test_every_family_computes_right_with_what_is_fused_of_it(kind):
    attention.register()
    config = AutoConfig.for_model(
        kind, vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=48, pad_token_id=0,
    )  # fmt: skip
    if kind == "gpt2":
        config.num_key_value_heads = 4
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
    found = fuse(model, CPU, torch.float32, compiler=uncompiled)
    assert bool(found) == (kind != "gpt2")
    check_model(Policy(model, compute=torch.float32))
