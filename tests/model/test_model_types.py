"""Types of models that are computed right or refused: each is built tiny with random weights, loaded as an
agent is, and compared with the unmodified model: log-probabilities and gradients of packed games, and
log-probabilities of two turns of the engine.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prompt_r1.engine.model_check import check_model, eager_attention
from prompt_r1.errors import UsageError
from prompt_r1.model.loading import load_policy
from prompt_r1.model.packing import pack
from prompt_r1.model.policy import Policy
from prompt_r1.types import Trajectory
from tests.support import tiny
from tests.support.games import CPU, naive_logprobs, play_with, small_games

# Variants of a type that its default config does not have. The keys are the names in the table.
VARIANTS: dict[str, dict[str, object]] = {
    "cohere with larger logits": {"logit_scale": 0.3},
    "gemma2 without soft caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gpt_bigcode with several key heads": {"multi_query": False, "num_key_value_heads": 4},
    "granite with smaller logits": {"logits_scaling": 3.0},
    "llama with RoPE llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
    "llama with RoPE yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64
        }
    },
    "llama with RoPE dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    },
    "phi3 with RoPE longrope": {
        "rope_parameters": tiny.LONG_ROPE | {"original_max_position_embeddings": 64},
        "head_dim": 8,
    },
    "qwen2 with windows": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe with windows": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3 with windows": {"use_sliding_window": True, "max_window_layers": 2},
}  # fmt: skip
# Rounding in float32 explains errors up to this size.
LOGPROB_LIMIT, GRADIENT_LIMIT = 1e-3, 1e-2
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Errors:
    """Largest differences from the unmodified model."""

    logprob: float  # nats
    gradient: float  # relative difference in norm of the worst tensor


def own_logprobs(policy: Policy, game: Trajectory) -> Tensor:
    """The log-probabilities of a game from the unmodified model."""
    with eager_attention(policy.model):
        return naive_logprobs(policy.model, game, TEMPERATURE)


def gradients(policy: Policy, logprobs: Tensor) -> dict[str, Tensor]:
    """The gradient of the weighted sum of log-probabilities for each weight."""
    policy.zero_grad()
    weights = torch.rand(len(logprobs), generator=torch.Generator().manual_seed(2))
    (logprobs * weights).sum().backward()
    return {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}


@torch.no_grad()
def engine_error(policy: Policy) -> float:
    """The largest error of a log-probability in two turns of two games that share their opening."""
    engine = tiny.engine(policy, max_tokens=128, kv_tokens=512, prefill_tokens=16)
    errors = [
        own_logprobs(policy, game) - torch.tensor(game.logprobs)[torch.tensor(game.sampled)]
        for game in play_with(engine, [small_games()[0].tokens[:11]] * 2, max_new=12, temperature=TEMPERATURE)
    ]
    return float(torch.cat(errors).abs().max())


def measure(folder: Path) -> Errors:
    """Load the model as an agent, and compare. Raises UsageError if it is refused."""
    policy = load_policy(folder, device=CPU, max_tokens=128, temperature=TEMPERATURE)
    check_model(policy)
    games = small_games()
    packed = pack([games], CPU)
    found = policy(packed).logprobs
    found_gradients = gradients(policy, found)
    own = torch.cat([own_logprobs(policy, game) for game in games])
    own_gradients = gradients(policy, own)
    worst, largest = 0.0, max(gradient.norm() for gradient in own_gradients.values())
    for name, gradient in own_gradients.items():
        scale = max(gradient.norm(), 1e-3 * largest)  # the gradient of a key's bias, for example, is 0
        worst = max(worst, float((found_gradients[name] - gradient).norm() / scale))
    packed_error = float((found - own).detach().abs().max())
    errors = Errors(max(packed_error, engine_error(policy)), worst)
    policy.checkpoint_activations()
    assert torch.equal(policy(packed).logprobs, found), "activation checkpointing changes the result"
    return errors


def verdict(name: str) -> str:
    """Whether a type is right, refused or wrong."""
    with tempfile.TemporaryDirectory() as folder:
        tiny.save_model(Path(folder), name.split()[0], **VARIANTS.get(name, {}))
        try:
            errors = measure(Path(folder))
        except UsageError:
            return "refused"
    is_right = errors.logprob <= LOGPROB_LIMIT and errors.gradient <= GRADIENT_LIMIT
    return "right" if is_right else str(errors)


REFUSED = (
    "deepseek_v3", "qwen3_next", "bloom", "falcon", "gemma2", "gpt_oss", "jamba", "rwkv", "nemotron",
    "diffllama", "bert", "qwen2_moe with windows", "stablelm",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen2 with windows", "gemma2 without soft caps", "granite with smaller logits", "opt"]
)
def test_a_type_of_model_is_computed_as_the_unmodified_model_does(name):
    """A bug: models without num_key_value_heads (GPT-2, GPT-NeoX, OPT) ended in a traceback."""
    assert verdict(name) == "right"


@pytest.mark.slow
def test_well_known_types_and_variants_are_right_or_refused():
    right = (
        "llama", "mistral", "qwen2", "qwen2_moe", "qwen3_moe", "gemma", "gemma3_text", "phi3",
        "smollm3", "olmo2", "granite", "gpt2", "gpt_neox", "opt", "cohere", "mixtral",
    )  # fmt: skip
    for name in (*right, *(VARIANTS.keys() - set(REFUSED))):
        assert verdict(name) == "right", name
    for name in REFUSED:
        assert verdict(name) == "refused", name
