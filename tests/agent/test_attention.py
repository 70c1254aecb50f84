"""Windows, soft caps and sinks against a loop over queries, and whole models against transformers."""

import pytest
import torch
from torch import Tensor

from prompt_r1.agent import attention
from prompt_r1.agent.attention import ScoreRules, attend, attend_by_rules
from prompt_r1.agent.loading import load_policy
from prompt_r1.agent.model_check import eager_attention
from prompt_r1.agent.packing import pack
from prompt_r1.agent.policy import Policy
from tests import tiny
from tests.games import CPU, naive_logprobs, siblings

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


def naive_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, rules: ScoreRules) -> Tensor:
    """One query and one head at a time."""
    out, cached = torch.empty_like(query), key.shape[1] - query.shape[1]
    for head in range(len(query)):
        own = head // (len(query) // len(key))
        for row in range(query.shape[1]):
            last = cached + row
            first = 0 if rules.window is None else max(0, last - rules.window + 1)
            found = key[own, first : last + 1] @ query[head, row] * scale
            if rules.softcap is not None:
                found = rules.softcap * (found / rules.softcap).tanh()
            if rules.sinks is not None:
                found = torch.cat([found, rules.sinks[head : head + 1]])
            out[head, row] = found.softmax(0)[: last + 1 - first] @ value[own, first : last + 1]
    return out


@pytest.mark.parametrize("block", [1, 4, 512])
@pytest.mark.parametrize("cached", [0, 9])
@pytest.mark.parametrize(
    "rules",
    [
        ScoreRules(),
        ScoreRules(window=5),
        ScoreRules(window=1),
        ScoreRules(softcap=1.5),
        ScoreRules(sinks=SINKS),
        ScoreRules(window=5, softcap=1.5, sinks=SINKS),
    ],
)
def test_attention_by_rules_equals_a_loop_over_queries(monkeypatch, rules, cached, block):
    monkeypatch.setattr(attention, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(heads, length, 8, dtype=torch.float64, generator=generator)
        for heads, length in ((4, 13), (2, cached + 13), (2, cached + 13))
    )
    found = attend_by_rules(query, key, value, 0.4, rules)
    torch.testing.assert_close(found, naive_attention(query, key, value, 0.4, rules), atol=1e-6, rtol=1e-6)


MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
KINDS = {
    "mistral": ("mistral", {**GROUPED, "sliding_window": 6}),
    "qwen2 with windows": (
        "qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, **MIXED},
    ),
    "gemma 3": ("gemma3_text", {**GROUPED, **MIXED}),
    "gemma 2": (
        "gemma2",
        {**GROUPED, **MIXED, **CAPS},
    ),
    "gpt-oss": ("gpt_oss", {**GROUPED, **MIXED, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "granite": ("granite", {"logits_scaling": 3.0}),
    "gpt-2": ("gpt2", {}),
    "gpt-neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


@pytest.fixture(scope="module", params=list(KINDS))
def policy(request, tmp_path_factory) -> Policy:
    """A tiny model whose attention or logits differ from Qwen3's."""
    kind, options = KINDS[request.param]
    return load_policy(
        tiny.save_model(tmp_path_factory.mktemp("model"), kind, **options), device=CPU, temperature=0.8
    )


def test_packed_games_have_the_log_probabilities_and_gradients_of_the_unmodified_model(policy):
    """Bugs: models without num_key_value_heads (GPT-2, GPT-NeoX, OPT) ended in a traceback, and soft caps and
    sinks were swallowed.
    """
    games = [*siblings(0, 3), *siblings(1, 1)]
    for game in games:
        game.tokens = [token % 99 for token in game.tokens]
    found = policy(pack([games[:3], games[3:]], CPU)).logprobs
    policy.zero_grad()
    (found * torch.arange(len(found))).sum().backward()
    gradients = {name: weight.grad for name, weight in policy.named_parameters()}

    policy.zero_grad()
    with eager_attention(policy.model):
        expected = torch.cat([naive_logprobs(policy.model, game, 0.8) for game in games])
    (expected * torch.arange(len(found))).sum().backward()

    assert torch.allclose(found, expected.float(), atol=1e-4)
    largest = max(weight.grad.norm() for weight in policy.parameters() if weight.grad is not None)
    for name, weight in policy.named_parameters():
        if weight.grad is not None:
            scale = max(weight.grad.norm(), 1e-3 * largest)  # that of a key's bias is 0
            assert (gradients[name] - weight.grad).norm() < 1e-3 * scale, name


def test_checkpointing_and_rows_without_a_cache_compute_the_same(policy):
    game = siblings(0, 1)[0]
    game.tokens = [token % 99 for token in game.tokens]
    expected = policy(pack([[game]], CPU)).logprobs
    assert torch.allclose(naive_logprobs(policy.model, game, 0.8).float(), expected, atol=1e-4)
    policy.checkpoint_activations()
    assert torch.equal(policy(pack([[game]], CPU)).logprobs, expected)


def test_a_model_that_gives_no_scale_gets_that_of_the_head_dimension():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 7, 16, dtype=torch.float64).unbind()  # (B, H, T, D) each
    out, _ = attend(torch.nn.Identity(), query, key, value, None)
    expected = naive_attention(query[0], key[0], value[0], 16**-0.5, ScoreRules())
    torch.testing.assert_close(out[0].transpose(0, 1), expected)
