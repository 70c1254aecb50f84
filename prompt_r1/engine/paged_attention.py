"""Attention of new tokens over the blocks of the KV cache."""

from collections.abc import Collection, Mapping
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from prompt_r1.engine.kv_cache import BlockPool, TokenSequence
from prompt_r1.model.attention import RowAttention, Window, attend_in_window, causal_mask


def upload(
    numbers: Collection[int] | Collection[Collection[float]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy numbers, or rows of numbers, to the device. The host does not wait for the copy."""
    pinned = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


class PagedBatch:
    """A packed row of the T new tokens of B sequences, and the blocks that hold these sequences."""

    def __init__(
        self, new_tokens: Mapping[TokenSequence, list[int]], pool: BlockPool, *, longest: int = 0
    ) -> None:
        """`new_tokens`: the tokens that follow the cached tokens of each sequence. They have blocks already.

        `longest`: the block tables have room for sequences of this many tokens; 0: the longest of these.
        """
        self.pool = pool
        self.sequences = list(new_tokens)
        self.counts = [len(new) for new in new_tokens.values()]  # new tokens of each sequence
        # The tokens of each sequence, the new ones included. `lengths` is the copy on the device.
        self.host_lengths = [len(sequence.tokens) + len(new) for sequence, new in new_tokens.items()]
        self.mask = cache(causal_mask)  # All layers share their masks.
        self.max_new = max(self.counts)  # the most new tokens of a sequence
        self.longest = max(longest, *self.host_lengths)
        table_length = pool.blocks_for(self.longest)

        # For each sequence: its new tokens, and where their keys and values are written.
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        offsets: list[int] = []
        starts = [0]
        block_tables: list[list[int]] = []
        for sequence, new in new_tokens.items():
            table = sequence.block_table
            cached = len(sequence.tokens)
            new_positions = range(cached, cached + len(new))
            tokens += new
            positions += new_positions
            blocks += [table[position // pool.block_size] for position in new_positions]
            offsets += [position % pool.block_size for position in new_positions]
            starts.append(len(tokens))
            # While a prompt is computed in chunks, its sequence already has blocks for the whole prompt.
            used = table[:table_length]
            block_tables.append(used + [pool.spare] * (table_length - len(used)))

        # (4, T) for each new token: its id, its position, and the block and the offset it is written to.
        self.new_tokens = upload([tokens, positions, blocks, offsets], torch.int64, pool.device)
        self.tokens, self.positions, self.blocks, self.offsets = self.new_tokens
        # (B + 1,) where the new tokens of each sequence start, then T
        self.starts = upload(starts, torch.int32, pool.device)
        self.lengths = upload(self.host_lengths, torch.int32, pool.device)  # (B,)
        self.block_tables = upload(block_tables, torch.int32, pool.device)  # (B, blocks of `longest`)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a CUDA graph reads. The first one holds tokens, positions, blocks and offsets."""
        return [self.new_tokens, self.starts, self.lengths, self.block_tables]

    def row_attention(self) -> RowAttention:
        """The attention of a forward over this batch."""
        return self.attend

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """Write a layer's new keys and values (Hkv, T, D) to the cache, and attend to the whole sequences.

        Queries (H, T, D) → (T, H, D).
        """
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys[self.blocks, self.offsets] = key.transpose(0, 1).to(keys.dtype)
        values[self.blocks, self.offsets] = value.transpose(0, 1).to(values.dtype)
        query = query.transpose(0, 1).to(keys.dtype)
        if self.pool.flash:
            return _flash(layer, query, self, scale, window)
        return _sequence_by_sequence(layer, query, self, scale, window)

    @cached_property
    def first_blocks(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Views of each sequence's first block: for each layer, its keys and its values.

        Each view is (1, Hkv, tokens, D). They are made once for a step, because slicing the cache in every
        layer would take longer than attention to a short game.
        """
        cache = self.pool.cache.transpose(3, 4)  # (keys and values, layers, blocks, Hkv, S, D)
        views: list[list[tuple[Tensor, Tensor]]] = []
        for sequence, length in zip(self.sequences, self.host_lengths, strict=True):
            block = sequence.block_table[0]
            first_keys, first_values = cache[:, :, block : block + 1, :, :length]
            views.append(list(zip(first_keys.unbind(), first_values.unbind(), strict=True)))
        return views


def _flash(layer: int, query: Tensor, batch: PagedBatch, scale: float, window: Window) -> Tensor:
    """Attend to all sequences in one call of FlashAttention. (T, H, D) → (T, H, D).

    `num_splits=1` is needed for right results. With any other value the kernel of torch 2.13 may leave rows
    of a packed batch unwritten, or write NaN. It also makes the result of a sequence independent of the other
    sequences of the batch.
    """
    from torch.nn.attention.varlen import varlen_attn  # Where torch has no CUDA, this import compiles code.

    # How many keys a query sees to its left and to its right; -1: all of them. If each sequence has one new
    # token, no key is to its right, so all keys are allowed: without a mask the kernel is faster.
    if window is not None:
        window_size = (window - 1, 0)
    elif batch.max_new > 1:
        window_size = (-1, 0)
    else:
        window_size = (-1, -1)
    out = varlen_attn(
        query,
        batch.pool.keys[layer],
        batch.pool.values[layer],
        batch.starts,
        batch.starts,  # The starts of the keys are required, but not read: see `seqused_k` and `block_table`.
        batch.max_new,
        batch.longest,
        scale=scale,
        window_size=window_size,
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
    # G query heads share a key head. If a sequence has one new token, SDPA takes its part as it is:
    #
    #     (new tokens, Hkv,   G,       D)    the part of a sequence
    #     (batch,      heads, queries, D)    what SDPA takes
    #
    # So the G query heads become G queries of one head, and their key is not copied G times, which would be
    # far slower on a CPU.
    grouped = query.unflatten(1, (kv_heads, -1)).split(batch.counts)
    outs: list[Tensor] = []
    parts = zip(batch.sequences, batch.counts, batch.host_lengths, batch.first_blocks, grouped, strict=True)
    for sequence, count, length, first_block, queries in parts:
        if length <= pool.block_size:
            key, value = first_block[layer]  # (1, Hkv, length, D)
        else:
            blocks = sequence.block_table[: pool.blocks_for(length)]
            copied = pool.cache[:, layer, blocks].flatten(1, 2)[:, :length]  # (2, length, Hkv, D)
            key, value = copied.transpose(1, 2).split(1)
        if count == 1:
            if window is not None:
                key, value = key[:, :, -window:], value[:, :, -window:]
            outs.append(F.scaled_dot_product_attention(queries, key, value, scale=scale))
        else:
            heads_first = queries.flatten(1, 2).transpose(0, 1)  # (H, new tokens, D)
            part = attend_in_window(heads_first, key[0], value[0], scale, window, batch.mask)
            outs.append(part.transpose(0, 1).view(queries.shape))
    return torch.cat(outs).flatten(1, 2)
