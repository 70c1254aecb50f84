"""Estimate the memory of training.

For `train.py --dry-run`, and for KV caches, which leave room for the update.

The estimate is computed from the shapes of the model. On GPUs it leaves out what CUDA and NCCL reserve (1 to
2 GB) and what the allocator cannot use. The KV cache stays allocated during an update, so all parts add up.
A slow test compares it with what processes on a CPU take.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from prompt_r1.agent.attention import attention_shape
from prompt_r1.agent.kv_cache import cache_bytes
from prompt_r1.agent.loading import loading_options
from prompt_r1.agent.lora import adapter_weights
from prompt_r1.agent.names import find_agent
from prompt_r1.agent.policy import CHUNK_TOKENS, Policy, blocks_of
from prompt_r1.config.environment import MINI_AGENTS
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.fsdp import local_tensor
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.training.parts import Models

GPUS = (40, 80, 141)  # GB: A100, A100 or H100, H200
SMALL_GPU = 24  # GB: a consumer GPU, shown for adapters
SHARDS = (1, 2, 4, 8, 16)
PROCESS_BYTES = 370e6  # Python, torch and transformers, on a CPU (measured with torch 2.13)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine its memory."""

    weights: int
    block: int  # weights of the largest transformer block
    layers: int
    hidden: int
    intermediate: int
    query: int  # heads × head dim
    key: int  # key-value heads × head dim
    vocabulary: int
    root: int  # weights outside the blocks: embedding, last norm and head
    tied: bool  # the head is the embedding
    sizes: tuple[int, ...]  # of the single weights
    per_rank: int  # weights of adapters of rank 1


@dataclass(frozen=True)
class Setup:
    """How a run holds its weights: the settings that determine its memory."""

    shards: int  # GPUs that share the weights
    full: bool  # nothing is sharded
    width: int  # bytes of an entry in the compute dtype
    reference: bool = True  # there is a frozen reference
    offload: str = "none"
    checkpointing: bool = True  # activations are recomputed
    device: str = "cuda"
    adapter_rank: int = 0  # 0: all weights learn


def shape_of(config: PretrainedConfig) -> ModelShape:
    """The shape of a model with this config. Builds it without allocating memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    blocks = [sum(weight.numel() for weight in block.parameters()) for block in blocks_of(model)]
    sizes = tuple(weight.numel() for weight in model.parameters())
    attention = attention_shape(config)
    text = config.get_text_config()  # of a model that also sees images, for example
    return ModelShape(
        weights=sum(sizes),
        block=max(blocks),
        layers=len(blocks),
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        query=attention.heads * attention.dim,
        key=attention.kv_heads * attention.dim,
        vocabulary=text.vocab_size,
        root=sum(sizes) - sum(blocks),
        tied=config.tie_word_embeddings,
        sizes=sizes,
        per_rank=adapter_weights(model, 1),
    )


def block_activations(shape: ModelShape, *, width: int, kept: int) -> int:
    """Bytes that autograd saves for each token of a block, its input included.

    `width`: bytes of an entry of a matrix product. `kept`: bytes of an entry of the residual stream. Norms
    save their input in float32; attention saves queries, keys, values and its output, but no scores.
    """
    norms = shape.hidden * 2 * (4 + kept) + (shape.query + shape.key) * (4 + width)
    # Autocast copies the input of each of five products; otherwise the products after a norm share one.
    inputs = shape.hidden * width * (2 if kept == width else 5)
    attention = 2 * (shape.query + shape.key) * width
    return norms + inputs + attention + 4 * shape.intermediate * width


def state_bytes(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Bytes that a run holds all the time."""
    if setup.adapter_rank:  # one copy of the frozen weights plays, learns and is the reference
        trained: float = setup.adapter_rank * shape.per_rank
        same = referenced = False
    else:
        trained = 0.0 if setup.offload == "all" else shape.weights / setup.shards
        same = setup.full and setup.width == 4  # the policy that learns also plays
        referenced = setup.reference and setup.offload == "none"
    reference = shape.weights / setup.shards * (4 if setup.full else setup.width)
    return {
        "float32 weights": 4 * trained,
        "copy that plays": 0 if same else setup.width * shape.weights,
        "frozen reference": reference if referenced else 0.0,
        "gradients": 4 * trained,
        "AdamW's moments": 8 * trained,
    }


def update_bytes(shape: ModelShape, setup: Setup, *, tokens: int) -> dict[str, float]:
    """Bytes of a micro-batch at its peak, which is in backward: either at the head or in a block."""
    width = setup.width
    # Under autocast float32 weights make a residual stream in float32.
    residual = 4 if setup.full and not setup.adapter_rank else width
    saved = block_activations(shape, width=width, kept=residual)
    # Of a chunk: logits and probabilities in float32, and their gradient in the compute dtype.
    logits = min(tokens, CHUNK_TOKENS[setup.device]) * shape.vocabulary * (8 + (width if width < 4 else 0))
    inside = tokens * 3 * shape.intermediate * width
    if setup.checkpointing:
        kept = {"inputs of the blocks": shape.layers * tokens * residual * shape.hidden}
        inside += tokens * saved  # recomputed in the backward of the block
    else:
        kept = {"activations": shape.layers * tokens * saved}
    peaks: dict[str, float] = {"head": logits, "block": inside}
    if not setup.adapter_rank:  # frozen weights have no gradients, and are neither cast nor gathered
        peaks = _with_weights(shape, setup, head=logits, block=inside)
    return {**kept, "a block or the head": max(peaks.values())}


def _with_weights(shape: ModelShape, setup: Setup, *, head: float, block: float) -> dict[str, float]:
    """The bytes of each moment that may be the peak, with gradients and cast or gathered weights."""
    width, sharded, half = setup.width, not setup.full, setup.width < 4
    # In 16 bits the gradient of a chunk and cast weights, else gathered weights.
    copies = 2 * width if half else width if sharded else 0
    moments = {"head": head + shape.root * (4 + copies), "block": block}  # the head's gradient is in float32
    if sharded or half:  # the weights of a block and of the next; their gradients, and the sum in float32
        moments["block"] += shape.block * (4 * width + 8) + shape.root * 2 * width
    if sharded and shape.tied:  # the gathered weights, the gradients of head and embedding, and their sum
        moments["tied"] = shape.root * 4 * width + shape.block * 2 * width
    if half and not sharded:  # autocast keeps all cast weights until the forward ends
        moments["cast"] = shape.weights * width
    # On a CPU AdamW is not fused: two temporary tensors for each weight, at most an embedding.
    if setup.device == "cpu":
        moments["step"] = 8 * shape.vocabulary * shape.hidden / setup.shards
    return moments


def offloaded_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes of CPU memory that `--offload` takes for each rank.

    Weights and gradients are in pinned memory, in blocks whose sizes torch rounds up to powers of two.
    """

    def pinned(width: int) -> int:
        return sum(1 << (math.ceil(size / setup.shards) * width - 1).bit_length() for size in shape.sizes)

    total = 0.0
    if setup.reference and setup.offload != "none":
        total += pinned(setup.width)
    if setup.offload == "all":
        total += 2 * pinned(4) + 8 * shape.weights / setup.shards
    return total


def later_bytes(policy: Policy, config: TrainConfig, ranks: Ranks) -> float:
    """Bytes that training takes on this rank's device after its models: gradients, moments, a micro-batch.

    `policy` is the one that learns. 0 for a model whose sizes are not known.
    """
    shards = 1 if ranks.mesh is None else ranks.mesh.size(-1)
    setup = replace(_setup(config, shards), full=ranks.mesh is None, width=policy.compute.itemsize)
    try:
        shape = shape_of(policy.model.config)
    except (AttributeError, KeyError, ValueError):
        return 0.0
    update = update_bytes(shape, setup, tokens=max(config.tokens_per_batch, config.max_tokens))
    return _added_by_update(state_bytes(shape, setup), update)


def _added_by_update(states: Mapping[str, float], update: Mapping[str, float]) -> float:
    """What is not allocated yet when the KV cache is: before the first update."""
    return states["gradients"] + states["AdamW's moments"] + sum(update.values())


def reserve_memory(models: Models, optimizer: Optimizer, config: TrainConfig, ranks: Ranks) -> None:
    """Let the KV cache, which is allocated with the first game, leave room for the update."""
    needed = later_bytes(models.policy, config, ranks)

    def later() -> float:
        # A run that resumes has its moments already.
        held = [local_tensor(entry) for state in optimizer.state.values() for entry in state.values()]
        taken = sum(entry.nbytes for entry in held if entry.device == ranks.device)
        return max(0.0, needed - taken)

    models.agent.engine.reserve(later)


def memory_table(config: TrainConfig) -> str:
    """The lines of --dry-run about memory; a single line if the agent's config cannot be loaded."""
    if config.agent in MINI_AGENTS:
        return "memory: the mini agent fits everywhere"
    path = find_agent(config.agent, config.seed)
    try:
        return table_of(AutoConfig.from_pretrained(path, **loading_options(path)), config)
    except (OSError, AttributeError, ValueError, KeyError):
        return f"memory: not estimated, because the config of {config.agent!r} cannot be loaded"


def table_of(model: PretrainedConfig, config: TrainConfig) -> str:
    """The lines of --dry-run about the memory of a model with these sizes."""
    shape = shape_of(model)
    # Adapters train beside whole weights.
    setups = [_setup(config, shards) for shards in (SHARDS[:1] if config.adapter_rank else SHARDS)]
    columns = [_column(shape, config, setup) for setup in setups]
    names = [f"{setup.shards} (whole)" if setup.full else str(setup.shards) for setup in setups]
    where = "process on a CPU" if config.device == "cpu" else "GPU"
    lines = [_line(f"GB of each {where}, sharded over", names)]
    for name in columns[0]:
        lines.append(_line(name, [column[name] for column in columns]))
    return "\n".join(lines)


def _line(name: str, cells: list[str]) -> str:
    return f"{name:40}" + "".join(f"{cell:>12}" for cell in cells)


def _setup(config: TrainConfig, shards: int) -> Setup:
    return Setup(
        shards=shards,
        full=shards == 1 and config.offload == "none" and config.parallel != "fsdp",
        width=4 if config.device == "cpu" else getattr(torch, config.dtype).itemsize,
        reference=config.kl_coef > 0,
        offload=config.offload,
        checkpointing=config.checkpointing,
        device="cpu" if config.device == "cpu" else "cuda",
        adapter_rank=config.adapter_rank,
    )


def _column(shape: ModelShape, config: TrainConfig, setup: Setup) -> dict[str, str]:
    """The cells for one number of shards, from top to bottom."""
    states = state_bytes(shape, setup)
    update = update_bytes(shape, setup, tokens=max(config.tokens_per_batch, config.max_tokens))
    if setup.device == "cpu":  # where --offload moves nothing
        cache = config.kv_tokens * 2 * shape.layers * shape.key * setup.width
        states = state_bytes(shape, replace(setup, offload="none"))
        states |= {"KV cache of --kv-tokens": cache, "Python and torch": PROCESS_BYTES}
    total = sum(states.values()) + sum(update.values())
    column = {name: f"{value / 1e9:.1f}" for name, value in {**states, **update, "together": total}.items()}
    if setup.device == "cpu":
        return column
    if setup.offload != "none":
        column["CPU memory of each rank"] = f"{offloaded_bytes(shape, setup) / 1e9:.1f}"
    later = _added_by_update(states, update)
    token_bytes = 2 * shape.layers * shape.key * setup.width
    for gpu in (SMALL_GPU, *GPUS) if setup.adapter_rank else GPUS:
        least = config.max_tokens * token_bytes
        affordable = cache_bytes(gpu * 1e9 - (total - later), later, least)
        cache_tokens = config.kv_tokens or int(affordable / token_bytes)
        left = gpu * 1e9 - total - cache_tokens * token_bytes
        fits = left > 0 and cache_tokens >= config.max_tokens
        cache_name = f"{gpu} GB: KV cache, thousand tokens"
        column[cache_name] = f"{cache_tokens / 1e3:.0f}" if fits else "too small"
        column[f"{gpu} GB: left over"] = f"{left / 1e9:.1f}" if fits else ""
    return column
