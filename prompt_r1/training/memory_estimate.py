"""What training will take of each GPU's memory, before it takes it: `train.py --dry-run`.

Calculated from the shapes of the model. Not counted: what CUDA and NCCL hold for themselves (1 to 2 GB), and
what the allocator cannot use. During an update the KV cache stays where it is, so all of it adds up.
"""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from prompt_r1.agent.kv_cache import MEMORY_SHARE
from prompt_r1.agent.names import find_agent
from prompt_r1.agent.policy import CHUNK_TOKENS, loading_options
from prompt_r1.config.train import TrainConfig

GPUS = (40, 80, 141)  # GB: A100, A100 or H100, H200
SHARDS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that memory depends on."""

    weights: int
    block: int  # weights of a transformer block
    layers: int
    hidden: int
    intermediate: int
    query: int  # heads × head dim
    key: int  # key-value heads × head dim
    vocabulary: int

    @property
    def root(self) -> int:
        """Weights outside of the blocks: embedding, last norm and head."""
        return self.weights - self.layers * self.block


def shape_of(config: PretrainedConfig) -> Shape:
    """The shape of a model, built without any memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    blocks = model.base_model.layers
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        weights=sum(weight.numel() for weight in model.parameters()),
        block=sum(weight.numel() for weight in blocks[0].parameters()),
        layers=len(blocks),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        query=config.num_attention_heads * dim,
        key=config.num_key_value_heads * dim,
        vocabulary=config.vocab_size,
    )


def block_activations(shape: Shape, *, width: int, kept: int) -> int:
    """Bytes that autograd saves for each token of one block, its input included.

    `width` bytes has an entry of a product, `kept` one of the stream between the blocks. Norms save what they
    normalise in float32; attention saves queries, keys, values and its output, not its scores.
    """
    norms = shape.hidden * 2 * (4 + kept) + (shape.query + shape.key) * (4 + width)
    # What goes into the products: autocast makes a copy for each of the five, not one for each norm.
    inputs = shape.hidden * width * (2 if kept == width else 5)
    attention = 2 * (shape.query + shape.key) * width
    return norms + inputs + attention + 4 * shape.intermediate * width


def state_bytes(
    shape: Shape, *, shards: int, whole: bool, width: int, reference: bool, offload: str
) -> dict[str, float]:
    """Bytes that a run holds all the time, by what they are. `whole`: nothing is sharded."""
    share = shape.weights / shards
    trained = 0.0 if offload == "all" else share
    return {
        "float32 weights": 4 * trained,
        "copy that plays": 0 if whole and width == 4 else width * shape.weights,
        "frozen reference": share * (4 if whole else width) * (reference and offload == "none"),
        "gradients": 4 * trained,
        "AdamW's moments": 8 * trained,
    }


def update_bytes(shape: Shape, *, tokens: int, whole: bool, width: int, recompute: bool) -> dict[str, float]:
    """Bytes of a micro-batch at its peak: in backward, either at the head or in a block."""
    kept = 4 if whole else width  # under autocast the stream between the blocks is float32
    saved = block_activations(shape, width=width, kept=kept)
    rows = max(1, CHUNK_TOKENS["cuda"] // shape.vocabulary)
    logits = rows * shape.vocabulary * (2 * width + 8)  # of a chunk: product, float32, softmax, gradient
    # The head's gradient in float32 and a chunk's in the dtype of products; gathered or cast weights.
    head = logits + shape.root * (4 + 2 * width)
    # A block's weights and the next one's, gathered or cast; its gradients, and the float32 of their sum.
    gathered = shape.block * (4 * width + 8) + shape.root * 2 * width
    inside = tokens * ((saved if recompute else 0) + 3 * shape.intermediate * width)
    between = shape.layers * tokens * (kept * shape.hidden if recompute else saved)
    cast = shape.weights * width if whole and width < 4 else 0  # autocast keeps all casts until forward ends
    return {
        "inputs of the blocks" if recompute else "activations": between,
        "a block or the head": max(head, inside + gathered, cast),
    }


def memory_table(config: TrainConfig) -> str:
    """The lines of --dry-run about memory; one line where the agent's config cannot be read."""
    if config.agent == "mini":
        return "memory: the mini agent fits everywhere"
    path = find_agent(config.agent, config.seed)
    try:
        shape = shape_of(AutoConfig.from_pretrained(path, **loading_options(path)))
    except (OSError, ValueError, KeyError):
        return f"memory: not estimated, the config of {config.agent!r} is not at hand"
    columns = [_column(shape, config, shards) for shards in SHARDS]
    whole = config.offload == "none" and config.parallel != "fsdp"
    names = [f"{shards} (whole)" if shards == 1 and whole else str(shards) for shards in SHARDS]
    lines = [f"{'GB of each GPU, sharded over':40}" + "".join(f"{name:>12}" for name in names)]
    for name in columns[0]:
        lines.append(f"{name:40}" + "".join(f"{column[name]:>12}" for column in columns))
    return "\n".join(lines)


def _column(shape: Shape, config: TrainConfig, shards: int) -> dict[str, str]:
    """The entries of one number of shards, from top to bottom."""
    whole = shards == 1 and config.offload == "none" and config.parallel != "fsdp"
    width = getattr(torch, config.dtype).itemsize
    states = state_bytes(
        shape, shards=shards, whole=whole, width=width, reference=config.kl_coef > 0, offload=config.offload
    )
    tokens = max(config.tokens_per_batch, config.max_tokens)
    update = update_bytes(shape, tokens=tokens, whole=whole, width=width, recompute=config.checkpointing)
    taken = sum(states.values()) + sum(update.values())
    column = {name: f"{value / 1e9:.1f}" for name, value in {**states, **update, "together": taken}.items()}
    # The cache is sized at the first game, before there are gradients.
    before = sum(states[name] for name in ("float32 weights", "copy that plays", "frozen reference"))
    of_token = 2 * shape.layers * shape.key * width
    for gpu in GPUS:
        cache = config.kv_tokens or int(MEMORY_SHARE * (gpu * 1e9 - before) / of_token)
        left = gpu * 1e9 - taken - cache * of_token
        fits = left > 0 and cache >= config.max_tokens
        column[f"{gpu} GB: KV cache, thousand tokens"] = f"{cache / 1e3:.0f}" if fits else "too small"
        column[f"{gpu} GB: left over"] = f"{left / 1e9:.1f}" if fits else ""
    return column
