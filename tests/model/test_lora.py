"""Adapters against merged weights, and against the model without them."""

from contextlib import suppress
from itertools import combinations

import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from prompt_r1.errors import UsageError
from prompt_r1.model.lora import LoRA, adapters_of, adapters_removed, add_lora
from prompt_r1.model.packing import pack
from prompt_r1.model.policy import Policy
from tests.support import tiny
from tests.support.adapters import TOKENS, with_random_adapters
from tests.support.games import CPU, siblings
from tests.support.tiny import logits_of


def test_an_adapter_starts_with_the_initial_values_of_a_linear_layer():
    """A is uniform within 1 / sqrt(inputs), as in nn.Linear and in peft's adapters. B is zero."""
    adapter = LoRA(torch.nn.Linear(400, 30), rank=100, alpha=16, generator=torch.Generator())
    bound = 1 / 400**0.5
    assert 0.99 * bound < adapter.a.abs().max().item() <= bound and not adapter.b.any()


def test_new_adapters_do_not_change_the_outputs_and_merging_does_not_either():
    model = tiny.model()
    before, names = logits_of(model, TOKENS), list(model.state_dict())
    add_lora(model, rank=8, alpha=16)
    assert torch.equal(logits_of(model, TOKENS), before)
    for layer in adapters_of(model).values():
        torch.nn.init.normal_(layer.b, std=0.1)
    adapted = logits_of(model, TOKENS)
    assert (adapted - before).abs().max() > 0.1
    with suppress(InterruptedError), adapters_removed(model) as layers, torch.no_grad():
        assert torch.equal(logits_of(model, TOKENS), before)
        for layer in layers.values():
            layer.base.weight.copy_(layer.merged_weight())
        torch.testing.assert_close(logits_of(model, TOKENS), adapted, rtol=1e-4, atol=1e-4)
        assert list(model.state_dict()) == names
        raise InterruptedError
    assert list(adapters_of(model)) == list(layers)


def new_adapters(seed: int) -> list[torch.nn.Parameter]:
    """The A and B of each layer, one after the other."""
    policy = tiny.policy()
    add_lora(policy.model, rank=2, alpha=4, seed=seed)
    return policy.trained_parameters()


def test_adapters_are_the_same_for_a_seed_and_leave_the_random_state_as_it_is():
    state = torch.random.get_rng_state()
    one, same, other = (new_adapters(seed) for seed in (0, 0, 1))
    assert all(torch.equal(*pair) for pair in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])
    equal = [pair for pair in combinations(one[::2], 2) if torch.equal(*pair)]  # the A of each layer
    assert not equal, "layers of equal size start from different adapters"
    assert torch.equal(torch.random.get_rng_state(), state)


def test_adapters_of_a_model_of_16_bits_learn_in_float32():
    """In bfloat16, a step of Adam at a usual learning rate would be rounded away."""
    policy = Policy(tiny.model().to(torch.bfloat16), compute_dtype=torch.bfloat16)
    add_lora(policy.model, rank=2, alpha=4)
    for weight in policy.trained_parameters():
        before = weight.detach().clone()
        torch.optim.AdamW([weight], lr=1e-5).step(closure=weight.sum().backward)
        assert (weight.detach() - before).abs().min() > 5e-6
    for layer in adapters_of(policy.model).values():
        assert layer.merged_weight().dtype == torch.float32, "merging rounds once, when it is exported"


def test_gradients_are_those_of_the_merged_weights_in_float64():
    """The oracle computes W + (alpha / rank) B A itself, and differentiates through it."""
    plain = tiny.model().double()
    policy = Policy(with_random_adapters(tiny.model()), compute_dtype=torch.float32)
    policy.checkpoint_activations()
    packed = pack([siblings(0, 3)], CPU)
    policy(packed).logprobs.sum().backward()
    factors, weights = {}, dict(plain.named_parameters())
    for name, layer in adapters_of(policy.model).items():
        a, b = (part.detach().double().requires_grad_() for part in (layer.a, layer.b))
        factors[name] = a, b
        weights[f"{name}.weight"] = weights[f"{name}.weight"].detach() + 2 * b @ a
    total = 0.0
    for game in siblings(0, 3):
        tokens = torch.tensor(game.tokens)
        with tiny.own_attention(plain):
            logits = functional_call(plain, weights, (tokens[None],)).logits[0, :-1]
        log_p = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        total = total + log_p[torch.tensor(game.sampled[1:])].sum()
    total.backward()
    for name, layer in adapters_of(policy.model).items():
        for found, exact in zip((layer.a, layer.b), factors[name], strict=True):
            difference = (found.grad - exact.grad).norm() / exact.grad.norm()
            assert difference < 1e-4, name
    others = [weight for weight in policy.parameters() if not weight.requires_grad]
    assert others and all(weight.grad is None for weight in others)
    assert len(policy.trained_parameters()) == 2 * len(factors)


def test_models_that_adapters_do_not_fit_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match=r"rank 33 .*at most 32"):
        add_lora(tiny.model(), rank=33, alpha=16)
    gpt2 = tiny.save_model(tmp_path, "gpt2")
    with pytest.raises(UsageError, match=r"'gpt2' .*no linear layers"):
        add_lora(AutoModelForCausalLM.from_pretrained(gpt2), rank=1, alpha=16)


def test_a_router_that_is_a_linear_layer_and_returns_a_tuple_gets_no_adapter():
    """A bug: training adapters of phimoe ended with a TypeError."""

    class Router(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x), 0

    model = tiny.model()
    name = next(name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear))
    model.set_submodule(name, Router(4, 4))
    add_lora(model, rank=1, alpha=1)
    assert name not in adapters_of(model) and name in adapters_of(with_random_adapters(tiny.model()))
