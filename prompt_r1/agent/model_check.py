"""Compare rows and cache with the model's own forward, once when a model is loaded.

The oracle is the unmodified model with transformers' eager attention, on the same weights, one game at a time
and without a cache.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from prompt_r1.agent import attention
from prompt_r1.agent.attention import UnsupportedAttention
from prompt_r1.agent.kv_cache import PAGE_SIZE, CachedGame, Chunk, PagedBatch, PagePool
from prompt_r1.agent.lora import add_lora
from prompt_r1.agent.packing import pack
from prompt_r1.agent.policy import Policy
from prompt_r1.errors import UsageError, first_line
from prompt_r1.types import Completion, Question, Trajectory

OPENING = 5  # tokens that both games begin with
WINDOW = 4  # tokens of sliding windows during the check: the games are shorter than the model's own
LENGTHS = (18, 13)  # tokens of the two games
# Cached tokens of each game before and after the forwards of a prompt, a single token, and a reply.
CACHED = ((0, 0), (9, 8), (10, 9), LENGTHS)
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
    games = [_game(opening, rng.choices(vocabulary, k=length - OPENING)) for length in LENGTHS]
    with _short_windows(model):
        try:
            expected = torch.cat([_own_logprobs(policy, game.tokens) for game in games])
            computed = {
                "turns over the KV cache": _cached_logprobs(policy, [game.tokens for game in games]),
                "games packed into one row": policy(pack([games], policy.device)).logprobs.cpu(),
            }
        except torch.OutOfMemoryError:
            raise
        except UnsupportedAttention as error:
            raise unsupported(model.config, str(error)) from None
        except Exception as error:  # of a model that we know nothing about
            cause = f"{type(error).__name__}: {first_line(error)[:200]}"
            raise unsupported(model.config, f"its forward fails ({cause})") from None
    largest = 0.0
    for what, found in computed.items():
        difference = (found - expected).abs()
        largest = max(largest, float(difference.max()))
        in_16_bits = policy.compute.itemsize < 4
        right = difference.mean() <= MEAN_LIMIT_16_BITS if in_16_bits else difference.max() <= FLOAT32_LIMIT
        if not right:  # also when it is NaN
            raise unsupported(
                model.config,
                f"the log-probabilities of {what} differ by up to {difference.max():.2g} nats from its own",
            )
    return largest


def add_checked_lora(policy: Policy, *, rank: int, alpha: float, seed: int) -> list[nn.Parameter]:
    """Add adapters to a policy's model; returns the parameters to train.

    Raises UsageError for a model that adapters do not fit, such as one that reads the weights of a linear
    layer itself.
    """
    trainable = add_lora(policy.model, rank=rank, alpha=alpha, seed=seed)
    try:
        check_model(policy)
    except UsageError as error:
        raise UsageError(f"adapters of rank {rank}: {error}") from None
    return trainable


def unsupported(config: PretrainedConfig, cause: str) -> UsageError:
    """The error for a model that we would compute wrongly; `cause` completes the sentence."""
    return UsageError(f"models of type {config.model_type!r} are not supported: {cause}")


def _game(opening: list[int], sampled: list[int]) -> Trajectory:
    game = Trajectory(Question("check", "check", "", ()))
    game.add_context(opening)
    game.add_sampled(Completion(sampled, [0.0] * len(sampled), True))
    return game


def _logprobs(logits: Tensor, game: list[int], temperature: float) -> Tensor:
    """The log-probabilities after the opening, from the logits (T, V) of a game."""
    targets = torch.tensor(game[OPENING:], device=logits.device)
    log_p = torch.log_softmax(logits[OPENING - 1 : -1].float() / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0].cpu()


def _own_logprobs(policy: Policy, game: list[int]) -> Tensor:
    """The oracle: the model's own forward."""
    row = torch.tensor([game], device=policy.device)
    with (
        eager_attention(policy.model),
        torch.autocast(row.device.type, policy.compute, enabled=policy.compute.itemsize < 4),
    ):
        logits = policy.model(input_ids=row, use_cache=False).logits[0]
    return _logprobs(logits, game, policy.temperature)


def _cached_logprobs(policy: Policy, games: list[list[int]]) -> Tensor:
    """Several forwards over the KV cache."""
    pool = PagePool(
        policy, pages=3 * len(games), page_size=PAGE_SIZE["cuda"] if policy.device.type == "cuda" else 8
    )
    cached = [CachedGame(number) for number in range(len(games))]
    hidden: list[list[Tensor]] = [[] for _ in games]
    for begins, ends in pairwise(CACHED):
        row: list[int] = []
        chunks: list[Chunk] = []
        for game, tokens, begin, end in zip(cached, games, begins, ends, strict=True):
            pool.extend(game, end)
            chunks.append(Chunk(len(row), end - begin, end, game.pages))
            row += tokens[begin:end]
        batch = PagedBatch.of(chunks, pool)
        packed = torch.tensor([row], device=policy.device)
        states = policy.hidden_states(packed, position_ids=batch.positions[None], paged=batch.attend)[0]
        for of_game, part in zip(hidden, states.split([chunk.count for chunk in chunks]), strict=True):
            of_game.append(part)
    found = [policy.logits(torch.cat(parts)) for parts in hidden]
    return torch.cat(
        [_logprobs(logits, game, policy.temperature) for logits, game in zip(found, games, strict=True)]
    )


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shorten every sliding window, so that two short games show what it does."""
    kept: list[tuple[Any, int]] = []
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["sliding_attention"]
    parts: list[Any] = [model.config, model.config.get_text_config(), *model.modules()]
    for part in parts:
        window = getattr(part, "sliding_window", None)
        if isinstance(window, int):
            if window < 1 and "sliding_attention" in kinds:  # models take it for none, or mask everything
                raise unsupported(model.config, f"its sliding window is {window}: give null or 1 and more")
            kept.append((part, window))
            part.sliding_window = WINDOW
    try:
        yield
    finally:
        for part, window in reversed(kept):
            part.sliding_window = window


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
