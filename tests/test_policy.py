"""Log-probabilities in chunks against log_softmax over everything."""

import json

import pytest
import torch

from prompt_r1 import policy as policy_module
from prompt_r1.policy import Policy, load_policy, load_tokenizer
from prompt_r1.types import UsageError
from tests import tiny


def naive(model, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = model(tokens).logits[:, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]


def some_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.tensor([tiny.random_tokens(23, seed=row) for row in range(4)])
    scored = torch.rand(4, 22, generator=torch.Generator().manual_seed(0)) < 0.6
    return tokens, scored


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_chunked_log_probs_and_gradients_equal_log_softmax(monkeypatch, tied, chunk):
    monkeypatch.setattr(policy_module, "CHUNK", chunk)
    tokens, scored = some_batch()
    weights = torch.rand(4, 22, generator=torch.Generator().manual_seed(1))
    model, twin = tiny.model(tied=tied).double(), tiny.model(tied=tied).double()
    policy = Policy(model, compute=torch.float64, temperature=0.8)

    scores = policy(tokens, scored)
    (scores.logprobs * weights).sum().backward()
    expected = naive(twin, tokens, 0.8)
    (expected * weights * scored).sum().backward()

    assert torch.allclose(scores.logprobs, (expected * scored).float(), atol=1e-5)
    for (name, got), (_, want) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, rtol=1e-4, atol=1e-6), name


def test_entropy_is_that_of_the_next_token_distribution():
    tokens, scored = some_batch()
    policy = tiny.policy()
    with torch.no_grad():
        logits = policy.model(tokens).logits[:, :-1].float()
    expected = torch.distributions.Categorical(logits=logits).entropy() * scored
    assert torch.allclose(policy(tokens, scored).entropy, expected, atol=1e-4)


def test_right_padding_changes_no_log_prob():
    tokens, scored = some_batch()
    policy = tiny.policy()
    padded = torch.cat([tokens, torch.zeros(4, 9, dtype=torch.long)], 1)
    more = torch.cat([scored, torch.zeros(4, 9, dtype=torch.bool)], 1)
    assert torch.allclose(policy(padded, more).logprobs[:, :22], policy(tokens, scored).logprobs, atol=1e-5)


def test_logits_never_exist_for_all_tokens_at_once(monkeypatch):
    """The widest tensor that autograd keeps has the model's width, not the vocabulary's."""
    monkeypatch.setattr(policy_module, "CHUNK", 4)
    tokens, scored = some_batch()
    policy = tiny.policy()
    shapes: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy(tokens, scored).logprobs.sum().backward()
    vocabulary = policy.model.config.vocab_size
    assert not [shape for shape in shapes if shape[-1] == vocabulary and shape[0] != vocabulary]


def test_bfloat16_products_keep_float32_weights_and_gradients():
    tokens, scored = some_batch()
    policy = Policy(tiny.model(), compute=torch.bfloat16)
    scores = policy(tokens, scored)
    scores.logprobs.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters())
    exact = tiny.policy()(tokens, scored).logprobs
    assert (scores.logprobs - exact).abs().mean() < 0.1


def test_loading_what_is_no_model_says_so_in_one_line(tmp_path):
    with pytest.raises(UsageError, match="no causal language model at"):
        load_policy(tmp_path / "nothing", device=torch.device("cpu"))
    with pytest.raises(UsageError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nothing")


def test_a_model_with_other_attention_or_logits_is_refused(tmp_path):
    for name, change in [("windows", {"layer_types": ["full_attention", "sliding_attention"]}),
                         ("soft cap", {"final_logit_softcapping": 30.0})]:  # fmt: skip
        folder = tiny.save_agent(tmp_path / name)
        config = json.loads((folder / "config.json").read_text()) | {
            "sliding_window": 8,
            "use_sliding_window": True,
        }
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UsageError, match="not supported"):
            load_policy(folder, device=torch.device("cpu"))


def test_a_saved_model_loads_with_the_same_weights(tmp_path):
    tiny.save_agent(tmp_path, seed=3)
    loaded = load_policy(tmp_path, device=torch.device("cpu"))
    tokens, scored = some_batch()
    assert torch.equal(loaded(tokens, scored).logprobs, tiny.policy(seed=3)(tokens, scored).logprobs)
