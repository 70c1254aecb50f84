"""Compare packed rows and the KV cache with a model's own forward, once when it is loaded.

The oracle is the model's own forward with eager attention on the same weights. It computes each game alone
and without a cache.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prompt_r1.engine.kv_cache import BLOCK_SIZE, BlockPool, TokenSequence
from prompt_r1.engine.paged_attention import PagedBatch
from prompt_r1.errors import first_line, is_out_of_memory
from prompt_r1.model import attention
from prompt_r1.model.loading import unsupported
from prompt_r1.model.packing import pack
from prompt_r1.model.policy import Policy
from prompt_r1.types import Question, Trajectory

OPENING = 5  # Both games begin with the same 5 tokens.
# Sliding windows have 4 tokens during the check, because the games are shorter than the model's own windows.
WINDOW = 4
LENGTHS = (18, 13)  # the tokens of the two games
# A game is cached in three forwards: tokens 0 to 8 (a prompt), token 9 alone, and the rest.
CACHED = (0, 9, 10)
# The largest difference of one log-probability in float32, and the largest mean difference in 16 bits.
# Supported models with large random weights differ by up to 4e-5 in float32, and by 0.001 to 0.054 in the
# mean in bfloat16.
FLOAT32_LIMIT = 1e-3
MEAN_LIMIT_16_BITS = 0.2


@torch.no_grad()
def check_model(policy: Policy) -> float:
    """Raise UsageError unless packed games and cached turns have the model's own log-probabilities.

    Returns the largest difference in nats.
    """
    model = policy.model
    games = _random_games(policy)
    with _short_windows(model):
        try:
            own = [_logprobs(policy, game, _own_logits(policy, game)) for game in games]
            cached = [_logprobs(policy, game, _cached_logits(policy, game)) for game in games]
            row = pack([[_as_trajectory(game) for game in games]], policy.device)
            packed = policy(row).logprobs.cpu()
        except Exception as error:  # An unknown model may raise anything.
            if is_out_of_memory(error):
                raise
            cause = f"{type(error).__name__}: {first_line(error)[:200]}"
            raise unsupported(model.config, f"its forward fails ({cause})") from None
    expected = torch.cat(own)
    in_cache = _difference(policy, "turns over the KV cache", torch.cat(cached), expected)
    in_row = _difference(policy, "games packed into one row", packed, expected)
    return max(in_cache, in_row)


def _random_games(policy: Policy) -> list[list[int]]:
    """The tokens of two games with the same opening."""
    # Models may treat the padding token in a special way, so the games do not contain it.
    text = policy.model.config.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    vocabulary = [token for token in range(policy.vocabulary) if token != padding]
    rng = random.Random(0)
    opening = rng.choices(vocabulary, k=OPENING)
    return [opening + rng.choices(vocabulary, k=length - OPENING) for length in LENGTHS]


def _as_trajectory(tokens: list[int]) -> Trajectory:
    """The tokens as a game. All tokens after the opening are the agent's."""
    sampled = [position >= OPENING for position in range(len(tokens))]
    return Trajectory(Question("check", "check", "", ()), tokens, sampled)


def _difference(policy: Policy, what: str, found: Tensor, expected: Tensor) -> float:
    """The largest difference in nats. Raises UsageError if rounding does not explain the differences."""
    difference = (found - expected).abs()
    largest = float(difference.max())
    if policy.compute_dtype.itemsize < 4:
        is_right = float(difference.mean()) <= MEAN_LIMIT_16_BITS
    else:
        is_right = largest <= FLOAT32_LIMIT
    if not is_right:  # A difference of NaN is not right either.
        cause = f"the log-probabilities of {what} differ by up to {largest:.2g} nats from its own"
        raise unsupported(policy.model.config, cause)
    return largest


def _logprobs(policy: Policy, game: list[int], logits: Tensor) -> Tensor:
    """The log-probabilities of a game's tokens after the opening. `logits`: (T, V), of all tokens."""
    log_p = torch.log_softmax(logits[OPENING - 1 : -1].float() / policy.temperature, -1)
    targets = torch.tensor(game[OPENING:], device=logits.device)
    return log_p.gather(1, targets[:, None])[:, 0].cpu()


def _own_logits(policy: Policy, game: list[int]) -> Tensor:
    """The logits (T, V) of the oracle: the model's own forward.

    Rows of the head beyond the vocabulary are left out.
    """
    row = torch.tensor([game], device=policy.device)
    with eager_attention(policy.model), policy.autocast():
        logits: Tensor = policy.model(input_ids=row, use_cache=False).logits[0]
    return logits[:, : policy.vocabulary]


def _cached_logits(policy: Policy, game: list[int]) -> Tensor:
    """The logits (T, V) of several forwards over the KV cache."""
    block_size = BLOCK_SIZE["cuda"] if policy.device.type == "cuda" else 8
    pool = BlockPool(policy, blocks=3, block_size=block_size)
    sequence = TokenSequence(0)
    pool.allocate(sequence, len(game))
    hidden: list[Tensor] = []
    for begin, end in pairwise([*CACHED, len(game)]):
        new = game[begin:end]
        hidden.append(policy.hidden_states(PagedBatch({sequence: new}, pool)))
        sequence.tokens += new
    return policy.logits(torch.cat(hidden))


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shorten long sliding windows inside the context, so that short games exceed them."""
    parts: list[Any] = [model.config, model.config.get_text_config(), *model.modules()]
    with ExitStack() as restore:
        for part in parts:
            window = getattr(part, "sliding_window", None)
            if isinstance(window, int) and window > WINDOW:
                restore.callback(setattr, part, "sliding_window", window)
                part.sliding_window = WINDOW
        yield


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model use the eager attention of transformers inside the context."""
    model.set_attn_implementation("eager")
    if model.config._attn_implementation != "eager":
        raise NotImplementedError("its attention cannot be replaced")
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)
