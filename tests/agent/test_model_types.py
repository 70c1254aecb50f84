"""Types of models that are computed right or refused: each is built tiny with random weights, loaded as an
agent is, and compared with the unmodified model: log-probabilities and gradients of packed games, and
log-probabilities of two turns of the engine and of rows without a cache.
"""

import asyncio
import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from prompt_r1.agent.engine import Engine
from prompt_r1.agent.loading import load_policy
from prompt_r1.agent.model_check import eager_attention
from prompt_r1.agent.packing import pack
from prompt_r1.agent.policy import Policy
from prompt_r1.errors import UsageError
from prompt_r1.types import Completion, Question, Trajectory
from tests.support.games import CPU

# Sizes of the tiny models, under every name that the config of a tested type has for them.
SIZES: dict[str, object] = {
    "vocab_size": 99,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 32, "n_embd": 32, "word_embed_proj_dim": 32, "attention_hidden_size": 32,
    "intermediate_size": 48, "ffn_dim": 48, "ffn_hidden_size": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4, "n_layer": 4, "num_attention_heads": 4, "n_head": 4,
    "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "n_positions": 256, "sliding_window": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "initializer_range": 0.2,
}  # fmt: skip
# Fields whose default is None, but which have other values in published models.
OPTIONAL = {"num_key_value_heads", "head_dim"}
# Kinds of a type that its default config does not have, under the name in the table.
VARIANTS: dict[str, dict[str, object]] = {
    "cohere with larger logits": {"logit_scale": 0.3},
    "gemma2 with capped logits": {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0},
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
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        },
        "head_dim": 8,
    },
    "qwen2 with windows": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe with windows": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3 with windows": {"use_sliding_window": True, "max_window_layers": 2},
}  # fmt: skip
# Float32 rounding; larger errors are wrong.
LOGPROB_LIMIT, GRADIENT_LIMIT = 1e-3, 1e-2
LENGTHS = (47, 30, 41)  # tokens of the packed games
OPENING = 11
TEMPERATURE = 0.8
TURN = 12  # tokens sampled in a turn of the engine


@dataclass(frozen=True)
class Errors:
    """Largest differences from the unmodified model."""

    logprob: float  # nats
    gradient: float  # relative, in norm, of the worst tensor


def tiny_config(name: str) -> PretrainedConfig:
    """A config of this type or variant with small sizes."""
    config_class = CONFIG_MAPPING[name.split()[0]]
    default = config_class()
    known = {**default.to_dict(), **dict.fromkeys(default.attribute_map, 0)}
    chosen: dict[str, object] = {}
    for field, value in SIZES.items():
        given = known.get(field) is not None or (field in known and field in OPTIONAL)
        if given and field not in default.attribute_map:
            chosen[field] = value
    if "kv_lora_rank" in known:  # latent attention has no groups of heads
        chosen["num_key_value_heads"] = SIZES["num_attention_heads"]
    return config_class(**(chosen | VARIANTS.get(name, {})))


def build(name: str, folder: Path) -> None:
    """Save a random model of this type. Its weights are large, so that every part of it matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(name)).float()
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.data += 0.2 * torch.randn_like(weight)
            else:
                weight.data = torch.randn_like(weight) * min(0.5, 1.5 / math.sqrt(weight.shape[-1]))
    model.save_pretrained(folder)


def games(vocabulary: int) -> list[Trajectory]:
    """Games of random tokens with one opening."""
    rng = random.Random(1)
    opening = [rng.randrange(3, vocabulary) for _ in range(OPENING)]
    played: list[Trajectory] = []
    for length in LENGTHS:
        game = Trajectory(Question("q", "d", "?", ()))
        game.add_context(opening)
        new = [rng.randrange(3, vocabulary) for _ in range(length - OPENING)]
        game.add_sampled(Completion(new, [0.0] * len(new), True))
        played.append(game)
    return played


def logprobs_of(policy: Policy, tokens: list[int]) -> Tensor:
    """(T - 1,) log-probabilities of all tokens but the first, from one row without a cache."""
    logits = policy.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1] / TEMPERATURE
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def own_logprobs(policy: Policy, tokens: list[int]) -> Tensor:
    """The same from the unmodified model."""
    with eager_attention(policy.model):
        return logprobs_of(policy, tokens)


def gradients(policy: Policy, logprobs: Tensor) -> dict[str, Tensor]:
    """The gradient of the weighted sum of log-probabilities for each weight."""
    policy.zero_grad()
    weights = torch.rand(len(logprobs), generator=torch.Generator().manual_seed(2))
    (logprobs * weights).sum().backward()
    return {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}


def engine_error(policy: Policy) -> float:
    """The largest error of a log-probability in two turns of two games that share their opening."""
    engine = Engine(policy, stop_ids=frozenset(), max_tokens=128, kv_tokens=512, prefill_tokens=16)
    opening = games(policy.model.get_input_embeddings().weight.shape[0])[0].tokens[:OPENING]

    async def play(number: int) -> float:
        tokens, worst = list(opening), 0.0
        for turn in range(2):
            start = len(tokens)
            completion = await engine.generate(
                tokens, max_new=TURN, seed=f"{number}/{turn}", temperature=TEMPERATURE
            )
            tokens += completion.tokens
            own = own_logprobs(policy, tokens)[start - 1 :]
            worst = max(worst, float((own - torch.tensor(completion.logprobs)).abs().max()))
            tokens += opening[number : number + 7]  # a reply
        return worst

    async def play_both() -> list[float]:
        return await asyncio.gather(play(0), play(1))

    with torch.no_grad():
        return max(asyncio.run(play_both()))


def measure(folder: Path) -> Errors:
    """Load the model as an agent, and compare. Raises UsageError if it is refused."""
    policy = load_policy(folder, device=CPU, max_tokens=128, temperature=TEMPERATURE)
    played = games(policy.model.get_input_embeddings().weight.shape[0])
    packed = pack([played], CPU)
    found = policy(packed).logprobs
    found_gradients = gradients(policy, found)
    own = torch.cat([own_logprobs(policy, game.tokens)[OPENING - 1 :] for game in played])
    own_gradients = gradients(policy, own)
    worst, largest = 0.0, max(gradient.norm() for gradient in own_gradients.values())
    for name, gradient in own_gradients.items():
        scale = max(gradient.norm(), 1e-3 * largest)  # the gradient of a key's bias, for example, is 0
        worst = max(worst, float((found_gradients[name] - gradient).norm() / scale))
    with torch.no_grad():
        rows = torch.cat([logprobs_of(policy, game.tokens)[OPENING - 1 :] for game in played])
    packed_error, row_error = (float((logprobs - own).detach().abs().max()) for logprobs in (found, rows))
    errors = Errors(max(packed_error, row_error, engine_error(policy)), worst)
    policy.checkpoint_activations()
    assert torch.equal(policy(packed).logprobs, found), "activation checkpointing changes the result"
    return errors


def verdict(name: str) -> str:
    """Whether a type is right, refused or wrong."""
    with tempfile.TemporaryDirectory() as folder:
        build(name, Path(folder))
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
    "name", ["qwen3", "qwen2 with windows", "gemma2 with capped logits", "granite with smaller logits", "opt"]
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
