"""Tiny models and fakes: a byte-level ChatML tokenizer, a random Qwen3, a scripted agent and environment."""

import math
import random
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from prompt_r1.engine.engine import Engine
from prompt_r1.engine.kv_cache import BlockPool
from prompt_r1.engine.model_check import eager_attention
from prompt_r1.engine.scheduler import StepLimits
from prompt_r1.environments.environment import NO_GAME
from prompt_r1.environments.sources import Caller
from prompt_r1.errors import EnvError
from prompt_r1.model import attention
from prompt_r1.model.policy import Policy
from prompt_r1.types import Completion, Message
from tests.support.templates import byte_level

# Like Qwen3's template: rendering a dialogue drops the think blocks of earlier turns.
QWEN3_LIKE_TEMPLATE = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set text = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{- '<|im_start|>assistant\\n' + text + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token. As in Qwen3, <think> and </think> are added tokens, but not special ones."""
    core = byte_level(prefix=False)
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    core.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>")])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = QWEN3_LIKE_TEMPLATE
    return wrapped


def model(*, seed: int = 0, layers: int = 2, kv_heads: int = 2, tied: bool = True) -> Qwen3ForCausalLM:
    """A random Qwen3. Its weights are large, so that greedy decoding does not depend on rounding."""
    return deepcopy(_drawn_model(seed, layers, kv_heads, tied))


@cache
def _drawn_model(seed: int, layers: int, kv_heads: int, tied: bool) -> Qwen3ForCausalLM:
    """Building a model and drawing its weights takes twice as long as a copy."""
    attention.register()
    config = Qwen3Config(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        attn_implementation=attention.NAME,
        eos_token_id=tokenizer().eos_token_id,
        pad_token_id=tokenizer().pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def own_attention(model) -> AbstractContextManager[None]:
    """Let a model compute with an attention of transformers inside the context, also if it has ours."""
    has_ours = model.config._attn_implementation == attention.NAME
    return eager_attention(model) if has_ours else nullcontext()


def logits_of(model, tokens: list[int] | torch.Tensor) -> torch.Tensor:
    """The logits (B, T, V) of the model's own forward over B rows of tokens, or (1, T, V) over a list."""
    rows = torch.tensor([tokens]) if isinstance(tokens, list) else tokens
    with own_attention(model):
        return model(rows, use_cache=False).logits


def policy(**options) -> Policy:
    return Policy(model(**options), compute_dtype=torch.float32)


def pool(*, blocks: int, block_size: int, layers: int = 2) -> BlockPool:
    """A KV cache for the tiny model."""
    return BlockPool(policy(layers=layers), blocks=blocks, block_size=block_size)


def engine(
    policy: Policy,
    *,
    max_tokens: int,
    kv_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    max_sequences: int = 256,
    block_size: int = 0,
    prefill_tokens: int = 512,
) -> Engine:
    """An engine with a KV cache of a given size, in blocks that hold `block_size` tokens; 0: a whole game."""
    size = block_size or max_tokens
    blocks = max(kv_tokens // size, math.ceil(max_tokens / size))
    made = Engine(
        policy,
        stop_ids=stop_ids,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        pool=BlockPool(policy, blocks=blocks, block_size=size),
    )
    made._limits = StepLimits(max_sequences, prefill_tokens)
    return made


def save_agent(folder: Path, **options) -> Path:
    model(**options).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_asking_agent(folder: Path) -> Path:
    """An agent that was trained for 150 steps to write one of three turns: two prompts and an answer."""
    save_agent(folder)
    weights = load_file(Path(__file__).parent / "asking_agent.safetensors")  # bfloat16: a small file
    exact = {name: value.float() for name, value in weights.items()}
    save_file(exact, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# Sizes of other models, under every name that the config of a tested type has for them.
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
# Rotary embeddings that are scaled by one factor in short sequences, and by another in long ones.
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
# Fields whose default is None, but which have other values in published models.
OPTIONAL = {"num_key_value_heads", "head_dim"}


def save_model(folder: Path, kind: str, **options: object) -> Path:
    """Save a random model of another type, without a tokenizer. Its weights are large: each part matters."""
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    known = {**default.to_dict(), **dict.fromkeys(default.attribute_map, 0)}
    chosen: dict[str, object] = {}
    for field, value in SIZES.items():
        given = known.get(field) is not None or (field in known and field in OPTIONAL)
        if given and field not in default.attribute_map:
            chosen[field] = value
    if "kv_lora_rank" in known:  # latent attention has no groups of heads
        chosen["num_key_value_heads"] = SIZES["num_attention_heads"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        other = AutoModelForCausalLM.from_config(config_class(**(chosen | options))).float()
        for weight in other.parameters():
            if weight.ndim == 1:  # biases and sinks, often 0
                weight.data += 0.2 * torch.randn_like(weight)
            else:
                weight.data = torch.randn_like(weight) * min(0.5, 1.5 / math.sqrt(weight.shape[-1]))
    other.save_pretrained(folder)
    return folder


def random_tokens(length: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


class ScriptedAgent:
    """Generates the given texts turn by turn, and records the arguments of each call."""

    def __init__(self, texts: list[str], *, finished: bool = True) -> None:
        self.engine = self
        self.texts = list(texts)
        self.finished = finished
        self.read: list[list[int]] = []
        self.limits: list[int] = []  # max_new of each call
        self.seeds: list[str] = []

    def new_sequence(self) -> AbstractContextManager[None]:
        """A sequence, which a script does not need."""
        return nullcontext()

    async def generate(self, tokens: list[int], *, max_new: int, seed: str, **options: object) -> Completion:
        self.read.append(list(tokens))
        self.limits.append(max_new)
        self.seeds.append(seed)
        ids = tokenizer()(self.texts.pop(0), add_special_tokens=False)["input_ids"]
        ids = [*ids, tokenizer().eos_token_id] if self.finished else ids[:max_new]
        return Completion(ids, [-0.5] * len(ids), self.finished)


class ScriptedEnvironment:
    """Returns the replies one by one; an exception in the list is raised."""

    name = "scripted"

    def __init__(self, replies: list[str | EnvError]) -> None:
        self.replies = list(replies)
        self.asked: list[list[Message]] = []
        self.callers: list[Caller] = []  # the caller of each call

    async def ask(self, messages: list[Message], caller: Caller = NO_GAME) -> str:
        self.asked.append([dict(message) for message in messages])  # type: ignore[misc]
        self.callers.append(caller)
        reply = self.replies.pop(0)
        if isinstance(reply, EnvError):
            raise reply
        return reply


def think(content: str, *, prompt: str | None = None, answer: str | None = None) -> str:
    """A well-formed turn: a think block, then a prompt or an answer."""
    name, text = ("interaction_prompt", prompt) if prompt is not None else ("answer", answer)
    return f"<think>{content}</think>\n<{name}>{text}</{name}>"
