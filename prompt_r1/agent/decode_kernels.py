"""Three kernels for attention over the KV cache.

The games of a group have the same prompt, and may share its rows. A sequence then lies in two ranges of rows:
its shared tokens, then its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from prompt_r1.agent.attention import UnsupportedAttention, Window, attend_in_window, is_shorter


def upload(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers, or rows of numbers, to the device. The host does not wait for the copy."""
    pinned = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True)
class Chunk:
    """The new tokens of one sequence in a packed row, and the rows of the arena that hold the sequence."""

    column: int  # of the first new token in the packed row
    count: int  # new tokens
    start: int  # first arena row of the sequence's own tokens
    length: int  # tokens of the sequence in the arena, the shared and the new ones included
    shared: int = 0  # first tokens that lie in rows shared with other sequences
    shared_start: int = 0  # first arena row of these

    @cached_property
    def mask(self) -> Tensor:
        """(count, length). Causal: each new token sees the sequence up to its own position."""
        visible = torch.ones(self.count, self.length, dtype=torch.bool)
        return visible.tril(self.length - self.count)

    @property
    def own(self) -> int:
        """Tokens in rows of its own."""
        return self.length - self.shared


@dataclass(frozen=True)
class CacheOffsets:
    """The chunks of a batch in the form that FlashAttention reads, with one range of rows for each."""

    queries: Tensor  # (chunks + 1,) first columns, then the number of columns
    starts: Tensor  # (chunks + 1,) first arena rows; the last entry is not read
    lengths: Tensor  # (chunks,)
    longest_query: int
    longest_key: int
    before_queries: bool = False  # all rows of a range come before all new tokens of its sequence

    @property
    def causal(self) -> bool:
        """False for a batch of single tokens: the flag would disable the split over long keys."""
        return self.longest_query > 1 and not self.before_queries


@dataclass(frozen=True)
class SharedRows:
    """The shared rows of a batch in which at least one sequence has some."""

    offsets: CacheOffsets
    unshared: Tensor  # (T,) bool: whether the sequence of a new token has no shared rows


@dataclass(frozen=True)
class RaggedBatch:
    """A packed row of T new tokens, and the arena that holds their sequences.

    A sequence's own tokens occupy consecutive rows of the arena, and so do its shared ones.
    """

    keys: Sequence[Tensor]  # (Hkv, N, D) of each layer
    values: Sequence[Tensor]
    kernel: "Kernel"
    rows: Tensor  # (T,) the arena row of each new token
    positions: Tensor  # (T,) its position in its sequence
    offsets: CacheOffsets  # of own rows
    shared: SharedRows | None
    chunks: Sequence[Chunk] = ()  # none in a recorded step, which reads tensors only

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """Write the new keys and values (Hkv, T, D) of a layer to the arena, and attend to their sequences.

        (H, T, D) queries → (T, H, D).
        """
        if layer >= len(self.keys) or self.keys[layer][:, 0].shape != key[:, 0].shape:
            raise UnsupportedAttention("its attention has other sizes than its config says")
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(1, self.rows, key.to(keys.dtype))
        values.index_copy_(1, self.rows, value.to(values.dtype))
        return self.kernel(query.transpose(0, 1).to(keys.dtype), keys, values, self, scale, window)

    @cached_property
    def chunks_by_row(self) -> list[Chunk]:
        """The chunks in the order of their sequences in the arena."""
        return sorted(self.chunks, key=lambda chunk: chunk.start)

    @cached_property
    def own_rows(self) -> list[int]:
        """The lengths of the ranges into which own rows divide the arena, in the order of `chunks_by_row`:
        in turn the rows before a sequence, often none, and its own.
        """
        lengths: list[int] = []
        end = 0
        for chunk in self.chunks_by_row:
            lengths += [chunk.start - end, chunk.own]
            end = chunk.start + chunk.own
        return lengths


def ragged_batch(
    chunks: Sequence[Chunk],
    kernel: "Kernel",
    device: torch.device,
    keys: Sequence[Tensor] = (),
    values: Sequence[Tensor] = (),
) -> RaggedBatch:
    """The batch of these chunks, over an arena with these keys and values of each layer."""
    positions: list[int] = []
    rows: list[int] = []
    unshared: list[bool] = []
    for chunk in chunks:
        new = range(chunk.length - chunk.count, chunk.length)
        positions += new
        rows += [chunk.start - chunk.shared + position for position in new]
        unshared += [not chunk.shared] * chunk.count
    columns = [chunk.column for chunk in chunks]
    longest_query = max(chunk.count for chunk in chunks)

    def offsets(starts: list[int], lengths: list[int], *, before_queries: bool) -> CacheOffsets:
        table = [[*columns, len(rows)], [*starts, 0], [*lengths, 0]]
        queries, first_rows, counts = upload(table, torch.int32, device).unbind()
        return CacheOffsets(
            queries, first_rows, counts[:-1], longest_query, max(lengths), before_queries=before_queries
        )

    shared = None
    if not all(unshared):
        starts, lengths = [chunk.shared_start for chunk in chunks], [chunk.shared for chunk in chunks]
        shared_offsets = offsets(starts, lengths, before_queries=True)
        shared = SharedRows(shared_offsets, upload(unshared, torch.bool, device))
    starts, lengths = [chunk.start for chunk in chunks], [chunk.own for chunk in chunks]
    own_offsets = offsets(starts, lengths, before_queries=False)
    arena_rows, row_positions = upload([rows, positions], torch.int64, device).unbind()
    return RaggedBatch(keys, values, kernel, arena_rows, row_positions, own_offsets, shared, chunks)


Kernel = Callable[[Tensor, Tensor, Tensor, RaggedBatch, float, Window], Tensor]
"""(T, H, D) queries, (Hkv, N, D) keys and values of the arena, the batch, the scale, the layer's window →
(T, H, D).
"""


def one_by_one(
    query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, scale: float, window: Window = None
) -> Tensor:
    """Attend sequence by sequence with torch's SDPA. Works on any device; the fastest kernel on a CPU."""
    heads, kv_heads = query.shape[1], keys.shape[0]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    # For a single query, put the heads that share a key into rows: far faster on a CPU than repeating keys.
    grouped_queries = query.reshape(len(query), 1, kv_heads, heads // kv_heads, -1).unbind(0)
    grouped_out = out.view(len(query), 1, kv_heads, heads // kv_heads, -1)
    single_columns: list[int] = []
    single_outputs: list[Tensor] = []
    # One split for all: slicing the sequences one by one takes as long as attending over short ones.
    own_keys, own_values = (
        rows[None, :, : sum(batch.own_rows)].split(batch.own_rows, dim=2)[1::2] for rows in (keys, values)
    )
    for chunk, key, value in zip(batch.chunks_by_row, own_keys, own_values, strict=True):
        if chunk.shared:
            rows = slice(chunk.shared_start, chunk.shared_start + chunk.shared)
            key = torch.cat([keys[None, :, rows], key], dim=2)
            value = torch.cat([values[None, :, rows], value], dim=2)
        columns = slice(chunk.column, chunk.column + chunk.count)
        if chunk.count > 1 and is_shorter(window, chunk.length):
            part = attend_in_window(query[columns].transpose(0, 1), key[0], value[0], scale, window)
            out[columns] = part.transpose(0, 1)
            continue
        if chunk.count == 1:
            if window is not None:
                key, value = key[:, :, -window:], value[:, :, -window:]
            single_columns.append(chunk.column)
            single_outputs.append(
                F.scaled_dot_product_attention(grouped_queries[chunk.column], key, value, scale=scale)
            )
            continue
        from_start = chunk.count == chunk.length  # nothing is cached yet: plain causal attention
        part = F.scaled_dot_product_attention(
            query[None, columns].transpose(1, 2),
            key,
            value,
            scale=scale,
            enable_gqa=heads != kv_heads,
            is_causal=from_start,
            attn_mask=None if from_start else chunk.mask.to(query.device),
        )
        out[columns] = part[0].transpose(0, 1)
    if single_outputs:
        grouped_out[single_columns] = torch.stack(single_outputs)
    return out


def flash(
    query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, scale: float, window: Window = None
) -> Tensor:
    """All sequences in one call of torch's built-in FlashAttention (CUDA, 16 bits), and in a second one for
    shared rows. Not measured.

    Because `seqused_k` is given, `cum_seq_k` only has to hold the start of each sequence, so the arena needs
    no pages.
    """

    def attend(offsets: CacheOffsets) -> tuple[Tensor, Tensor]:
        out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            *_flash_arguments(query, keys, values, offsets),
            offsets.causal,
            False,  # do not return the debug mask
            scale=scale,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
            seqused_k=offsets.lengths,
        )
        return out, logsumexp

    return _attend_to_both(attend, batch, window)


def flash_package(
    query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, scale: float, window: Window = None
) -> Tensor:
    """The same calls in the flash-attn package, whose kernels are often newer. Not measured."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    # Named only where needed: versions of the package differ in these arguments.
    sizes = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}

    def attend(offsets: CacheOffsets) -> tuple[Tensor, Tensor]:
        out, logsumexp, *_ = _flash_attn_varlen_forward(
            *_flash_arguments(query, keys, values, offsets),
            scale,
            causal=offsets.causal,
            seqused_k=offsets.lengths,
            **sizes,
        )
        return out, logsumexp

    return _attend_to_both(attend, batch, window)


def _flash_arguments(
    query: Tensor, keys: Tensor, values: Tensor, offsets: CacheOffsets
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float]:
    """The first arguments of both FlashAttention functions; the last is the dropout."""
    sizes = (offsets.longest_query, offsets.longest_key)
    return query, keys.transpose(0, 1), values.transpose(0, 1), offsets.queries, offsets.starts, *sizes, 0.0


def _attend_to_both(
    attend: Callable[[CacheOffsets], tuple[Tensor, Tensor]], batch: RaggedBatch, window: Window
) -> Tensor:
    """Attention to shared and own rows, joined exactly, as in cascade inference. (T, H, D)

        out = w out_own + (1 - w) out_shared      w = σ(l_own - l_shared)

    l is the logarithm of the sum of a query's exponentiated scores, (H, T). `attend` returns out and l.
    """
    own, own_logsumexp = attend(batch.offsets)
    if batch.shared is None:
        return own
    assert window is None, "a window would have to count the shared rows"
    shared, shared_logsumexp = attend(batch.shared.offsets)
    weight = (own_logsumexp - shared_logsumexp).sigmoid()
    weight.masked_fill_(batch.shared.unshared, 1.0)  # there, l_shared is undefined
    return torch.addcmul(shared, own - shared, weight.T[..., None]).to(own.dtype)


# Kernels that read the whole batch from tensors, so that CUDA graphs can record them; the best one first.
RECORDABLE = (flash_package, flash)
