"""The KV cache in pages, as in vLLM.

    pool          pages of S tokens, for all layers
    block table   the pages of a sequence: its token t is in row t % S of page number t // S
    users         how many sequences hold each page

The games of a group begin with the same opening. Its full pages are held by all of them, and the rest of it
is copied into a page of their own. On a CPU, a page usually holds a whole game, so that attention reads
views; on GPUs a page has 256 tokens, the size that FlashAttention wants.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from prompt_r1.agent.attention import attention_shape
from prompt_r1.agent.policy import Policy
from prompt_r1.errors import UsageError

# Tokens of a page. On a CPU a page holds a whole game, which attention reads as a view: the keys and values
# of a sequence over several pages are copied in every step and layer, which takes longer than the attention.
PAGE_SIZE = {"cpu": 4096, "cuda": 256}
# Share of the free memory that the cache takes if no size is given.
MEMORY_SHARE = {"cpu": 0.3, "cuda": 0.6}


@dataclass(eq=False)
class Game:
    """A game in the engine: the handle that its calls of `generate` pass, and its cached sequence."""

    number: int  # in the order of their beginnings: older games are served first
    opening: tuple[int, ...] = ()  # the tokens of its first call, which the games of a group have in common
    opening_state: Tensor | None = None  # (hidden,) the last hidden state of the opening, once computed
    tokens: list[int] = field(default_factory=list)  # those whose keys and values are cached
    pages: list[int] = field(default_factory=list)  # block table


class PagePool:
    """Keys and values of all layers, in pages, in the compute dtype, on the policy's device.

    One more page, `spare`, belongs to no sequence: the idle rows of a CUDA graph write to it.
    """

    def __init__(self, policy: Policy, *, pages: int, page_size: int) -> None:
        shape = attention_shape(policy.model.config)
        on_cpu = policy.device.type == "cpu"
        # A CPU reads a head's rows of one sequence fastest if they are contiguous.
        middle = (shape.kv_heads, page_size) if on_cpu else (page_size, shape.kv_heads)
        size = (shape.layers, pages + 1, *middle, shape.dim)
        pools = [torch.empty(size, dtype=policy.compute, device=policy.device) for _ in range(2)]
        self.keys, self.values = (
            pool.transpose(2, 3) if on_cpu else pool for pool in pools
        )  # (L, P, S, Hkv, D)
        self.page_size = page_size
        self.count = pages
        self.spare = pages
        self.free = list(range(pages))
        self.users = [0] * pages

    def pages_for(self, tokens: int) -> int:
        """The number of pages of so many tokens."""
        return -(-tokens // self.page_size)

    def extend(self, game: Game, tokens: int) -> None:
        """Give a game pages for so many tokens. There must be enough free ones."""
        while len(game.pages) < self.pages_for(tokens):
            page = self.free.pop()
            self.users[page] = 1
            game.pages.append(page)

    def truncate(self, game: Game, length: int) -> None:
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

    def fork(self, source: Game, target: Game, length: int) -> None:
        """Let a game without a sequence begin with the first tokens of another one's.

        Full pages are shared; the rest is copied to a new page, which must be free.
        """
        full = length // self.page_size
        target.tokens, target.pages = source.tokens[:length], source.pages[:full]
        for page in target.pages:
            self.users[page] += 1
        self.extend(target, length)
        if rows := length % self.page_size:
            for pool in (self.keys, self.values):
                pool[:, target.pages[full], :rows] = pool[:, source.pages[full], :rows]


def free_memory(device: torch.device) -> int:
    """The bytes that this process can still allocate on a device, its own peak so far kept free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    try:  # proc(5): counts what the page cache can give back
        meminfo = Path("/proc/meminfo").read_text()
        return 1024 * int(meminfo.split("MemAvailable:")[1].split()[0])
    except (OSError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def allocate_pool(policy: Policy, *, tokens: int, longest: int, games: int, page_size: int = 0) -> PagePool:
    """A pool for so many tokens (0: what free memory allows, but no more than these games can fill).

    `longest`: tokens of the longest game. `page_size` 0: the default of the device. Raises UsageError if the
    memory does not hold one game.
    """
    kind = policy.device.type
    page_size = page_size or (min(longest, PAGE_SIZE["cpu"]) if kind == "cpu" else PAGE_SIZE["cuda"])
    pages_of_game = -(-longest // page_size)
    page_bytes = page_size * attention_shape(policy.model.config).cache_entries * policy.compute.itemsize
    affordable = int(MEMORY_SHARE[kind] * free_memory(policy.device)) // page_bytes
    # A game never takes more pages than `longest` needs, so a cache that holds one game always holds it.
    pages = max(tokens // page_size, pages_of_game) if tokens else min(affordable, games * pages_of_game)
    if pages < pages_of_game:
        raise UsageError(
            f"the free memory holds a KV cache of {pages * page_size} tokens, but a game may have {longest}: "
            "lower --max-tokens, or --tokens-per-batch if this is a training"
        )
    try:
        return PagePool(policy, pages=pages, page_size=page_size)
    except RuntimeError:
        raise UsageError(
            f"not enough memory for a KV cache of {pages * page_size:,} tokens: lower --max-tokens"
        ) from None
