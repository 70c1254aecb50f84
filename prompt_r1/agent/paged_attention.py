"""Attention of new tokens over the paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from prompt_r1.agent.attention import UnsupportedAttention, Window, attend_in_window, is_shorter
from prompt_r1.agent.kv_cache import PagePool


def upload(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers, or rows of numbers, to the device. The host does not wait for the copy."""
    pinned = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True)
class Chunk:
    """The new tokens of one sequence in a packed row."""

    column: int  # of the first one in the row
    count: int
    length: int  # tokens of the sequence, the new ones included
    pages: Sequence[int]  # its block table


@dataclass(frozen=True)
class PagedBatch:
    """A packed row of T new tokens of B sequences, and the pages that hold these.

    A CUDA graph records what `attend` does with these tensors, so on GPUs it reads no value on the host.
    """

    pool: PagePool
    positions: Tensor  # (T,) of each new token in its sequence
    pages: Tensor  # (T,) the page of each new token
    starts: Tensor  # (B + 1,) int32 first column of each sequence, then T
    lengths: Tensor  # (B,) int32 tokens of each sequence, the new ones included
    block_tables: Tensor  # (B, pages of the longest) int32
    most_new: int  # tokens of one sequence
    longest: int  # sequence, in tokens

    @classmethod
    def of(cls, chunks: Sequence[Chunk], pool: PagePool, device: torch.device) -> "PagedBatch":
        """The batch of these chunks."""
        positions: list[int] = []
        pages: list[int] = []
        for one in chunks:
            new = range(one.length - one.count, one.length)
            positions += new
            pages += [one.pages[position // pool.page_size] for position in new]
        most_pages = max(len(one.pages) for one in chunks)
        tables = [[*one.pages, *[pool.spare] * (most_pages - len(one.pages))] for one in chunks]
        row = upload([positions, pages], torch.int64, device)
        starts = upload([*(one.column for one in chunks), len(positions)], torch.int32, device)
        lengths = [one.length for one in chunks]
        return cls(
            pool,
            row[0],
            row[1],
            starts,
            upload(lengths, torch.int32, device),
            upload(tables, torch.int32, device),
            max(one.count for one in chunks),
            max(lengths),
        )

    @cached_property
    def rows(self) -> Tensor:
        """(T,) the row of each new token in its page."""
        return self.positions % self.pool.page_size

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """Write the new keys and values (Hkv, T, D) of a layer to their pages, and attend to the sequences.

        (H, T, D) queries → (T, H, D).
        """
        if layer >= len(self.pool.keys) or self.pool.keys.shape[3:] != (len(key), key.shape[2]):
            raise UnsupportedAttention("its attention has other sizes than its config says")
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys[self.pages, self.rows] = key.transpose(0, 1).to(keys.dtype)
        values[self.pages, self.rows] = value.transpose(0, 1).to(values.dtype)
        query = query.transpose(0, 1).to(keys.dtype)
        if query.is_cuda and query.dtype.itemsize == 2:
            return _flash(query, keys, values, self, scale, window)
        return _sequence_by_sequence(layer, query, self, scale, window)

    # What follows reads values on the host: on CPUs, and on GPUs in 32 bits.

    @cached_property
    def columns(self) -> list[slice]:
        """The columns of each sequence."""
        return [slice(start, end) for start, end in pairwise(self.starts.tolist())]

    @cached_property
    def tables(self) -> list[list[int]]:
        """The block table of each sequence."""
        tables = zip(self.block_tables.tolist(), self.lengths.tolist(), strict=True)
        return [table[: self.pool.pages_for(length)] for table, length in tables]

    @cached_property
    def views(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Of each sequence in a single page, the keys and values (Hkv, L, D) in each layer."""
        found: list[list[tuple[Tensor, Tensor]]] = []
        for length, pages in zip(self.lengths.tolist(), self.tables, strict=True):
            of_layers: list[tuple[Tensor, Tensor]] = []
            if len(pages) == 1:
                keys, values = (
                    pool[:, pages[0], :length].transpose(1, 2).unbind(0)
                    for pool in (self.pool.keys, self.pool.values)
                )
                of_layers = list(zip(keys, values, strict=True))
            found.append(of_layers)
        return found

    def cached(self, layer: int, number: int) -> tuple[Tensor, Tensor]:
        """The keys and values (Hkv, L, D) of a sequence: a view of a single page, or copies of several."""
        if self.views[number]:
            return self.views[number][layer]
        pages, length = self.tables[number], int(self.lengths[number])
        keys, values = (
            pool[layer, pages].flatten(0, 1)[:length].transpose(0, 1)
            for pool in (self.pool.keys, self.pool.values)
        )
        return keys, values


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scale: float, window: Window
) -> Tensor:
    """All sequences in one call of FlashAttention. With one split, a sequence's result does not depend on
    the other sequences of the batch. Not measured.
    """
    from torch.nn.attention.varlen import varlen_attn  # importing it compiles where torch has no CUDA

    # The last query sees all keys, so a single query needs no causal mask, which is slower.
    causal = batch.most_new > 1 or window is not None
    out = varlen_attn(
        query,
        keys,
        values,
        batch.starts,
        None,
        batch.most_new,
        batch.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0 if causal else -1),
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
    """One call of torch's SDPA for each sequence, on any device. (T, H, D) → (T, H, D)."""
    heads, kv_heads = query.shape[1], batch.pool.keys.shape[3]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    # For a single query, put the heads that share a key into rows: far faster on a CPU than repeating keys.
    grouped_queries = query.reshape(len(query), 1, kv_heads, heads // kv_heads, -1).unbind(0)
    single_columns: list[int] = []
    single_outputs: list[Tensor] = []
    for number, columns in enumerate(batch.columns):
        key, value = batch.cached(layer, number)
        count, length = columns.stop - columns.start, key.shape[1]
        if count == 1:
            if is_shorter(window, length):
                key, value = key[:, -window:], value[:, -window:]
            single_columns.append(columns.start)
            single_outputs.append(
                F.scaled_dot_product_attention(
                    grouped_queries[columns.start], key[None], value[None], scale=scale
                )
            )
        elif is_shorter(window, length):
            part = attend_in_window(query[columns].transpose(0, 1), key, value, scale, window)
            out[columns] = part.transpose(0, 1)
        else:
            visible = torch.ones(count, length, dtype=torch.bool, device=query.device).tril(length - count)
            part = F.scaled_dot_product_attention(
                query[None, columns].transpose(1, 2),
                key[None],
                value[None],
                scale=scale,
                enable_gqa=heads != kv_heads,
                is_causal=count == length,
                attn_mask=None if count == length else visible,
            )
            out[columns] = part[0].transpose(0, 1)
    if single_outputs:
        grouped_out = out.view(len(query), 1, kv_heads, heads // kv_heads, -1)
        grouped_out[single_columns] = torch.stack(single_outputs)
    return out
