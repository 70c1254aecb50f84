"""The one attention function: training on packed rows, and cached decoding of ragged sequences.

It is registered with transformers' `AttentionInterface`, so Hugging Face models run unmodified. Which of the
two jobs it does is told by a keyword of the model's forward (`packed=` or `ragged=`), which transformers
passes on to every layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "prompt_r1"


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence in a packed forward: where they stand, and where its cache is."""

    column: int  # of the packed row, where the new tokens begin
    count: int  # new tokens
    start: int  # row of the arena where the sequence begins
    length: int  # tokens of the sequence in the arena after these, count included

    @cached_property
    def mask(self) -> Tensor:
        """Row i sees everything up to its own position: causal, aligned at the bottom right."""
        visible = torch.ones(self.count, self.length, dtype=torch.bool)
        return visible.tril(self.length - self.count)


@dataclass(frozen=True)
class Ragged:
    """A packed batch (1, T) of chunks, and the arena that they read and extend.

    The arena has one (Hkv, N, D) a layer: heads, rows, head dim. A sequence lies in consecutive rows of it.
    """

    keys: list[Tensor]
    values: list[Tensor]
    chunks: list[Chunk]
    device: torch.device
    kernel: "Kernel"
    rows: Tensor = field(init=False)  # (T,) the arena row of each new token
    positions: Tensor = field(init=False)  # (T,) its position in its sequence

    def __post_init__(self) -> None:
        positions = [p for chunk in self.chunks for p in range(chunk.length - chunk.count, chunk.length)]
        starts = [chunk.start for chunk in self.chunks for _ in range(chunk.count)]
        object.__setattr__(self, "positions", torch.tensor(positions, device=self.device))
        object.__setattr__(self, "rows", torch.tensor(starts, device=self.device) + self.positions)

    @cached_property
    def in_order(self) -> list[Chunk]:
        """The chunks by their place in the arena."""
        return sorted(self.chunks, key=lambda chunk: chunk.start)

    @cached_property
    def cuts(self) -> list[int]:
        """The arena's rows in pieces: before each chunk in order those that are not its, then its own."""
        ends = [0, *(chunk.start + chunk.length for chunk in self.in_order)]
        return [rows for chunk, end in zip(self.in_order, ends, strict=False)
                for rows in (chunk.start - end, chunk.length)]  # fmt: skip

    @cached_property
    def offsets(self) -> "Offsets":
        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        chunks = self.chunks
        return Offsets(
            queries=ints([*(chunk.column for chunk in chunks), chunks[-1].column + chunks[-1].count]),
            starts=ints([*(chunk.start for chunk in chunks), 0]),
            lengths=ints([chunk.length for chunk in chunks]),
            longest_query=max(chunk.count for chunk in chunks),
            longest_key=max(chunk.length for chunk in chunks),
        )


@dataclass(frozen=True)
class Offsets:
    """The chunks as FlashAttention reads them."""

    queries: Tensor  # (chunks + 1,) columns
    starts: Tensor  # (chunks + 1,) arena rows; the last entry is not read
    lengths: Tensor  # (chunks,)
    longest_query: int
    longest_key: int


Kernel = Callable[[Tensor, Tensor, Tensor, Ragged, float | None], Tensor]
"""(T, H, D) queries, (Hkv, N, D) keys and values of the arena, the batch, the scale → (T, H, D)."""


Packed = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(H, T, D) queries, (Hkv, T, D) keys and values of a packed row, the scale → (H, T, D)."""


def attend(
    module: nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, Hkv, T, D)
    value: Tensor,  # (B, Hkv, T, D)
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    ragged: Ragged | None = None,
    packed: Packed | None = None,
    sliding_window: int | None = None,
    **_: object,  # transformers hands every layer more keywords than any one function needs
) -> tuple[Tensor, None]:
    """Causal attention, (B, T, H, D). Without a keyword rows are right-padded: no token sees padding."""
    assert attention_mask is None, "rows are causal and right-padded: there is no mask"
    assert not dropout, "dropout would make the trained policy another one than the sampled"
    assert sliding_window is None, f"sliding-window attention ({sliding_window}) is not supported"
    if ragged is not None:
        layer = module.layer_idx
        assert isinstance(layer, int)
        keys, values = ragged.keys[layer], ragged.values[layer]
        keys.index_copy_(1, ragged.rows, key[0].to(keys.dtype))
        values.index_copy_(1, ragged.rows, value[0].to(values.dtype))
        rows = query[0].transpose(0, 1).to(keys.dtype)  # (T, H, D)
        return ragged.kernel(rows, keys, values, ragged, scaling)[None], None
    if packed is not None:
        # Norms in float32 have widened queries and keys beyond the dtype of the products.
        query, key = query.to(value.dtype), key.to(value.dtype)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return packed(query[0], key[0], value[0], scale).transpose(0, 1)[None], None
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def one_by_one(query: Tensor, keys: Tensor, values: Tensor, ragged: Ragged, scale: float | None) -> Tensor:
    """Each chunk attends to its own rows with torch's SDPA: any device, and the fastest on a CPU."""
    heads, kv_heads = query.shape[1], keys.shape[0]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    # The heads that share a key are laid out as rows: far faster on a CPU than repeating the keys.
    rows = query.reshape(len(query), 1, kv_heads, heads // kv_heads, -1).unbind(0)
    into = out.view(len(query), 1, kv_heads, heads // kv_heads, -1)
    singles: list[Tensor] = []
    # All pieces at once: views made one by one take as long as the attention of short sequences.
    cuts = [*ragged.cuts, keys.shape[1] - sum(ragged.cuts)]
    pieces = (cache[None].split(cuts, dim=2)[1::2] for cache in (keys, values))
    for chunk, k, v in zip(ragged.in_order, *pieces, strict=True):
        if chunk.count == 1:
            singles.append(F.scaled_dot_product_attention(rows[chunk.column], k, v, scale=scale))
            continue
        columns = slice(chunk.column, chunk.column + chunk.count)
        whole = chunk.count == chunk.length
        part = F.scaled_dot_product_attention(
            query[None, columns].transpose(1, 2), k, v, scale=scale, enable_gqa=heads != kv_heads,
            is_causal=whole, attn_mask=None if whole else chunk.mask.to(query.device),
        )  # fmt: skip
        out[columns] = part[0].transpose(0, 1)
    if singles:
        alone = [chunk.column for chunk in ragged.in_order if chunk.count == 1]
        into[alone] = torch.stack(singles)
    return out


def flash(query: Tensor, keys: Tensor, values: Tensor, ragged: Ragged, scale: float | None) -> Tensor:
    """All chunks in one call of the FlashAttention inside torch (CUDA, 16 bits). Not measured.

    With `seqused_k` given, `cum_seq_k` only says where each sequence begins: the arena needs no pages. A
    batch of single tokens must not be causal: that would switch off the split over long keys.
    """
    at, decoding = ragged.offsets, ragged.offsets.longest_query == 1
    return torch.ops.aten._flash_attention_forward(
        query, keys.transpose(0, 1), values.transpose(0, 1), at.queries, at.starts, at.longest_query,
        at.longest_key, 0.0, not decoding, False, scale=scale, seqused_k=at.lengths,
    )[0]  # fmt: skip


def flash_package(query: Tensor, keys: Tensor, values: Tensor, ragged: Ragged, scale: float | None) -> Tensor:
    """The same call through the flash-attn package, whose kernels are often newer. Not measured."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    at, decoding = ragged.offsets, ragged.offsets.longest_query == 1
    return _flash_attn_varlen_forward(
        query, keys.transpose(0, 1), values.transpose(0, 1), at.queries, at.starts, at.longest_query,
        at.longest_key, 0.0, query.shape[-1] ** -0.5 if scale is None else scale, causal=not decoding,
        seqused_k=at.lengths,
    )[0]  # fmt: skip


RECORDABLE = (flash_package, flash)  # kernels that read all of a batch from tensors, the better one first


def choose_kernel(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> Kernel:
    """The first of RECORDABLE that runs here and agrees with `one_by_one` on random data, else that one."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return one_by_one
    return next(
        (kernel for kernel in RECORDABLE if _agrees(kernel, device, dtype, heads, kv_heads, dim)), one_by_one
    )


def _agrees(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> bool:
    keys = torch.randn(kv_heads, 512, dim, dtype=dtype, device=device)
    values = torch.randn(kv_heads, 512, dim, dtype=dtype, device=device)
    mixed = [Chunk(0, 1, 300, 200), Chunk(1, 40, 0, 150), Chunk(41, 1, 160, 7)]
    single = [Chunk(0, 1, 300, 200), Chunk(1, 1, 160, 130)]
    try:
        for chunks in (mixed, single):
            query = torch.randn(chunks[-1].column + 1, heads, dim, dtype=dtype, device=device)
            ragged = Ragged([], [], chunks, device, kernel)
            expected = one_by_one(query, keys, values, ragged, None)
            torch.testing.assert_close(
                kernel(query, keys, values, ragged, None), expected, atol=2e-2, rtol=2e-2
            )
    except AssertionError:  # other numbers
        return False
    except (ImportError, AttributeError, RuntimeError, TypeError):  # not there, or not so called
        return False
    return True


def register() -> None:
    """Make `attn_implementation="prompt_r1"` known to transformers (idempotent).

    It has no entry in transformers' mask interface, so that models build no mask for it.
    """
    AttentionInterface.register(NAME, attend)
