"""Blocks, attention over them, and the memory that they take."""

import sys
from itertools import accumulate

import pytest
import torch

from prompt_r1.engine import kv_cache, paged_attention
from prompt_r1.engine.kv_cache import BlockPool, TokenSequence, allocate_pool, cache_bytes, can_use_flash
from prompt_r1.engine.paged_attention import PagedBatch, _flash, _sequence_by_sequence
from prompt_r1.errors import UsageError
from prompt_r1.model.attention import causal_mask
from tests.support import tiny
from tests.support.naive_attention import naive_attention
from tests.support.operations import RecordedOperations

LENGTHS = (37, 16, 5, 1)  # tokens of the sequences, the new ones included
NEW = (1, 7, 5, 1)


def filled_pool(block_size: int, layers: int = 1) -> tuple[BlockPool, list[TokenSequence]]:
    """A pool of random keys and values, and sequences whose blocks are interleaved."""
    torch.manual_seed(0)
    pool = tiny.pool(layers=layers, blocks=100, block_size=block_size)
    games = [TokenSequence(number) for number in range(len(LENGTHS))]
    for length in range(1, max(LENGTHS) + 1):
        for game, most in zip(games, LENGTHS, strict=True):
            pool.allocate(game, min(length, most))
    for cache in (pool.keys, pool.values):
        cache.normal_()
    return pool, games


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize("attention", [_sequence_by_sequence, _flash])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("only_single", [False, True])
def test_attention_over_blocks_equals_a_loop_over_queries(attention, block_size, window, only_single):
    pool, games = filled_pool(block_size)
    counts = [1 if only_single else count for count in NEW]
    for game, length, count in zip(games, LENGTHS, counts, strict=True):
        game.tokens = [0] * (length - count)
    batch = PagedBatch({game: [0] * count for game, count in zip(games, counts, strict=True)}, pool)
    kv_heads, dim = pool.keys.shape[3:]
    query, keys, values = torch.randn(sum(counts), 2 * kv_heads, dim), pool.keys[0], pool.values[0]
    found = attention(0, query, batch, 0.3, window)
    for game, length, end, count in zip(games, LENGTHS, accumulate(counts), counts, strict=True):
        key, value = (
            torch.stack(
                [rows[game.block_table[token // block_size], token % block_size] for token in range(length)],
                1,
            )
            for rows in (keys, values)
        )
        part = slice(end - count, end)
        expected = naive_attention(query[part].transpose(0, 1), key, value, 0.3, window or 1000)
        torch.testing.assert_close(found[part].transpose(0, 1), expected, atol=1e-5, rtol=1e-5)


def test_the_later_layers_of_a_step_cut_no_views_of_the_blocks():
    """They are cut once for all layers. In every layer, this took longer than attention to a short game."""
    pool, games = filled_pool(64, layers=3)
    for game, length in zip(games, LENGTHS, strict=True):
        game.tokens = [0] * (length - 1)
    batch = PagedBatch({game: [0] for game in games}, pool)
    kv_heads, dim = pool.keys.shape[3:]
    query, key = torch.randn(2 * kv_heads, len(games), dim), torch.randn(kv_heads, len(games), dim)
    counts = []
    for layer in range(3):
        with RecordedOperations() as operations:
            batch.attend(layer, query, key, key, 0.3, None)
        counts.append(len(operations.names))
    assert counts[0] >= counts[1] + len(games) and counts[1] == counts[2]


@pytest.mark.parametrize(("length", "shared"), [(4, 1), (7, 1), (8, 2), (3, 0)])
def test_a_fork_shares_full_blocks_and_copies_the_rest(length, shared):
    pool, games = filled_pool(4, layers=2)
    source, target, free = games[0], TokenSequence(9), len(pool.free)
    source.tokens = [*range(37)]
    pool.fork(source, target, length)
    assert target.tokens == source.tokens[:length]
    assert target.block_table[:shared] == source.block_table[:shared]
    assert len(target.block_table) == pool.blocks_for(length)
    assert free - len(pool.free) == len(target.block_table) - shared
    for token in range(length):
        mine, theirs = target.block_table[token // 4], source.block_table[token // 4]
        assert torch.equal(pool.keys[:, mine, token % 4], pool.keys[:, theirs, token % 4])
    pool.truncate(target, 0)
    assert len(pool.free) == free and pool.ref_counts[source.block_table[0]] == 1


@pytest.mark.parametrize(("length", "kept"), [(6, 4), (8, 8)])
def test_a_sequence_that_is_cut_writes_to_no_block_of_another(length, kept):
    """The cut at 6 tokens is inside a shared block of 4, to which the next tokens would be written."""
    pool, games = filled_pool(4)
    source, target = games[0], TokenSequence(9)
    source.tokens = [*range(37)]
    pool.fork(source, target, 12)
    pool.truncate(target, length)
    assert target.tokens == source.tokens[:kept]
    pool.allocate(target, 12)
    written = target.block_table[kept // 4 :]
    assert not set(written) & set(source.block_table)


def test_the_cache_takes_its_share_of_the_free_memory_and_no_more_than_the_games_fill(monkeypatch):
    policy = tiny.policy()
    block = 64 * 2 * policy.model.config.num_hidden_layers * 2 * policy.model.config.head_dim * 4
    monkeypatch.setattr(kv_cache, "memory_left", lambda device: 10 * block)
    assert allocate_pool(policy, max_tokens=64, max_sequences=100).count == 3
    assert allocate_pool(policy, max_tokens=64, max_sequences=2).count == 2
    with pytest.raises(UsageError, match=r"KV cache of 0 tokens.* 640.*--max-tokens"):
        allocate_pool(policy, max_tokens=640, max_sequences=100)


def test_a_cache_on_a_gpu_takes_nine_tenths_of_the_free_memory_but_leaves_three_gigabytes():
    assert cache_bytes("cuda", 60 * 10**9) == 54 * 10**9
    assert cache_bytes("cuda", 10 * 10**9) == 7 * 10**9
    assert cache_bytes("cuda", 2 * 10**9) == 0
    assert cache_bytes("cuda", 60 * 10**9, share=0.3) == 18 * 10**9
    assert cache_bytes("cuda", 4 * 10**9, share=0.3) == 10**9
    assert cache_bytes("cpu", 10 * 10**9) == 3 * 10**9


# The capability of a GPU, numbers of a head, bits, and whether the kernel runs.
GPUS = [
    ((8, 0), 128, 16, True),  # A100
    ((9, 0), 256, 16, True),  # H100
    ((12, 0), 64, 16, True),
    ((7, 5), 128, 16, False),  # T4: "FlashAttention only supports Ampere GPUs or newer"
    ((8, 0), 264, 16, False),
    ((8, 0), 100, 16, False),
    ((8, 0), 128, 32, False),
]


@pytest.mark.parametrize(("capability", "head_dim", "bits", "runs"), GPUS)
def test_flash_attention_is_used_where_its_kernel_runs(
    capability, head_dim, bits, runs, monkeypatch, recwarn
):
    """On a T4 a right model was refused as unsupported, because the kernel raised in its check."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dtype = {16: torch.bfloat16, 32: torch.float32}[bits]
    cuda = torch.device("cuda")
    assert can_use_flash(cuda, dtype, head_dim=head_dim) is runs
    # In 32 bits the kernel never runs, so there is nothing to tell.
    assert len(recwarn) == (not runs and bits == 16)


def test_flash_attention_is_not_used_on_cpus_or_amd(monkeypatch, recwarn):
    assert not can_use_flash(torch.device("cpu"), torch.bfloat16, head_dim=128)
    assert not recwarn
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))  # as an MI300 says
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.warns(UserWarning, match="game by game"):
        assert not can_use_flash(torch.device("cuda"), torch.bfloat16, head_dim=128)


def test_the_layers_of_a_step_share_their_masks(monkeypatch):
    """A bug would only cost time: each layer would make the mask of every prompt again."""
    shapes: list[tuple[object, ...]] = []

    def noted_mask(*shape):
        shapes.append(shape)
        return causal_mask(*shape)

    monkeypatch.setattr(paged_attention, "causal_mask", noted_mask)
    pool, games = filled_pool(64, layers=3)
    for game, length, count in zip(games, LENGTHS, NEW, strict=True):
        game.tokens = [0] * (length - count)
    batch = PagedBatch({game: [0] * count for game, count in zip(games, NEW, strict=True)}, pool)
    kv_heads, dim = pool.keys.shape[3:]
    query, key = torch.randn(2 * kv_heads, sum(NEW), dim), torch.randn(kv_heads, sum(NEW), dim)
    for layer in range(3):
        batch.attend(layer, query, key, key, 0.3, None)
    assert [shape[:2] for shape in shapes] == [(7, 16)], "the only prompt that continues cached tokens"


def test_no_key_is_copied_for_each_query_head_of_a_single_new_token(monkeypatch):
    """On a CPU, such copies of a whole game take far longer than the attention itself."""
    heads: list[tuple[int, int]] = []  # of the queries and keys of each call
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def noted(query, key, value, *rest, **options):
        heads.append((query.shape[1], key.shape[1]))
        return sdpa(query, key, value, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    pool, games = filled_pool(64)
    for game, length in zip(games, LENGTHS, strict=True):
        game.tokens = [0] * (length - 1)
    batch = PagedBatch({game: [0] for game in games}, pool)
    kv_heads, dim = pool.keys.shape[3:]
    batch.attend(0, torch.randn(2 * kv_heads, 4, dim), *torch.randn(2, kv_heads, 4, dim), 0.3, None)
    assert heads == [(kv_heads, kv_heads)] * len(games)


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize(("counts", "window", "sides"), [
    ((1, 1, 1, 1), None, (-1, -1)),
    ((1, 1, 1, 1), 6, (5, 0)),
    (NEW, None, (-1, 0)),
])  # fmt: skip
def test_flash_attention_of_single_tokens_has_no_mask_unless_there_is_a_window(
    counts, window, sides, monkeypatch
):
    """A single query is the last token and sees all keys. Without a mask the kernel is faster."""
    kernel = sys.modules["torch.nn.attention.varlen"]
    plain, found = kernel.varlen_attn, []

    def noted(*tensors, window_size, **options):
        found.append(window_size)
        return plain(*tensors, window_size=window_size, **options)

    monkeypatch.setattr(kernel, "varlen_attn", noted)
    pool, games = filled_pool(64)
    for game, length, count in zip(games, LENGTHS, counts, strict=True):
        game.tokens = [0] * (length - count)
    batch = PagedBatch({game: [0] * count for game, count in zip(games, counts, strict=True)}, pool)
    kv_heads, dim = pool.keys.shape[3:]
    _flash(0, torch.randn(sum(counts), 2 * kv_heads, dim), batch, 0.3, window)
    assert found == [sides]
