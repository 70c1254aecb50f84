"""The KV cache in blocks, as in vLLM.

    pool          blocks of S tokens, with the keys and values of all layers
    block table   the blocks of a sequence. Its token t is at offset t % S in block block_table[t // S]
    ref count     how many sequences use a block

A new sequence may begin with a prefix of a cached sequence. Both sequences then use the full blocks of the
prefix. The rest of the prefix is copied into a block that only the new sequence uses.
"""

import math
import warnings
from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig

from prompt_r1.errors import UsageError
from prompt_r1.model.machine import memory_left
from prompt_r1.model.policy import Policy

# Tokens of a block. On a CPU a block holds a whole game, because attention can read one block as a view. A
# sequence in several blocks is copied in every step and layer, which takes longer than the attention itself.
# On GPUs FlashAttention needs a multiple of 256 tokens.
BLOCK_SIZE = {"cpu": 4096, "cuda": 256}
# The share of the free memory that the cache takes, if none is given.
MEMORY_SHARE = {"cpu": 0.3, "cuda": 0.9}
# On a GPU, this many bytes stay free, for the engine's own forwards and for what other libraries allocate.
RESERVED_ON_GPU = 3_000_000_000


@dataclass(eq=False)
class TokenSequence:
    """The tokens of a game whose keys and values are cached. The engine knows a game by its sequence."""

    number: int  # Sequences are numbered in the order of their creation. Older ones are served first.
    tokens: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)


class BlockPool:
    """Blocks of keys and values for all layers. Allocates all of its memory when it is made.

    One more block, `spare`, belongs to no sequence. The idle sequences of a CUDA graph write to it.
    """

    def __init__(self, policy: Policy, *, blocks: int, block_size: int) -> None:
        """Allocate `blocks` blocks, each for the keys and values of `block_size` tokens of the policy."""
        device, dtype = policy.device, policy.compute_dtype
        layers, kv_heads, dim = shape_of_a_token(policy.model.config)
        # The shape is (keys and values, layers, blocks, S, key heads, D). On a CPU, heads come before tokens
        # in memory: attention reads the tokens of a head fastest if they are contiguous.
        if device.type == "cpu":
            heads_first = (2, layers, blocks + 1, kv_heads, block_size, dim)
            self.cache = torch.empty(heads_first, dtype=dtype, device=device).transpose(3, 4)
        else:
            tokens_first = (2, layers, blocks + 1, block_size, kv_heads, dim)
            self.cache = torch.empty(tokens_first, dtype=dtype, device=device)
        self.keys, self.values = self.cache
        self.device = device
        self.flash = can_use_flash(device, dtype, head_dim=dim)
        self.block_size = block_size
        self.count = blocks
        self.spare = blocks
        self.free = list(range(blocks))
        self.ref_counts = [0] * blocks

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks that hold `tokens` tokens."""
        return math.ceil(tokens / self.block_size)

    def allocate(self, sequence: TokenSequence, tokens: int) -> None:
        """Extend the block table of a sequence to `tokens` tokens. There must be enough free blocks."""
        while len(sequence.block_table) < self.blocks_for(tokens):
            block = self.free.pop()
            self.ref_counts[block] = 1
            sequence.block_table.append(block)

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """Keep at most the first `length` tokens of a sequence, so that the sequence can append tokens.

        A block that other sequences use must not be written to. So a cut inside such a block moves to the
        block's beginning.
        """
        rest = length % self.block_size
        if rest:
            last_block = sequence.block_table[length // self.block_size]
            if self.ref_counts[last_block] > 1:
                length -= rest
        kept = self.blocks_for(length)
        for block in sequence.block_table[kept:]:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free.append(block)
        del sequence.block_table[kept:]
        del sequence.tokens[length:]

    def fork(self, source: TokenSequence, target: TokenSequence, length: int) -> None:
        """Begin the empty sequence `target` with the first `length` tokens of `source`.

        Full blocks are shared. The rest is copied into a new block, so the pool must have a free block.
        """
        full = length // self.block_size
        target.tokens = source.tokens[:length]
        target.block_table = source.block_table[:full]
        for block in target.block_table:
            self.ref_counts[block] += 1
        self.allocate(target, length)
        rest = length % self.block_size
        if rest:
            copy, original = target.block_table[full], source.block_table[full]
            self.cache[:, :, copy, :rest] = self.cache[:, :, original, :rest]


def can_use_flash(device: torch.device, dtype: torch.dtype, *, head_dim: int) -> bool:
    """Whether torch's FlashAttention 2 can compute attention over blocks here.

    Its kernel for block tables (`mha_varlen_fwd` in torch 2.13) needs an NVIDIA GPU since Ampere (SM 8.0), 16
    bits, and heads of at most 256 numbers that are a multiple of 8.
    """
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    is_nvidia_since_ampere = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    fits = head_dim <= 256 and head_dim % 8 == 0
    if is_nvidia_since_ampere and fits:
        return True
    warnings.warn(
        f"FlashAttention does not run on this GPU with heads of {head_dim}: attention is computed game by "
        "game, which is several times slower",
        stacklevel=2,
    )
    return False


def shape_of_a_token(config: PretrainedConfig) -> torch.Size:
    """The shape (layers, key heads, D) of the keys of one token, and of its values."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return torch.Size([text.num_hidden_layers, kv_heads, head_dim])


def bytes_of_a_token(policy: Policy) -> int:
    """The bytes that the keys and values of one token take in the cache."""
    return 2 * shape_of_a_token(policy.model.config).numel() * policy.compute_dtype.itemsize


def cache_bytes(kind: str, free: int, share: float = 0.0) -> int:
    """How many of `free` bytes the cache takes on a kind of device. `share` 0 stands for its MEMORY_SHARE."""
    allowed = int((share or MEMORY_SHARE[kind]) * free)
    if kind == "cuda":
        allowed = min(allowed, free - RESERVED_ON_GPU)
    return max(0, allowed)


def allocate_pool(
    policy: Policy, *, max_tokens: int, max_sequences: int, memory_share: float = 0.0
) -> BlockPool:
    """Allocate the pool of an engine, which explains the arguments.

    It is as large as free memory allows, but no larger than `max_sequences` of the longest games. Raises
    UsageError if one such game does not fit.
    """
    kind = policy.device.type
    block_size = min(max_tokens, BLOCK_SIZE["cpu"]) if kind == "cpu" else BLOCK_SIZE["cuda"]
    blocks_of_game = math.ceil(max_tokens / block_size)
    allowed = cache_bytes(kind, memory_left(policy.device), memory_share)
    affordable = allowed // (block_size * bytes_of_a_token(policy))
    blocks = min(affordable, max_sequences * blocks_of_game)
    if blocks < blocks_of_game:
        raise UsageError(
            f"the free memory holds a KV cache of {blocks * block_size} tokens, but a game may have "
            f"{max_tokens}: lower --max-tokens, or --tokens-per-batch if this is a training"
        )
    return BlockPool(policy, blocks=blocks, block_size=block_size)
