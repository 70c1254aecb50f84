"""Attention of new tokens over the KV cache: a ragged batch of sequences, and three kernels for it.

The games of a group have the same prompt, and may share its rows. A sequence then lies in two ranges of rows:
its shared tokens, then its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from prompt_r1.agent.scores import PLAIN, ScoreRules, attend_by_rules


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

    The arena has one (Hkv, N, D) tensor of keys and one of values for each layer. A sequence's own tokens
    occupy consecutive rows of it, and so do its shared ones.
    """

    keys: list[Tensor]
    values: list[Tensor]
    chunks: list[Chunk]
    device: torch.device
    kernel: "Kernel"

    @cached_property
    def positions(self) -> Tensor:
        """(T,) the position of each new token in its sequence."""
        positions: list[int] = []
        for chunk in self.chunks:
            positions += range(chunk.length - chunk.count, chunk.length)
        return upload(positions, torch.int64, self.device)

    @cached_property
    def rows(self) -> Tensor:
        """(T,) the arena row of each new token."""
        starts: list[int] = []
        for chunk in self.chunks:
            starts += [chunk.start - chunk.shared] * chunk.count
        return upload(starts, torch.int64, self.device) + self.positions

    @cached_property
    def chunks_by_row(self) -> list[Chunk]:
        """The chunks in the order of their sequences in the arena."""
        return sorted(self.chunks, key=lambda chunk: chunk.start)

    @cached_property
    def pieces(self) -> "ArenaPieces":
        """How the arena's rows are divided among the sequences, in the order of `chunks_by_row`: own rows."""
        sizes: list[int] = []
        sequences: list[int] = []
        end = 0
        for chunk in self.chunks_by_row:
            sizes.append(chunk.start - end)  # rows between two sequences, often none
            sequences.append(len(sizes))
            sizes.append(chunk.own)
            end = chunk.start + chunk.own
        return ArenaPieces(sizes, sequences, end)

    @cached_property
    def offsets(self) -> CacheOffsets:
        """Of the own rows of each sequence."""
        starts = [chunk.start for chunk in self.chunks]
        return self._offsets(starts, [chunk.own for chunk in self.chunks], before_queries=False)

    @cached_property
    def shared(self) -> SharedRows | None:
        """The shared rows; None if no sequence has any."""
        lengths = [chunk.shared for chunk in self.chunks]
        if not any(lengths):
            return None
        starts = [chunk.shared_start for chunk in self.chunks]
        unshared: list[bool] = []
        for chunk in self.chunks:
            unshared += [chunk.shared == 0] * chunk.count
        offsets = self._offsets(starts, lengths, before_queries=True)
        return SharedRows(offsets, upload(unshared, torch.bool, self.device))

    def _offsets(self, starts: list[int], lengths: list[int], *, before_queries: bool) -> CacheOffsets:
        queries = [chunk.column for chunk in self.chunks]
        columns = self.chunks[-1].column + self.chunks[-1].count
        return CacheOffsets(
            queries=upload([*queries, columns], torch.int32, self.device),
            starts=upload([*starts, 0], torch.int32, self.device),
            lengths=upload(lengths, torch.int32, self.device),
            longest_query=max(chunk.count for chunk in self.chunks),
            longest_key=max(lengths),
            before_queries=before_queries,
        )


@dataclass(frozen=True)
class ArenaPieces:
    """The arena's rows up to the end of the last sequence, cut at the bounds of every sequence."""

    sizes: list[int]  # rows of each piece
    sequences: list[int]  # the indices of the pieces that are sequences
    end: int  # the row after the last piece

    def split(self, cache: Tensor) -> list[Tensor]:
        """The keys or values (1, Hkv, length, D) of each sequence.

        One split for all: slicing the sequences one by one takes as long as attending over short ones.
        """
        pieces = cache[None, :, : self.end].split(self.sizes, dim=2)
        return [pieces[index] for index in self.sequences]


Kernel = Callable[[Tensor, Tensor, Tensor, RaggedBatch, float, ScoreRules], Tensor]
"""(T, H, D) queries, (Hkv, N, D) keys and values of the arena, the batch, the scale, the layer's rules →
(T, H, D).
"""


def one_by_one(
    query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, scale: float, rules: ScoreRules = PLAIN
) -> Tensor:
    """Attend sequence by sequence with torch's SDPA. Works on any device and under any rules; the fastest
    kernel on a CPU.
    """
    heads, kv_heads = query.shape[1], keys.shape[0]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    # For a single query, put the heads that share a key into rows: far faster on a CPU than repeating keys.
    grouped_queries = query.reshape(len(query), 1, kv_heads, heads // kv_heads, -1).unbind(0)
    grouped_out = out.view(len(query), 1, kv_heads, heads // kv_heads, -1)
    single_columns: list[int] = []
    single_outputs: list[Tensor] = []
    sequences = zip(batch.chunks_by_row, batch.pieces.split(keys), batch.pieces.split(values), strict=True)
    for chunk, key, value in sequences:
        if chunk.shared:
            rows = slice(chunk.shared_start, chunk.shared_start + chunk.shared)
            key = torch.cat([keys[None, :, rows], key], dim=2)
            value = torch.cat([values[None, :, rows], value], dim=2)
        columns = slice(chunk.column, chunk.column + chunk.count)
        if rules.applies(chunk.length) and (chunk.count > 1 or rules.explicit):
            part = attend_by_rules(query[columns].transpose(0, 1), key[0], value[0], scale, rules)
            out[columns] = part.transpose(0, 1)
            continue
        if chunk.count == 1:
            if rules.window is not None:
                key, value = key[:, :, -rules.window :], value[:, :, -rules.window :]
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
    query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, scale: float, rules: ScoreRules = PLAIN
) -> Tensor:
    """All sequences in one call of torch's built-in FlashAttention (CUDA, 16 bits), and in a second one for
    shared rows. Not measured.

    Because `seqused_k` is given, `cum_seq_k` only has to hold the start of each sequence, so the arena needs
    no pages.
    """
    assert not rules.explicit, "FlashAttention returns no scores"

    def attend(offsets: CacheOffsets) -> tuple[Tensor, Tensor]:
        out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            *_flash_arguments(query, keys, values, offsets),
            offsets.causal,
            False,  # do not return the debug mask
            scale=scale,
            window_size_left=None if rules.window is None else rules.window - 1,
            window_size_right=None if rules.window is None else 0,
            seqused_k=offsets.lengths,
        )
        return out, logsumexp

    return _attend_to_both(attend, batch, rules)


def flash_package(
    query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, scale: float, rules: ScoreRules = PLAIN
) -> Tensor:
    """The same calls in the flash-attn package, whose kernels are often newer. Not measured."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    assert not rules.explicit, "FlashAttention returns no scores"
    # Named only where needed: versions of the package differ in these arguments.
    window = {} if rules.window is None else {"window_size_left": rules.window - 1, "window_size_right": 0}

    def attend(offsets: CacheOffsets) -> tuple[Tensor, Tensor]:
        out, logsumexp, *_ = _flash_attn_varlen_forward(
            *_flash_arguments(query, keys, values, offsets),
            scale,
            causal=offsets.causal,
            seqused_k=offsets.lengths,
            **window,
        )
        return out, logsumexp

    return _attend_to_both(attend, batch, rules)


def _flash_arguments(
    query: Tensor, keys: Tensor, values: Tensor, offsets: CacheOffsets
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float]:
    """The first arguments of both FlashAttention functions; the last is the dropout."""
    sizes = (offsets.longest_query, offsets.longest_key)
    return query, keys.transpose(0, 1), values.transpose(0, 1), offsets.queries, offsets.starts, *sizes, 0.0


def _attend_to_both(
    attend: Callable[[CacheOffsets], tuple[Tensor, Tensor]], batch: RaggedBatch, rules: ScoreRules
) -> Tensor:
    """Attention to shared and own rows, joined exactly, as in cascade inference. (T, H, D)

        out = w out_own + (1 - w) out_shared      w = σ(l_own - l_shared)

    l is the logarithm of the sum of a query's exponentiated scores, (H, T). `attend` returns out and l.
    """
    own, own_logsumexp = attend(batch.offsets)
    if batch.shared is None:
        return own
    assert rules.window is None, "a window would have to count the shared rows"
    shared, shared_logsumexp = attend(batch.shared.offsets)
    weight = (own_logsumexp - shared_logsumexp).sigmoid()
    weight.masked_fill_(batch.shared.unshared, 1.0)  # there, l_shared is undefined
    return torch.addcmul(shared, own - shared, weight.T[..., None]).to(own.dtype)


# Kernels that read the whole batch from tensors, so that CUDA graphs can record them; the best one first.
RECORDABLE = (flash_package, flash)


def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    windows: bool = False,
    explicit: bool = False,
) -> Kernel:
    """The first kernel of RECORDABLE that runs here and agrees with `one_by_one`; else `one_by_one`.

    `windows`: whether some layers have a sliding window. `explicit`: whether some have soft caps or sinks.
    """
    if device.type == "cuda" and dtype.itemsize == 2 and not explicit:
        for kernel in RECORDABLE:
            if not rejection(kernel, device, dtype, heads, kv_heads, dim, windows=windows):
                return kernel
    return one_by_one


def rejection(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    windows: bool,
) -> str:
    """Why a kernel of RECORDABLE cannot be used here; "" if it agrees with `one_by_one` on random data."""
    mixed = [Chunk(0, 1, 300, 200), Chunk(1, 40, 0, 150), Chunk(41, 1, 160, 7)]
    single = [Chunk(0, 1, 300, 200), Chunk(1, 1, 160, 130)]
    for rules in [PLAIN, ScoreRules(window=37)] if windows else [PLAIN]:
        reason = _difference(kernel, [mixed, single], device, dtype, heads, kv_heads, dim, rules=rules)
        if reason:
            return reason
    return ""


def can_share_rows(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> bool:
    """Whether a kernel of RECORDABLE agrees with `one_by_one` where sequences share rows.

    `one_by_one` itself copies shared rows in every forward, so there it is better to copy them once.
    """
    first = Chunk(0, 1, 300, 250, shared=100, shared_start=10)
    mixed = [
        first,
        Chunk(1, 30, 110, 140, shared=100, shared_start=10),
        Chunk(31, 9, 460, 9),
        Chunk(40, 1, 0, 9),
    ]
    single = [first, Chunk(1, 1, 110, 140, shared=100, shared_start=10), Chunk(2, 1, 0, 9)]
    return kernel in RECORDABLE and not _difference(
        kernel, [mixed, single], device, dtype, heads, kv_heads, dim, rules=PLAIN
    )


def _difference(
    kernel: Kernel,
    batches: Sequence[list[Chunk]],
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    rules: ScoreRules,
) -> str:
    """In what a kernel differs from `one_by_one` on random data; "" if they agree."""
    # Not installed, not built for this device, another signature, or another result.
    try:
        keys, values = torch.randn(2, kv_heads, 512, dim, dtype=dtype, device=device)
        for chunks in batches:
            query = torch.randn(chunks[-1].column + 1, heads, dim, dtype=dtype, device=device)
            batch = RaggedBatch([], [], chunks, device, kernel)
            expected = one_by_one(query, keys, values, batch, dim**-0.5, rules)
            found = kernel(query, keys, values, batch, dim**-0.5, rules)
            torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    except (AssertionError, ImportError, AttributeError, RuntimeError, TypeError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""
