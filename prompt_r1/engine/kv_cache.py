"""The KV cache in blocks, as in vLLM, and attention over it.

    pool          blocks of S tokens, with the keys and values of all layers
    block table   the blocks of a sequence. Its token t is in row t % S of block block_table[t // S]
    ref count     how many sequences use a block

A new sequence may begin with a prefix of a cached sequence. Both sequences then use the full blocks of the
prefix. The rest of the prefix is copied into a block that only the new sequence uses.
"""

import functools
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from prompt_r1.errors import UsageError
from prompt_r1.model.attention import Window, attend_in_window, causal_mask
from prompt_r1.model.loading import free_memory
from prompt_r1.model.policy import Policy

# Tokens of a block. On a CPU a block holds a whole game, because attention can read one block as a view. A
# sequence in several blocks is copied in every step and layer, which takes longer than the attention itself.
# On GPUs FlashAttention needs blocks of 256 tokens.
BLOCK_SIZE = {"cpu": 4096, "cuda": 256}
# The share of the free memory that the cache takes at most, if no size is given.
MEMORY_SHARE = {"cpu": 0.3, "cuda": 0.9}
# On a GPU so many bytes stay free, for the engine's own forwards and for what other libraries allocate.
RESERVED_ON_GPU = 3_000_000_000


@dataclass(eq=False)
class Sequence:
    """The tokens of a game whose keys and values are cached. The engine knows a game by its sequence."""

    number: int  # Sequences are numbered in the order of their creation. Older ones are served first.
    tokens: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)


class BlockPool:
    """Blocks of keys and values for all layers. Allocates all of its memory when it is made.

    One more block, `spare`, belongs to no sequence. The idle rows of a CUDA graph write to it.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layers, kv_heads, dim = shape_of_a_token(config)
        # (keys and values, layers, blocks, rows, key heads, D). On a CPU the rows of a head are contiguous,
        # which attention reads fastest.
        if device.type == "cpu":
            heads_first = (2, layers, blocks + 1, kv_heads, block_size, dim)
            self.cache = torch.empty(heads_first, dtype=dtype, device=device).transpose(3, 4)
        else:
            rows_first = (2, layers, blocks + 1, block_size, kv_heads, dim)
            self.cache = torch.empty(rows_first, dtype=dtype, device=device)
        self.keys, self.values = self.cache
        self.device = device
        self.flash = can_use_flash(device, dtype, head_dim=dim, block_size=block_size)
        self.block_size = block_size
        self.count = blocks
        self.spare = blocks
        self.free = list(range(blocks))
        self.ref_counts = [0] * blocks

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks that hold `tokens` tokens."""
        return math.ceil(tokens / self.block_size)

    def allocate(self, sequence: Sequence, tokens: int) -> None:
        """Extend the block table of a sequence to `tokens` tokens. There must be enough free blocks."""
        while len(sequence.block_table) < self.blocks_for(tokens):
            block = self.free.pop()
            self.ref_counts[block] = 1
            sequence.block_table.append(block)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep at most the first `length` tokens of a sequence, so that the sequence can append tokens.

        A block that other sequences use must not be written to. If the cut is inside such a block, the
        sequence keeps none of the block's tokens.
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

    def fork(self, source: Sequence, target: Sequence, length: int) -> None:
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


def can_use_flash(device: torch.device, dtype: torch.dtype, *, head_dim: int, block_size: int) -> bool:
    """Whether torch's FlashAttention 2 can compute attention over blocks here.

    Its kernel for block tables (`mha_varlen_fwd` in torch 2.13) needs an NVIDIA GPU since Ampere (SM 8.0), 16
    bits, heads of at most 256 numbers that are a multiple of 8, and blocks that are a multiple of 256 tokens.
    """
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    is_nvidia_since_ampere = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    fits = head_dim <= 256 and head_dim % 8 == 0 and block_size % 256 == 0
    if is_nvidia_since_ampere and fits:
        return True
    warnings.warn(
        f"FlashAttention does not run on this GPU with heads of {head_dim} and blocks of {block_size}: "
        "attention is computed game by game, which is several times slower",
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


def cache_bytes(kind: str, free: int) -> int:
    """How many of `free` bytes the cache may take on a kind of device."""
    share = int(MEMORY_SHARE[kind] * free)
    return max(0, min(share, free - RESERVED_ON_GPU)) if kind == "cuda" else share


def allocate_pool(
    policy: Policy, *, tokens: int, longest: int, sequences: int, block_size: int = 0
) -> BlockPool:
    """Allocate a pool for `tokens` tokens; 0: as many as free memory allows, but no more than can be used.

    `longest`: tokens of the longest sequence. `sequences`: the most sequences at the same time. `block_size`:
    tokens of a block; 0: the default of the device. Raises UsageError if one sequence does not fit.
    """
    config, kind = policy.model.config, policy.device.type
    if not block_size:
        block_size = min(longest, BLOCK_SIZE["cpu"]) if kind == "cpu" else BLOCK_SIZE["cuda"]
    longest_blocks = math.ceil(longest / block_size)
    if tokens:
        # The longest sequence must fit.
        blocks = max(tokens // block_size, longest_blocks)
    else:
        bytes_of_block = 2 * block_size * shape_of_a_token(config).numel() * policy.compute_dtype.itemsize
        affordable = cache_bytes(kind, free_memory(policy.device)) // bytes_of_block
        blocks = min(affordable, sequences * longest_blocks)
    if blocks < longest_blocks:
        raise UsageError(
            f"the free memory holds a KV cache of {blocks * block_size} tokens, but a game may have "
            f"{longest}: lower --max-tokens, or --tokens-per-batch if this is a training"
        )
    return BlockPool(
        config, blocks=blocks, block_size=block_size, dtype=policy.compute_dtype, device=policy.device
    )


# Attention of new tokens over the blocks


def upload(
    numbers: Collection[int] | Collection[Collection[float]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy numbers, or rows of numbers, to the device. The host does not wait for the copy."""
    pinned = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


class PagedBatch:
    """A packed row of the T new tokens of B sequences, and the blocks that hold these sequences."""

    def __init__(self, new_tokens: Mapping[Sequence, int], pool: BlockPool, *, longest: int = 0) -> None:
        """`new_tokens`: how many of the last tokens of each sequence are new.

        `longest`: how many tokens a row of the block tables has room for; 0: the longest of these sequences.
        """
        self.new_tokens, self.pool = new_tokens, pool
        self.mask = functools.cache(causal_mask)  # All layers share their masks.
        self.max_new = max(new_tokens.values())  # the most new tokens of a sequence
        self.longest = max(longest, *(len(sequence.tokens) for sequence in new_tokens))
        table_length = pool.blocks_for(self.longest)

        # For each sequence: its new tokens, and where their keys and values are written.
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        rows: list[int] = []
        starts = [0]
        lengths: list[int] = []
        block_tables: list[list[int]] = []
        for sequence, count in new_tokens.items():
            length, table = len(sequence.tokens), sequence.block_table
            new = range(length - count, length)
            tokens += sequence.tokens[new.start :]
            positions += new
            blocks += [table[position // pool.block_size] for position in new]
            rows += [position % pool.block_size for position in new]
            starts.append(len(tokens))
            lengths.append(length)
            # While a prompt is computed in chunks, its sequence already has blocks for the whole prompt.
            used = table[:table_length]
            block_tables.append(used + [pool.spare] * (table_length - len(used)))

        # (T,) each: the new tokens, their positions, and the block and row that each token is written to.
        columns = upload([tokens, positions, blocks, rows], torch.int64, pool.device)
        self.tokens, self.positions, self.blocks, self.rows = columns
        # (B + 1,) the first column of each sequence, then T
        self.starts = upload(starts, torch.int32, pool.device)
        self.lengths = upload(lengths, torch.int32, pool.device)  # (B,) tokens, the new ones included
        self.block_tables = upload(block_tables, torch.int32, pool.device)  # (B, blocks of `longest`)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a CUDA graph reads."""
        row = [self.tokens, self.positions, self.blocks, self.rows]
        return [*row, self.starts, self.lengths, self.block_tables]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """Write a layer's new keys and values (Hkv, T, D) to the cache, and attend to the whole sequences.

        Queries (H, T, D) → (T, H, D).
        """
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys[self.blocks, self.rows] = key.transpose(0, 1).to(keys.dtype)
        values[self.blocks, self.rows] = value.transpose(0, 1).to(values.dtype)
        query = query.transpose(0, 1).to(keys.dtype)
        if self.pool.flash:
            return _flash(layer, query, self, scale, window)
        return _sequence_by_sequence(layer, query, self, scale, window)

    @cached_property
    def first_blocks(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Views of each sequence's first block, for each layer: keys and values (Hkv, rows, D).

        They are made once for a step, because slicing the cache in every layer would take longer than
        attention to a short game.
        """
        views: list[list[tuple[Tensor, Tensor]]] = []
        for sequence in self.new_tokens:
            cached = self.pool.cache[:, :, sequence.block_table[0], : len(sequence.tokens)]
            keys, values = cached.transpose(2, 3)  # (layers, Hkv, rows, D) each
            views.append(list(zip(keys, values, strict=True)))
        return views


def _flash(layer: int, query: Tensor, batch: PagedBatch, scale: float, window: Window) -> Tensor:
    """Attend to all sequences in one call of FlashAttention. (T, H, D) → (T, H, D).

    `num_splits=1` is needed for right results. With any other value the kernel of torch 2.13 may leave rows
    of a packed batch unwritten, or write NaN. It also makes the result of a sequence independent of the other
    sequences of the batch.
    """
    from torch.nn.attention.varlen import varlen_attn  # Where torch has no CUDA, this import compiles code.

    # A single query is the last token and sees all keys. Without a causal mask the kernel is faster.
    causal = batch.max_new > 1 or window is not None
    left = -1 if window is None else window - 1
    right = 0 if causal else -1
    out = varlen_attn(
        query,
        batch.pool.keys[layer],
        batch.pool.values[layer],
        batch.starts,
        batch.starts,  # The starts of the keys are required, but not read: see `seqused_k` and `block_table`.
        batch.max_new,
        batch.longest,
        scale=scale,
        window_size=(left, right),
        enable_gqa=True,
        seqused_k=batch.lengths,
        block_table=batch.block_tables,
        num_splits=1,
    )
    assert isinstance(out, Tensor), "the log-sum-exp was not requested"
    return out


def _sequence_by_sequence(
    layer: int, query: Tensor, batch: PagedBatch, scale: float, window: Window
) -> Tensor:
    """Attend with one call of torch's SDPA for each sequence, on any device. (T, H, D) → (T, H, D)."""
    pool = batch.pool
    kv_heads = pool.keys.shape[3]
    # (new tokens, Hkv, G, D) for each sequence: G query heads share a key head. With one new token, SDPA
    # computes G heads with 1 query each as 1 head with G queries. The result is the same, and no key is
    # copied, which is far slower on a CPU.
    grouped = query.unflatten(1, (kv_heads, -1)).split([*batch.new_tokens.values()])
    outs: list[Tensor] = []
    for sequence, first_block, queries in zip(batch.new_tokens, batch.first_blocks, grouped, strict=True):
        length = len(sequence.tokens)
        if length <= pool.block_size:
            key, value = first_block[layer]  # (Hkv, length, D)
        else:
            blocks = sequence.block_table[: pool.blocks_for(length)]
            copied = pool.cache[:, layer, blocks].flatten(1, 2)[:, :length]  # (2, length, Hkv, D)
            key, value = copied.transpose(1, 2)
        if len(queries) == 1:
            if window is not None:
                key, value = key[:, -window:], value[:, -window:]
            outs.append(F.scaled_dot_product_attention(queries, key[None], value[None], scale=scale))
        else:
            heads_first = queries.flatten(1, 2).transpose(0, 1)  # (H, new tokens, D)
            part = attend_in_window(heads_first, key, value, scale, window, batch.mask)
            outs.append(part.transpose(0, 1).view(queries.shape))
    return torch.cat(outs).flatten(1, 2)
