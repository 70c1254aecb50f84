"""Compare rows and cache with the model's own forward, once when a model is loaded.

The oracle is the model's own forward with eager attention on the same weights, game by game, without a cache.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prompt_r1.engine.kv_cache import PAGE_SIZE, CachedGame, PagedBatch, PagePool
from prompt_r1.errors import first_line
from prompt_r1.model import attention
from prompt_r1.model.attention import UnsupportedAttention
from prompt_r1.model.loading import unsupported
from prompt_r1.model.lora import adapters_of
from prompt_r1.model.packing import pack
from prompt_r1.model.policy import Policy
from prompt_r1.types import Question, Trajectory

OPENING = 5  # tokens that both games begin with
WINDOW = 4  # tokens of sliding windows during the check: the games are shorter than the model's own
LENGTHS = (18, 13)  # tokens of the two games
CACHED = (0, 9, 10)  # tokens of a game before the forwards of a prompt, a single token, and the rest
# The largest difference of one log-probability in float32, and the largest mean difference in 16 bits. Right
# models with large random weights differ by up to 4e-5, and in bfloat16 by 0.001 to 0.054 in the mean.
FLOAT32_LIMIT = 1e-3
MEAN_LIMIT_16_BITS = 0.2


@torch.no_grad()
def check_model(policy: Policy) -> float:
    """Raise UsageError unless packed games and cached turns have the model's own log-probabilities.

    Returns the largest difference in nats.
    """
    model = policy.model
    text = model.config.get_text_config()
    padding = getattr(text, "pad_token_id", None)  # models may treat it apart
    vocabulary = [token for token in range(text.vocab_size) if token != padding]
    rng = random.Random(0)
    opening = rng.choices(vocabulary, k=OPENING)
    games: list[Trajectory] = []
    for length in LENGTHS:
        tokens = opening + rng.choices(vocabulary, k=length - OPENING)
        sampled = [position >= OPENING for position in range(length)]
        games.append(Trajectory(Question("check", "check", "", ()), tokens, sampled))
    with _short_windows(model):
        try:
            expected = torch.cat([_logprobs(policy, game.tokens, _own_logits) for game in games])
            computed = {
                "turns over the KV cache": torch.cat(
                    [_logprobs(policy, game.tokens, _cached_logits) for game in games]
                ),
                "games packed into one row": policy(pack([games], policy.device)).logprobs.cpu(),
            }
        except torch.OutOfMemoryError:
            raise
        except UnsupportedAttention as error:
            raise unsupported(model.config, str(error)) from None
        except Exception as error:  # of a model that we know nothing about
            cause = f"{type(error).__name__}: {first_line(error)[:200]}"
            adapted = "with adapters " if adapters_of(model) else ""
            raise unsupported(model.config, f"its forward {adapted}fails ({cause})") from None
    in_16_bits, largest = policy.compute.itemsize < 4, 0.0
    for what, found in computed.items():
        difference = (found - expected).abs()
        worst = float(difference.max())
        right = difference.mean() <= MEAN_LIMIT_16_BITS if in_16_bits else worst <= FLOAT32_LIMIT
        if not right:  # also when it is NaN
            cause = f"the log-probabilities of {what} differ by up to {worst:.2g} nats from its own"
            raise unsupported(model.config, cause)
        largest = max(largest, worst)
    return largest


def _logprobs(policy: Policy, game: list[int], logits_of: Callable[[Policy, list[int]], Tensor]) -> Tensor:
    """The log-probabilities of a game's tokens after the opening, from the logits (T, V) of its tokens."""
    logits = logits_of(policy, game)[OPENING - 1 : -1].float() / policy.temperature
    targets = torch.tensor(game[OPENING:], device=logits.device)
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].cpu()


def _own_logits(policy: Policy, game: list[int]) -> Tensor:
    """The oracle: the model's own forward."""
    row = torch.tensor([game], device=policy.device)
    with (
        eager_attention(policy.model),
        torch.autocast(row.device.type, policy.compute, enabled=policy.compute.itemsize < 4),
    ):
        logits: Tensor = policy.model(input_ids=row, use_cache=False).logits[0]
    return logits


def _cached_logits(policy: Policy, game: list[int]) -> Tensor:
    """Several forwards over the KV cache."""
    page_size = PAGE_SIZE["cuda"] if policy.device.type == "cuda" else 8
    pool = PagePool(policy, pages=3, page_size=page_size)
    cached, hidden = CachedGame(0), list[Tensor]()
    pool.extend(cached, len(game))
    for begin, end in pairwise([*CACHED, len(game)]):
        cached.tokens = game[:end]
        hidden.append(policy.hidden_states(PagedBatch({cached: end - begin}, pool)))
    return policy.logits(torch.cat(hidden))


def _short_windows(model: PreTrainedModel) -> ExitStack:
    """Shorten every sliding window, so that two short games show what it does, until the stack is closed."""
    restore = ExitStack()
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["sliding_attention"]
    parts: list[Any] = [model.config, model.config.get_text_config(), *model.modules()]
    for part in parts:
        window = getattr(part, "sliding_window", None)
        if isinstance(window, int):
            if window < 1 and "sliding_attention" in kinds:  # models take it for none, or mask everything
                raise unsupported(model.config, f"its sliding window is {window}: give null or 1 and more")
            restore.callback(setattr, part, "sliding_window", window)
            part.sliding_window = WINDOW
    return restore


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute its attention as transformers does."""
    model.set_attn_implementation("eager")
    if model.config._attn_implementation != "eager":
        raise UnsupportedAttention("its attention cannot be replaced")
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)
