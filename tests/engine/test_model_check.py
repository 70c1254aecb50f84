"""The check of a loaded model: right models pass, wrong ones are refused in a sentence."""

from copy import copy

import pytest
import torch
from transformers import PretrainedConfig

from prompt_r1.engine.model_check import FLOAT32_LIMIT, check_model
from prompt_r1.engine.paged_attention import PagedBatch
from prompt_r1.errors import UsageError, is_out_of_memory
from prompt_r1.model.attention import model_attention
from prompt_r1.model.loading import load_policy, longest_game
from prompt_r1.model.packing import Packed, pack
from prompt_r1.model.policy import Policy
from tests.support import tiny
from tests.support.damage import out_of_memory
from tests.support.games import CPU, naive_logprobs, siblings, small_games


def test_a_model_that_is_computed_right_passes_in_float32_and_in_bfloat16():
    assert check_model(tiny.policy()) < FLOAT32_LIMIT / 100
    check_model(Policy(tiny.model(), compute_dtype=torch.bfloat16))


class WrongPositions(Policy):
    """Computes every token at position 0 in rows of the class `wrong`."""

    wrong: type = object

    def hidden_states(self, row):
        if isinstance(row, self.wrong):
            row = copy(row)
            vars(row)["positions"] = torch.zeros_like(row.positions)
        return super().hidden_states(row)


@pytest.mark.parametrize(
    ("wrong", "what"), [(Packed, "games packed into one row"), (PagedBatch, "turns over the KV cache")]
)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_wrong_computation_is_refused_with_the_type_and_the_difference(wrong, what, compute):
    policy = WrongPositions(tiny.model(), compute_dtype=compute)
    policy.wrong = wrong
    with pytest.raises(UsageError, match=rf"'qwen3' .*not supported: .* {what} differ by up to \d"):
        check_model(policy)


def test_memory_that_runs_out_during_the_check_does_not_make_a_model_unsupported(monkeypatch):
    policy = tiny.policy()
    monkeypatch.setattr(policy.model, "forward", out_of_memory)
    with pytest.raises(RuntimeError) as error:
        check_model(policy)
    assert is_out_of_memory(error.value)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_model_whose_weights_are_not_numbers_is_refused(compute):
    policy = Policy(tiny.model(), compute_dtype=compute)
    policy.model.get_output_embeddings().weight.data.fill_(torch.nan)
    with pytest.raises(UsageError, match="differ by up to nan nats"):
        check_model(policy)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_check_leaves_no_trace(weights):
    policy = Policy(tiny.model().to(weights), compute_dtype=weights)
    game = pack([siblings(0, 3)], CPU)
    expected, random_state = policy(game).logprobs, torch.get_rng_state()
    check_model(policy)
    assert torch.equal(policy(game).logprobs, expected)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert policy.compute_dtype == weights and {weight.dtype for weight in policy.parameters()} == {weights}
    assert all(weight.grad is None for weight in policy.parameters())


@pytest.mark.parametrize(
    ("kind", "options", "cause"),
    [
        ("diffllama", {"num_key_value_heads": 2}, "differ by up to"),
        (
            "gemma2",
            {"final_logit_softcapping": None, "num_key_value_heads": 2},
            "its attention takes softcap",
        ),
        ("gemma2", {"attn_logit_softcapping": None}, "its logits have a soft cap"),
        ("rwkv", {}, "its attention cannot be replaced"),
        ("stablelm", {"partial_rotary_factor": 0.5}, "its attention cannot be replaced"),
        ("bloom", {"n_head": 4}, "its attention cannot be replaced"),
        ("biogpt", {}, "its attention cannot be replaced"),
        ("llama4_text", {}, "it has layers of the kind chunked_attention"),
        ("lfm2", {"full_attn_idxs": [0]}, "it has layers of the kind conv"),
        ("mistral", {"sliding_window": 0}, "differ by up to"),
        ("mistral", {"sliding_window": -1}, "differ by up to"),
    ],
)
def test_models_that_we_would_compute_wrongly_are_refused(tmp_path, kind, options, cause):
    """Some were played or trained with log-probabilities that were 0.8 to 2.3 nats wrong."""
    tiny.save_model(tmp_path, kind, **options)
    with pytest.raises(UsageError, match=f"'{kind}' .*not supported: .*{cause}"):
        check_model(load_policy(tmp_path, device=CPU))


class Scaled(torch.nn.Module):
    """An attention that gives its function a keyword."""

    layer_idx = 0

    def forward(self, **keyword):
        rows = torch.ones(1, 2, 3, 4)
        return model_attention(
            self, rows, rows, rows, None, row_attention=lambda *_: torch.ones(3, 2, 4), **keyword
        )


def test_an_unknown_keyword_of_attention_is_refused_unless_it_is_none():
    """A bug: soft caps and sinks were swallowed, and the log-probabilities were 0.18 nats wrong."""
    Scaled()(temperature=None, position_ids=torch.zeros(1))
    for keyword in ({"temperature": 2.0}, {"is_causal": False}, {"dropout": 0.1}):
        with pytest.raises(NotImplementedError):
            Scaled()(**keyword)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
        tiny.LONG_ROPE | {"original_max_position_embeddings": 64},
    ],
)
def test_rope_that_depends_on_the_length_is_refused_past_the_original_context(tmp_path, rope):
    """A bug: past the original context, one long game changed the positions of all, by 0.08 to 0.5 nats."""
    limit = rope.get("original_max_position_embeddings", 256)
    tiny.save_model(tmp_path, "llama", rope_parameters=rope, head_dim=8)
    with pytest.raises(UsageError, match=f"^games of {limit + 1} tokens exceed the {limit} positions"):
        load_policy(tmp_path, device=CPU, max_tokens=limit + 1)
    policy, games = load_policy(tmp_path, device=CPU, max_tokens=limit), small_games()
    check_model(policy)
    expected = torch.cat([naive_logprobs(policy.model, game) for game in games])
    assert torch.allclose(policy(pack([games], CPU)).logprobs, expected.float(), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("phi3", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5}),
        ("starcoder2", {"residual_dropout": 0.5, "embedding_dropout": 0.5, "attention_dropout": 0.5}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "attention_dropout": 0.5}),
        ("opt", {"dropout": 1, "ffn_dim": 64, "word_embed_proj_dim": 32}),  # an integer
    ],
)
def test_a_model_is_trained_without_dropout(tmp_path, kind, options):
    """A bug: gradient checkpointing enabled the dropout of these models, 0.4 to 2.7 nats a token."""
    policy = load_policy(tiny.save_model(tmp_path, kind, **options, sliding_window=None), device=CPU)
    games = small_games()
    expected = policy(pack([games], CPU)).logprobs
    policy.checkpoint_activations()
    assert torch.equal(policy(pack([games], CPU)).logprobs, expected)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 999}, 64),
        ({"rope_type": "longrope", "original_max_position_embeddings": 32}, 32),
        ({"full": {"rope_type": "longrope", "original_max_position_embeddings": 16}, "other": None}, 16),
        ({"full": {"rope_type": "dynamic", "factor": 2.0}, "sliding": {"rope_type": "default"}}, 64),
    ],
)
def test_rope_that_depends_on_the_length_limits_a_game_also_beside_a_kind_that_is_null(rope, longest):
    config = PretrainedConfig(max_position_embeddings=64)
    config.rope_parameters = rope
    assert longest_game(config) == longest
