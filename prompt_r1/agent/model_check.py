"""Compare rows and cache with the model's own forward.

The oracle is the unmodified model with transformers' eager attention, on the same weights, one game at a time
and without a cache. On one CPU core it takes 0.04 s for the mini agent, and 4 s for a random model of 0.6 B
parameters in float32.
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
from prompt_r1.agent.decode_kernels import Chunk, ragged_batch
from prompt_r1.agent.kv_cache import Arena, free_on
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


def check_model(policy: Policy) -> float:
    """Raise UsageError unless packed games and cached turns have the model's own log-probabilities.

    Returns the largest difference in nats.

    A policy that computes in 16 bits is also checked in float32, where small errors are seen, if the memory
    holds its weights in float32.
    """
    with _short_windows(policy.model):
        found = _check(policy)
        weights = [weight for weight in policy.parameters() if weight.dtype.itemsize < 4]
        if policy.compute.itemsize < 4 and sum(4 * w.numel() for w in weights) <= free_on(policy.device):
            with _in_float32(policy, weights):
                _check(policy)
        return found


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


@contextmanager
def _in_float32(policy: Policy, weights: list[nn.Parameter]) -> Iterator[None]:
    """Let a policy compute in float32; `weights` are those with 16 bits, which float32 holds exactly."""
    compute, dtypes = policy.compute, [weight.dtype for weight in weights]
    policy.compute = torch.float32
    for weight in weights:
        weight.data = weight.data.float()
    try:
        yield
    finally:
        policy.compute = compute
        for weight, dtype in zip(weights, dtypes, strict=True):
            weight.data = weight.data.to(dtype)


def _check(policy: Policy) -> float:
    model = policy.model
    text = model.config.get_text_config()
    games = _random_games(text.vocab_size, padding=getattr(text, "pad_token_id", None))
    with _refusing(model.config, "its own forward fails"):
        expected = _own_logprobs(policy, games)
    with _refusing(model.config, "its layers do not take our rows"):
        cached = _cached_logprobs(policy, games)
        packed = _packed_logprobs(policy, games)
    return max(
        _compare(policy, "games packed into one row", packed, expected),
        _compare(policy, "turns over the KV cache", cached, expected),
    )


@contextmanager
def _refusing(config: PretrainedConfig, what: str) -> Iterator[None]:
    """Refuse a model whose forward fails in any way: we know nothing about it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except UnsupportedAttention as error:
        raise unsupported(config, str(error)) from None
    except Exception as error:
        cause = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise unsupported(config, f"{what} ({cause})") from None


def unsupported(config: PretrainedConfig, cause: str) -> UsageError:
    """The error for a model that we would compute wrongly; `cause` completes the sentence."""
    return UsageError(f"models of type {config.model_type!r} are not supported: {cause}")


def _random_games(vocabulary: int, *, padding: int | None) -> list[list[int]]:
    """Two games with a shared opening and different lengths. No padding: models may treat it apart."""
    rng = random.Random(0)
    drawn = [token for token in rng.choices(range(vocabulary), k=2 * sum(LENGTHS)) if token != padding]
    opening, first, second = drawn[:OPENING], LENGTHS[0] - OPENING, LENGTHS[1] - OPENING
    rest = drawn[OPENING:]
    return [opening + rest[:first], opening + rest[first : first + second]]


def _logprobs(logits: Tensor, tokens: list[int], temperature: float) -> Tensor:
    """(T - 1,) log-probabilities of all tokens but the first, from the logits (T, V) of a game."""
    targets = torch.tensor(tokens[1:], device=logits.device)
    log_p = torch.log_softmax(logits[:-1].float() / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0].cpu()


@torch.no_grad()
def _own_logprobs(policy: Policy, games: list[list[int]]) -> list[Tensor]:
    """The oracle: the model's own forward of each game."""
    found: list[Tensor] = []
    with eager_attention(policy.model):
        for tokens in games:
            row = torch.tensor([tokens], device=policy.device)
            with torch.autocast(row.device.type, policy.compute, enabled=policy.compute.itemsize < 4):
                logits = policy.model(input_ids=row, use_cache=False).logits[0]
            found.append(_logprobs(logits, tokens, policy.temperature))
    return found


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


@torch.no_grad()
def _packed_logprobs(policy: Policy, games: list[list[int]]) -> list[Tensor]:
    """The log-probabilities after the opening, from one packed row."""
    trajectories: list[Trajectory] = []
    for tokens in games:
        game = Trajectory(Question("check", "check", "", ()))
        game.add_context(tokens[:OPENING])
        game.add_sampled(Completion(tokens[OPENING:], [0.0] * (len(tokens) - OPENING), True))
        trajectories.append(game)
    scored = policy(pack([trajectories], policy.device)).logprobs.cpu()
    return list(scored.split([len(tokens) - OPENING for tokens in games]))


@torch.no_grad()
def _cached_logprobs(policy: Policy, games: list[list[int]]) -> list[Tensor]:
    """The log-probabilities after the opening, from several forwards over the KV cache."""
    arena = Arena(policy, sum(LENGTHS))
    hidden: list[list[Tensor]] = [[] for _ in games]
    for begins, ends in pairwise(CACHED):
        row: list[int] = []
        chunks: list[Chunk] = []
        for game, first_row, begin, end in zip(games, (0, LENGTHS[0]), begins, ends, strict=True):
            chunks.append(Chunk(len(row), end - begin, first_row, end))
            row += game[begin:end]
        batch = ragged_batch(chunks, policy.attention.decode, policy.device, arena.keys, arena.values)
        tokens = torch.tensor([row], device=policy.device)
        states = policy.hidden_states(tokens, position_ids=batch.positions[None], ragged=batch.attend)[0]
        for of_game, part in zip(hidden, states.split([chunk.count for chunk in chunks]), strict=True):
            of_game.append(part)
    found: list[Tensor] = []
    for game, parts in zip(games, hidden, strict=True):
        logits = policy.logits(torch.cat(parts)[OPENING - 1 :])
        found.append(_logprobs(logits, game[OPENING - 1 :], policy.temperature))
    return found


def _compare(policy: Policy, what: str, found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference in nats. Raises UsageError if it exceeds rounding in the compute dtype."""
    own = torch.cat([logprobs[OPENING - 1 :] for logprobs in expected])
    difference = (torch.cat(found) - own).abs()
    largest = float(difference.max())
    if policy.compute.itemsize < 4:
        right = float(difference.mean()) <= MEAN_LIMIT_16_BITS
    else:
        right = largest <= FLOAT32_LIMIT
    if not right:  # also when it is NaN
        raise unsupported(
            policy.model.config,
            f"the log-probabilities of {what} differ by up to {largest:.2g} nats from its own",
        )
    return largest
