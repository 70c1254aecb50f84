"""The KV cache in pages, as in vLLM, and attention over it.

    pool          pages of S tokens, for all layers
    block table   the pages of a sequence: its token t is in row t % S of page number t // S
    users         how many sequences hold each page

Of the longest prefix that a new game has in common with a cached one, full pages are held by both, and the
rest is copied into a page of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from prompt_r1.errors import UsageError
from prompt_r1.model.attention import Window, attend_in_window, causal_mask
from prompt_r1.model.loading import free_memory
from prompt_r1.model.policy import Policy

# Tokens of a page. On a CPU a page holds a whole game, which attention reads as a view: the keys and values
# of a sequence over several pages are copied in every step and layer, which takes longer than the attention.
# On GPUs it has the size that FlashAttention wants.
PAGE_SIZE = {"cpu": 4096, "cuda": 256}
# Share of the free memory that the cache takes if no size is given.
MEMORY_SHARE = {"cpu": 0.3, "cuda": 0.6}


@dataclass(eq=False)
class CachedGame:
    """A game in the engine: the handle that its calls of `generate` pass, and its cached sequence."""

    number: int  # in the order of their beginnings: older games are served first
    tokens: list[int] = field(default_factory=list)  # those whose keys and values are in the pages
    pages: list[int] = field(default_factory=list)  # block table


class PagePool:
    """Keys and values of all layers, in pages, in the compute dtype, on the policy's device.

    One more page, `spare`, belongs to no sequence: the idle rows of a CUDA graph write to it.
    """

    def __init__(self, policy: Policy, *, pages: int, page_size: int) -> None:
        layers, kv_heads, dim = shape_of_a_token(policy.model.config)
        on_cpu = policy.device.type == "cpu"
        # A CPU reads a head's rows of one sequence fastest if they are contiguous.
        middle = (kv_heads, page_size) if on_cpu else (page_size, kv_heads)
        size = (2, layers, pages + 1, *middle, dim)
        cache = torch.empty(size, dtype=policy.compute, device=policy.device)
        self.cache = cache.transpose(3, 4) if on_cpu else cache  # (2, L, P, S, Hkv, D)
        self.keys, self.values = self.cache
        self.device = policy.device
        self.flash = policy.device.type == "cuda" and policy.compute.itemsize == 2  # what FlashAttention has
        self.page_size = page_size
        self.count = pages
        self.spare = pages
        self.free = list(range(pages))
        self.users = [0] * pages

    def pages_for(self, tokens: int) -> int:
        """The number of pages of so many tokens."""
        return -(-tokens // self.page_size)

    def extend(self, game: CachedGame, tokens: int) -> None:
        """Give a game pages for so many tokens. There must be enough free ones."""
        while len(game.pages) < self.pages_for(tokens):
            page = self.free.pop()
            self.users[page] = 1
            game.pages.append(page)

    def truncate(self, game: CachedGame, length: int) -> None:
        """Keep at most the first tokens of a sequence, in pages to which it may append.

        A page that others hold is not written to: what is cut inside of one is computed again.
        """
        if length % self.page_size and self.users[game.pages[length // self.page_size]] > 1:
            length -= length % self.page_size
        del game.tokens[length:]
        for page in game.pages[self.pages_for(length) :]:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)
        del game.pages[self.pages_for(length) :]

    def fork(self, source: CachedGame, target: CachedGame, length: int) -> None:
        """Let a game without a sequence begin with the first tokens of another one's.

        Full pages are shared; the rest is copied to a new page, which must be free.
        """
        full = length // self.page_size
        target.tokens, target.pages = source.tokens[:length], source.pages[:full]
        for page in target.pages:
            self.users[page] += 1
        self.extend(target, length)
        if rows := length % self.page_size:
            self.cache[:, :, target.pages[full], :rows] = self.cache[:, :, source.pages[full], :rows]


def shape_of_a_token(config: PretrainedConfig) -> torch.Size:
    """The shape (L, Hkv, D) of the keys of one token, and of its values."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return torch.Size([text.num_hidden_layers, kv_heads, head_dim])


def allocate_pool(policy: Policy, *, tokens: int, longest: int, games: int, page_size: int = 0) -> PagePool:
    """A pool for so many tokens (0: what free memory allows, but no more than these games can fill).

    `longest`: tokens of the longest game. `page_size` 0: the default of the device. Raises UsageError if the
    memory does not hold one game.
    """
    kind = policy.device.type
    page_size = page_size or (min(longest, PAGE_SIZE["cpu"]) if kind == "cpu" else PAGE_SIZE["cuda"])
    pages_of_game = -(-longest // page_size)
    page_bytes = 2 * page_size * shape_of_a_token(policy.model.config).numel() * policy.compute.itemsize
    affordable = int(MEMORY_SHARE[kind] * free_memory(policy.device)) // page_bytes
    # A game never takes more pages than `longest` needs, so a cache that holds one game always holds it.
    pages = max(tokens // page_size, pages_of_game) if tokens else min(affordable, games * pages_of_game)
    if pages < pages_of_game:
        raise UsageError(
            f"the free memory holds a KV cache of {pages * page_size} tokens, but a game may have {longest}: "
            "lower --max-tokens, or --tokens-per-batch if this is a training"
        )
    return PagePool(policy, pages=pages, page_size=page_size)


# Attention of new tokens over the pages


def upload(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers, or rows of numbers, to the device. The host does not wait for the copy."""
    pinned = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


class PagedBatch:
    """A packed row of T new tokens of B games, and the pages that hold their sequences."""

    def __init__(self, games: Mapping[CachedGame, int], pool: PagePool, *, longest: int = 0) -> None:
        """`games`: how many of the last tokens of each are new.

        `longest`: tokens of a game that the block tables have room for (0: of the longest of these).
        """
        self.games, self.pool = games, pool
        self.mask = cache(causal_mask)  # made once for all layers
        new: list[tuple[int, ...]] = []
        starts, lengths = [0], [len(game.tokens) for game in games]
        for game, count in games.items():
            for position in range(len(game.tokens) - count, len(game.tokens)):
                page, row = divmod(position, pool.page_size)
                new.append((game.tokens[position], position, game.pages[page], row))
            starts.append(len(new))
        self.most_new = max(games.values())  # tokens of one game
        self.longest = max(longest, *lengths)
        spare = [pool.spare] * pool.pages_for(self.longest)
        tables = [[*game.pages, *spare][: len(spare)] for game in games]
        # (T,) each: the new tokens, their positions in their games, their pages, and their rows in the pages.
        columns = upload([*zip(*new, strict=True)], torch.int64, pool.device)
        self.tokens, self.positions, self.pages, self.rows = columns
        self.starts = upload(starts, torch.int32, pool.device)  # (B + 1,) first column of each game, then T
        self.lengths = upload(lengths, torch.int32, pool.device)  # (B,) the new tokens included
        self.block_tables = upload(tables, torch.int32, pool.device)  # (B, pages of the longest)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a CUDA graph reads."""
        row = self.tokens, self.positions, self.pages, self.rows
        return *row, self.starts, self.lengths, self.block_tables

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """Write the new keys and values (Hkv, T, D) of a layer to their pages, and attend to the sequences.

        (H, T, D) queries → (T, H, D).
        """
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys[self.pages, self.rows] = key.transpose(0, 1).to(keys.dtype)
        values[self.pages, self.rows] = value.transpose(0, 1).to(values.dtype)
        query = query.transpose(0, 1).to(keys.dtype)
        attention = _flash if self.pool.flash else _sequence_by_sequence
        return attention(layer, query, self, scale, window)

    @cached_property
    def first_pages(self) -> list[list[tuple[Tensor, ...]]]:
        """Of each game, its keys and values (Hkv, L, D) in its first page, for each layer."""
        views = [self.pool.cache[:, :, game.pages[0], : len(game.tokens)] for game in self.games]
        return [[*zip(*view.transpose(2, 3), strict=True)] for view in views]


def _flash(layer: int, query: Tensor, batch: PagedBatch, scale: float, window: Window) -> Tensor:
    """All sequences in one call of FlashAttention. With one split, a sequence's result does not depend on
    the other sequences of the batch.
    """
    from torch.nn.attention.varlen import varlen_attn  # importing it compiles where torch has no CUDA

    # The last query sees all keys, so a single query needs no causal mask, which is slower.
    causal = batch.most_new > 1 or window is not None
    out = varlen_attn(
        query,
        batch.pool.keys[layer],
        batch.pool.values[layer],
        batch.starts,
        batch.starts,  # must be given; the lengths and the block table are read instead
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
    """One call of torch's SDPA for each game, on any device. (T, H, D) → (T, H, D)."""
    pool, mask = batch.pool, batch.mask
    # For a single query, the heads that share a key are rows: far faster on a CPU than repeating keys.
    grouped = query.unflatten(1, (pool.keys.shape[3], -1)).split([*batch.games.values()])
    outs = []
    for game, first_page, queries in zip(batch.games, batch.first_pages, grouped, strict=True):
        length = len(game.tokens)
        if length <= pool.page_size:
            key, value = first_page[layer]  # (Hkv, L, D)
        else:  # copies
            pages = game.pages[: pool.pages_for(length)]
            key, value = pool.cache[:, layer, pages].flatten(1, 2)[:, :length].transpose(1, 2)
        if len(queries) == 1:
            if window is not None:
                key, value = key[:, -window:], value[:, -window:]
            outs.append(F.scaled_dot_product_attention(queries, key[None], value[None], scale=scale))
        else:
            part = attend_in_window(queries.flatten(1, 2).transpose(0, 1), key, value, scale, window, mask)
            outs.append(part.transpose(0, 1).view(queries.shape))
    return torch.cat(outs).flatten(1, 2)
